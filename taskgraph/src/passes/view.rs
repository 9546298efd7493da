//! Operators in the form that their contracts use.

use crate::op_graph::{Op, OpGraph, Tensor};
use crate::task_type::{OpView, OperandView, TensorType};

fn operand(tensor: &Tensor) -> OperandView<'_> {
    OperandView {
        name: &tensor.name,
        ty: TensorType { dtype: tensor.dtype, dims: tensor.dims.clone(), rows: tensor.rows },
        sharding: &tensor.sharding,
        role: &tensor.role,
    }
}

/// The view of an operator whose tensor numbers have been checked.
pub(crate) fn op_view<'a>(graph: &'a OpGraph, op: &'a Op) -> OpView<'a> {
    OpView {
        name: &op.name,
        attrs: &op.attrs,
        inputs: op.inputs.iter().map(|&t| operand(&graph.tensors[t as usize])).collect(),
        outputs: op.outputs.iter().map(|&t| operand(&graph.tensors[t as usize])).collect(),
        capacity: graph.capacity,
    }
}
