//! An operator as one rank sees it.

use crate::task_type::{LocalOp, OpView, OperandView, TensorType};

/// The operator with the types of the parts that `rank` of `world` has.
pub(crate) fn local_op<'a>(view: &'a OpView<'a>, rank: u32, world: u32) -> LocalOp<'a> {
    let local = |operands: &[OperandView<'_>]| {
        operands
            .iter()
            .map(|o| TensorType { dims: o.sharding.local_dims(&o.ty.dims, rank, world), ..o.ty.clone() })
            .collect()
    };
    LocalOp { global: view, inputs: local(&view.inputs), outputs: local(&view.outputs), rank, world }
}
