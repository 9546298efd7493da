//! `allgather`: gives every rank all of a split tensor.

use super::contract::{Collective, CollectiveOp, Exchange, Lowered, Operand, Placed, Send, Step};
use super::moves::{
    Move, PIECE_BYTES, in_pieces, local_copies, moves, overlaps, rows_kind_of_blocks, split_dim,
};
use crate::op_graph::{Attrs, Role, Rows};
use crate::region::Region;
use crate::split::Sharding;
use crate::task_type::{Need, OpError, OpView, OperandView, ShardRule, TensorType};
use crate::tuning::Knob;

/// `allgather(x)`: gives every rank all of a split tensor.
#[derive(Debug)]
pub struct AllGather;

impl Collective for AllGather {
    fn name(&self) -> &'static str {
        "allgather"
    }

    fn knobs(&self) -> &'static [&'static Knob] {
        &[&PIECE_BYTES]
    }

    fn infer(&self, op: &OpView<'_>) -> Result<TensorType, OpError> {
        match op.inputs.as_slice() {
            [input] => Ok(input.ty.clone()),
            other => Err(OpError(format!("allgather takes one input, but {} are given", other.len()))),
        }
    }

    fn shard(&self, op: &OpView<'_>, world: u32) -> Result<ShardRule, OpError> {
        let input = &op.inputs[0];
        if world > 1 && split_dim(input.sharding).is_none() {
            return Err(OpError(format!(
                "`allgather` takes a split tensor, but `{}` is not split; leave the operator out",
                input.name
            )));
        }
        Ok(ShardRule { inputs: vec![Need::AsIs], outputs: vec![Sharding::Replicated] })
    }

    fn reshards(&self, tensor: &OperandView<'_>, to: &Sharding) -> Option<Attrs> {
        (split_dim(tensor.sharding).is_some() && *to == Sharding::Replicated).then(Attrs::new)
    }

    fn lower(&self, op: &CollectiveOp<'_>) -> Result<Lowered, OpError> {
        let (input, world) = (&op.view.inputs[0], op.world());
        let dims = &input.ty.dims;
        let lists = moves(dims, input.sharding, &Sharding::Replicated, world);
        let rows_kind = rows_kind_of_blocks(dims, &[split_dim(input.sharding)], input.ty.rows);
        // The producer writes its block in place, if it is a single block that no other rank writes too.
        let single = matches!(input.sharding, Sharding::Split { parts, .. } if parts.len() == 1);
        // A later operator may write a persistent input while a put still reads it. So puts read the copy in the output.
        let staged = matches!(input.role, Role::Persistent { .. });
        let placed =
            (op.can_place && single && !staged && !overlaps(dims, input.sharding, world)).then(|| Placed {
                dim: split_dim(input.sharding).unwrap_or(0),
                first: (0..world)
                    .map(|r| input.sharding.ranges(r, world).first().map_or(0, |range| range.start as u32))
                    .collect(),
            });
        let mut steps = Vec::new();
        if world > 1 {
            let mut sends = to_peers(&pieces_of(op, &lists, rows_kind), world);
            if staged {
                let all = sends.iter_mut().flatten();
                all.for_each(|send| send.source = send.source.map(|_| send.target));
            }
            steps.push(Step::Exchange(Exchange {
                source: if staged { Operand::Output } else { Operand::Input(0) },
                target: Operand::Output,
                rows_kind,
                sends,
                rows_per_index: 1,
                between_all: true,
                completes: None,
                beside_producer: false,
            }));
        }
        if placed.is_none() {
            let own = own_moves(&lists);
            let last = dims.len() - 1;
            let operands = (Operand::Input(0), Operand::Output);
            let copies = Step::Tasks(local_copies(&own, operands, last, rows_kind, &op.options.target));
            let place = if staged { 0 } else { steps.len() };
            steps.insert(place, copies);
        }
        Ok(Lowered { input_in_output: placed, steps, ..Lowered::default() })
    }
}

/// What each rank sends, in pieces for many workers. Only where stores reach all ranks: elsewhere, each send is a message, which costs more
/// than a worker's time.
fn pieces_of(op: &CollectiveOp<'_>, lists: &[Vec<Move>], rows_kind: u32) -> Vec<Vec<Move>> {
    let (size, machine) = (op.view.inputs[0].ty.dtype.size(), &op.options.target);
    if !op.options.all_within_reach() {
        return lists.to_vec();
    }
    let counts_rows = rows_kind != super::moves::rows_kind(Rows::Fixed);
    let pieces = |(rank, list): (usize, &Vec<Move>)| {
        let leaves = |m: &&Move| m.to as usize != rank;
        let most = machine.max_tiles / list.iter().filter(leaves).count().max(1) as u32;
        let cut = |m: &Move| in_pieces(*m, size, most, counts_rows, machine);
        list.iter().filter(leaves).flat_map(cut).collect()
    };
    lists.iter().enumerate().map(pieces).collect()
}

/// What each rank sends to the others; all sends to a receiver trigger one event of it. A rank without data for a peer signals,
/// so that every rank hears from every other rank.
pub(super) fn to_peers(lists: &[Vec<Move>], world: u32) -> Vec<Vec<Send>> {
    let mut all = Vec::with_capacity(lists.len());
    for (rank, list) in lists.iter().enumerate() {
        let mut sends: Vec<Send> = list
            .iter()
            .filter(|m| m.to as usize != rank)
            .map(|m| Send { to: m.to, source: Some(m.source), target: m.target, event: 0 })
            .collect();
        for peer in (0..world).filter(|&p| p as usize != rank) {
            if !sends.iter().any(|s| s.to == peer) {
                sends.push(Send { to: peer, source: None, target: Region::whole(&[]), event: 0 });
            }
        }
        // Each rank begins with the rank after it. So ranks are alike, and no rank receives all sends at once.
        sends.sort_by_key(|s| (s.to + world - rank as u32) % world);
        all.push(sends);
    }
    all
}

/// The blocks that each rank already holds.
pub(super) fn own_moves(lists: &[Vec<Move>]) -> Vec<Vec<Move>> {
    let own = |(rank, list): (usize, &Vec<Move>)| {
        list.iter().filter(|m| m.to as usize == rank).copied().collect::<Vec<_>>()
    };
    lists.iter().enumerate().map(own).collect()
}
