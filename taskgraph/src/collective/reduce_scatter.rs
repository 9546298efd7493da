//! `reduce_scatter`: gives each rank its share of the sum of a partial tensor over the ranks.

use super::allreduce::{SUM, can_sum, check_partial, sum_attrs, sum_type};
use super::contract::{Buffer, Collective, CollectiveOp, Exchange, Lowered, Operand, Send, Step, TaskStep};
use super::moves::{Move, local_copies, moves, rows_kind_of_blocks, split_dim};
use super::slice::{SHARD, shard_attribute, shard_attrs};
use crate::attribute::Attribute;
use crate::op_graph::Attrs;
use crate::region::Region;
use crate::split::Sharding;
use crate::task_graph::core_types;
use crate::task_type::{Access, Need, OpError, OpView, OperandView, ShardRule, TaskSpec, TensorType};

/// `reduce_scatter(x)`: the sum of a partial tensor `[rows, columns]` over the ranks, in rank order. Each rank gets its share of the
/// result. The summands may be f32, bf16 or f16; they are summed in f32. Attributes: `shard`, written as for a tensor, is the split of the
/// result; `dtype` (`f32`, `bf16`, `f16`) is the element type of the result, f32 by default.
#[derive(Debug)]
pub struct ReduceScatter;

const ATTRIBUTES: &[Attribute] = &[SHARD[0], SUM[0]];

impl Collective for ReduceScatter {
    fn name(&self) -> &'static str {
        "reduce_scatter"
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, op: &OpView<'_>) -> Result<TensorType, OpError> {
        let [input] = op.inputs.as_slice() else {
            return Err(OpError(format!(
                "reduce_scatter takes one input, but {} are given",
                op.inputs.len()
            )));
        };
        shard_attribute(op)?;
        Ok(TensorType { dtype: sum_type(self.name(), op)?, ..input.ty.clone() })
    }

    fn shard(&self, op: &OpView<'_>, world: u32) -> Result<ShardRule, OpError> {
        check_partial(self.name(), op, world)?;
        Ok(ShardRule { inputs: vec![Need::AsIs], outputs: vec![shard_attribute(op)?] })
    }

    fn reshards(&self, tensor: &OperandView<'_>, to: &Sharding) -> Option<Attrs> {
        let sums = can_sum(tensor) && split_dim(to).is_some();
        sums.then(|| shard_attrs(to).into_iter().chain(sum_attrs(tensor)).collect())
    }

    fn lower(&self, op: &CollectiveOp<'_>) -> Result<Lowered, OpError> {
        let (input, output, world) = (&op.view.inputs[0], &op.view.outputs[0], op.world());
        let dims = &input.ty.dims;
        // Every rank has a summand for everything, so all other ranks send what a rank needs.
        let shares = moves(dims, &Sharding::Replicated, output.sharding, world);
        let rows_kind = rows_kind_of_blocks(dims, &[split_dim(output.sharding)], input.ty.rows);
        let mut target = op.options.target.clone();
        target.max_tiles = (2 * target.max_tiles / world).max(1);
        let cut = |m: &Move| -> Vec<Move> {
            let columns = |r: Region, from: u32, to: u32| r.with(1, r.lo[1] + from, r.lo[1] + to);
            let width = m.source.hi[1] - m.source.lo[1];
            let tiles = target.column_tiles(width, 1).into_iter();
            tiles
                .map(|t| Move {
                    to: m.to,
                    source: columns(m.source, t.start, t.end),
                    target: columns(m.target, t.start, t.end),
                })
                .collect()
        };
        let shares: Vec<Vec<Move>> = shares.iter().map(|list| list.iter().flat_map(&cut).collect()).collect();
        if world == 1 && input.ty.dtype == output.ty.dtype {
            let operands = (Operand::Input(0), Operand::Output);
            let copies = local_copies(&shares, operands, 1, rows_kind, &target);
            return Ok(Lowered { steps: vec![Step::Tasks(copies)], ..Lowered::default() });
        }
        let room: Vec<u32> = (0..2)
            .map(|d| {
                let held = |r| output.sharding.local_dims(dims, r, world)[d];
                (0..world).map(held).max().unwrap_or(0) as u32
            })
            .collect();
        let tasks = shares.iter().map(|list| {
            let sum = |m: &Move| {
                let mut received = m.target;
                received.lo.rotate_right(1);
                received.hi.rotate_right(1);
                let received = received.with(0, 0, world);
                let mut task = TaskSpec::default();
                task.reads.push(Access::new(0, m.source));
                task.reads.push(Access::new(1, if world == 1 { m.source } else { received }));
                task.writes.push(Access::new(0, m.target));
                task.cost = m.target.volume() * (input.ty.dtype.size() * u64::from(world) + 8);
                task
            };
            list.iter().map(sum).collect()
        });
        let reduce = Step::Tasks(TaskStep {
            task_type: core_types::REDUCE,
            inputs: vec![Operand::Input(0), if world == 1 { Operand::Input(0) } else { Operand::Buffer(0) }],
            outputs: vec![Operand::Output],
            params: vec![world, 0, rows_kind, 0],
            rank_params: Vec::new(),
            rank_param: Some(1),
            stacked: (world == 1).then_some(1),
            tasks: tasks.collect(),
        });
        if world == 1 {
            return Ok(Lowered { steps: vec![reduce], ..Lowered::default() });
        }
        let sends = (0..world).map(|rank| {
            let mut sends = Vec::new();
            for (peer, list) in shares.iter().enumerate().filter(|(peer, _)| *peer != rank as usize) {
                for (event, m) in list.iter().enumerate() {
                    let mut slot = m.target;
                    slot.lo.rotate_right(1);
                    slot.hi.rotate_right(1);
                    sends.push(Send {
                        to: peer as u32,
                        source: Some(m.source),
                        target: slot.with(0, rank, rank + 1),
                        event: event as u32,
                    });
                }
            }
            sends
        });
        let exchange = Step::Exchange(Exchange {
            source: Operand::Input(0),
            target: Operand::Buffer(0),
            rows_kind,
            sends: sends.collect(),
            rows_per_index: 0,
            between_all: true,
            completes: None,
            beside_producer: true,
        });
        let dims = vec![world, room[0], room[1]];
        let received = Buffer { suffix: ".received", dtype: input.ty.dtype, dims, by_sender: true };
        Ok(Lowered { buffers: vec![received], steps: vec![exchange, reduce], ..Lowered::default() })
    }
}
