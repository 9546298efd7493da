//! `slice`: each rank takes its share of a replicated tensor. Nothing is sent.

use super::contract::{Collective, CollectiveOp, Lowered, Operand, Placed, Step};
use super::moves::{local_copies, moves, rows_kind_of_blocks, split_dim};
use crate::attribute::{Attribute, AttributeKind};
use crate::json::{shard_from_value, shard_to_value};
use crate::op_graph::{Attrs, Role};
use crate::split::Sharding;
use crate::task_type::{Need, OpError, OpView, OperandView, ShardRule, TensorType};

/// `slice(x)`: each rank's share of a replicated tensor. Attribute `shard`, written as for a tensor: the split of the result.
#[derive(Debug)]
pub struct Slice;

/// The attribute `shard` of collectives with a split result: a split, written as a tensor's `shard`.
pub(super) const SHARD: &[Attribute] = &[Attribute::new("shard", AttributeKind::Any)];

/// The sharding in the attribute `shard`.
pub(super) fn shard_attribute(op: &OpView<'_>) -> Result<Sharding, OpError> {
    let Some(value) = op.attrs.get("shard") else {
        return Err(OpError(
            "needs the attribute `shard`, such as {\"dim\": 1, \"kind\": \"even\"}: how the result is split"
                .into(),
        ));
    };
    let dims = &op.inputs[0].ty.dims;
    let sharding = shard_from_value(value, dims, "attribute `shard`").map_err(|e| OpError(e.to_string()))?;
    match sharding {
        Sharding::Split { .. } => Ok(sharding),
        _ => Err(OpError(
            "the attribute `shard` must be a split, such as {\"dim\": 1, \"kind\": \"even\"}".into(),
        )),
    }
}

/// Attributes with this `shard`.
pub(super) fn shard_attrs(to: &Sharding) -> Attrs {
    Attrs::from_iter(shard_to_value(to).map(|value| ("shard".to_string(), value)))
}

impl Collective for Slice {
    fn name(&self) -> &'static str {
        "slice"
    }

    fn attributes(&self) -> &'static [Attribute] {
        SHARD
    }

    fn infer(&self, op: &OpView<'_>) -> Result<TensorType, OpError> {
        let [input] = op.inputs.as_slice() else {
            return Err(OpError(format!("slice takes one input, but {} are given", op.inputs.len())));
        };
        shard_attribute(op)?;
        Ok(input.ty.clone())
    }

    fn shard(&self, op: &OpView<'_>, _world: u32) -> Result<ShardRule, OpError> {
        Ok(ShardRule { inputs: vec![Need::Replicated], outputs: vec![shard_attribute(op)?] })
    }

    fn reshards(&self, tensor: &OperandView<'_>, to: &Sharding) -> Option<Attrs> {
        // The checkpoint's matrices are packed for the kernels, so they are split when they are loaded.
        let packed = matches!(tensor.role, Role::Weight { .. }) && tensor.ty.dims.len() == 2;
        (*tensor.sharding == Sharding::Replicated && split_dim(to).is_some() && !packed)
            .then(|| shard_attrs(to))
    }

    fn lower(&self, op: &CollectiveOp<'_>) -> Result<Lowered, OpError> {
        let (input, output, world) = (&op.view.inputs[0], &op.view.outputs[0], op.world());
        if let (Sharding::Split { dim, parts }, Role::Activation) = (output.sharding, output.role)
            && parts.len() == 1
            && !matches!(input.role, Role::Persistent { .. })
        {
            // A single block of existing data that no later operator writes, so nothing is copied.
            let first =
                |rank| output.sharding.ranges(rank, world).first().map_or(0, |range| range.start as u32);
            let placed = Placed { dim: *dim, first: (0..world).map(first).collect() };
            return Ok(Lowered { output_in_input: Some(placed), ..Lowered::default() });
        }
        let dims = &input.ty.dims;
        let lists = moves(dims, &Sharding::Replicated, output.sharding, world);
        let rows_kind = rows_kind_of_blocks(dims, &[split_dim(output.sharding)], input.ty.rows);
        let operands = (Operand::Input(0), Operand::Output);
        let copies = local_copies(&lists, operands, dims.len() - 1, rows_kind, &op.options.target);
        Ok(Lowered { steps: vec![Step::Tasks(copies)], ..Lowered::default() })
    }
}
