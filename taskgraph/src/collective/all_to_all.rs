//! `all_to_all`: changes the split of a tensor.

use super::allgather::{own_moves, to_peers};
use super::contract::{Buffer, Collective, CollectiveOp, Exchange, Lowered, Operand, Placed, Step};
use super::moves::{local_copies, moves, rows_kind_of_blocks, split_dim};
use super::slice::{SHARD, shard_attribute, shard_attrs};
use crate::attribute::Attribute;
use crate::op_graph::Attrs;
use crate::split::Sharding;
use crate::task_type::{Need, OpError, OpView, OperandView, ShardRule, TensorType};

/// `all_to_all(x)`: changes the split of a tensor. Each rank sends to every other rank the block that both hold a share of.
/// Attribute `shard`, written as for a tensor: the split of the result.
#[derive(Debug)]
pub struct AllToAll;

impl Collective for AllToAll {
    fn name(&self) -> &'static str {
        "all_to_all"
    }

    fn attributes(&self) -> &'static [Attribute] {
        SHARD
    }

    fn infer(&self, op: &OpView<'_>) -> Result<TensorType, OpError> {
        let [input] = op.inputs.as_slice() else {
            return Err(OpError(format!("all_to_all takes one input, but {} are given", op.inputs.len())));
        };
        shard_attribute(op)?;
        Ok(input.ty.clone())
    }

    fn shard(&self, op: &OpView<'_>, world: u32) -> Result<ShardRule, OpError> {
        if world > 1 && split_dim(op.inputs[0].sharding).is_none() {
            return Err(OpError(format!(
                "`all_to_all` takes a split tensor, but `{}` is not split; use `slice`, or leave the operator out",
                op.inputs[0].name
            )));
        }
        Ok(ShardRule { inputs: vec![Need::AsIs], outputs: vec![shard_attribute(op)?] })
    }

    fn reshards(&self, tensor: &OperandView<'_>, to: &Sharding) -> Option<Attrs> {
        (split_dim(tensor.sharding).is_some() && split_dim(to).is_some()).then(|| shard_attrs(to))
    }

    fn lower(&self, op: &CollectiveOp<'_>) -> Result<Lowered, OpError> {
        let (input, output, world) = (&op.view.inputs[0], &op.view.outputs[0], op.world());
        let (from, to, dims) = (input.sharding, output.sharding, &input.ty.dims);
        let lists = moves(dims, from, to, world);
        let rows_kind = rows_kind_of_blocks(dims, &[split_dim(from), split_dim(to)], input.ty.rows);
        let last = dims.len() - 1;
        let mut lowered = Lowered::default();
        let mut target = Operand::Output;
        if world > 1 {
            // Ranks may hold blocks of different sizes, but memory in the symmetric heap is the same on all ranks. So the output
            // is the beginning of a buffer with room for the largest block.
            let room: Vec<u32> = (0..dims.len())
                .map(|d| (0..world).map(|r| to.local_dims(dims, r, world)[d]).max().unwrap_or(0) as u32)
                .collect();
            let (dtype, suffix) = (input.ty.dtype, ".exchanged");
            lowered.buffers.push(Buffer { suffix, dtype, dims: room, by_sender: false });
            let placed = Placed { dim: split_dim(to).unwrap_or(0), first: vec![0; world as usize] };
            lowered.output_in_buffer = Some((0, placed));
            target = Operand::Buffer(0);
            lowered.steps.push(Step::Exchange(Exchange {
                source: Operand::Input(0),
                target,
                rows_kind,
                sends: to_peers(&lists, world),
                rows_per_index: 0,
                between_all: true,
                completes: None,
                beside_producer: true,
            }));
        }
        let operands = (Operand::Input(0), target);
        let copies = local_copies(&own_moves(&lists), operands, last, rows_kind, &op.options.target);
        lowered.steps.push(Step::Tasks(copies));
        Ok(lowered)
    }
}
