//! The operators that the builder itself knows: `allreduce` and `allgather`.

use crate::dtype::DType;
use crate::task_type::{OpError, OpView, TensorType};

/// `allreduce(x [, residual])`: the sum of a partial `[rows, columns]` f32 tensor over the ranks, in rank order,
/// plus the residual, once. Attribute `dtype` (`f32`, `bf16`, `f16`): element type of the result, f32 by default.
pub const ALLREDUCE: &str = "allreduce";
/// `allgather(x)`: all of a split tensor on every rank.
pub const ALLGATHER: &str = "allgather";
/// `add(branch, residual)`: where the branch is an allreduce that nobody else reads, it becomes the allreduce's
/// residual.
pub const ADD: &str = "add";

/// Output types of a collective; `None` where the operator is none.
pub(crate) fn infer_collective(op_type: &str, op: &OpView<'_>) -> Option<Result<Vec<TensorType>, OpError>> {
    match op_type {
        ALLREDUCE => Some(infer_allreduce(op)),
        ALLGATHER => Some(match op.inputs.as_slice() {
            [input] => Ok(vec![input.ty.clone()]),
            other => Err(OpError(format!("allgather takes one input, {} are given", other.len()))),
        }),
        _ => None,
    }
}

fn infer_allreduce(op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
    let Some(input) = op.inputs.first().filter(|_| op.inputs.len() <= 2) else {
        return Err(OpError(format!(
            "allreduce takes a tensor and possibly a residual, {} inputs are given",
            op.inputs.len()
        )));
    };
    if input.ty.dtype != DType::F32 {
        return Err(OpError(format!(
            "allreduce sums f32, `{}` is {}; let its producer write f32",
            input.name, input.ty.dtype
        )));
    }
    if input.ty.dims.len() != 2 {
        return Err(OpError(format!(
            "allreduce takes [rows, columns], `{}` is {:?}",
            input.name, input.ty.dims
        )));
    }
    let dtype = match op.attrs.get("dtype") {
        None => DType::F32,
        Some(value) => {
            serde_json::from_value::<DType>(value.clone()).ok().filter(|d| d.is_float()).ok_or_else(|| {
                OpError(format!("attribute `dtype` is {value}; f32, f16 and bf16 are possible"))
            })?
        }
    };
    if let Some(residual) = op.inputs.get(1)
        && (residual.ty.dims != input.ty.dims || residual.ty.dtype != DType::F32)
    {
        return Err(OpError(format!(
            "the residual `{}` is {} {:?}, the sum is f32 {:?}; they must agree",
            residual.name, residual.ty.dtype, residual.ty.dims, input.ty.dims
        )));
    }
    Ok(vec![TensorType { dtype, dims: input.ty.dims.clone(), rows: input.ty.rows }])
}
