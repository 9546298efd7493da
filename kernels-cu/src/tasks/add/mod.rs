//! `add`: the sum of an activation `a` `[rows, n]` (f32 or the act dtype), the residual stream `[rows, n]` (f32) and up to two
//! more summands `[rows, n]` (f32), added in this order: `((residual + a) + c) + d`.
//!
//! Output `[rows, n]` f32, or the act dtype if the inputs are the parts of a product. One task per column tile.
//!
//! The expansion of a product (`src/tasks/wide.rs`) may set the attribute `first_row`: the summands are then the rows of the output from
//! this one on, and other tasks write the rows before it.
//!
//! A task may instead have whole rows and also norm them, as `wide_rows` does ([`TaskType::sums_rows`]). The last input is then the norm
//! weight, the second output is the rows in `MPK_LAYOUT_WIDE`, and the parameters are `mpk_add_rows_params`.

use crate::abi::{mpk_add_params, mpk_add_rows_params, mpk_operand, mpk_task_add, params_words};
use crate::registry::{GpuSite, Registration};
use crate::tasks::contract::{self, replicated};
use crate::tasks::operand::{gpu_float, gpu_rows_contiguous};
use crate::tasks::wide_rows::gpu_pieces;
use std::sync::Arc;
use taskgraph::task_type::{
    Access, LocalOp, Need, OpError, OpView, Partition, ShardRule, TaskSpec, TensorType,
};
use taskgraph::{DType, Region, Target, TaskType};

/// Registry entry.
pub const REGISTRATION: Registration = Registration {
    name: "add",
    core_number: None,
    contract: Some(|| Arc::new(Add)),
    run: Some(mpk_task_add),
    ready: None,
    gpu: Some(gpu),
};

/// The GPU code.
fn gpu(site: &GpuSite<'_>) -> Result<String, String> {
    if let ([summands @ .., norm], [sum, normed]) = (site.inputs, site.outputs) {
        return gpu_rows(site, summands, norm, sum, normed);
    }
    let ([a, others @ ..], [out]) = (site.inputs, site.outputs) else {
        return Err("it must have inputs and one output".to_string());
    };
    if others.is_empty() || others.len() >= MOST_SUMMANDS {
        return Err(format!("it must have 2 to {MOST_SUMMANDS} inputs"));
    }
    gpu_rows_contiguous(site.inputs.iter().chain([out]))?;
    gpu_float(out)?;
    for operand in others {
        if gpu_float(operand)? != "MPK_F32" {
            return Err("all summands except the first must be f32".to_string());
        }
    }
    Ok(match others.len() {
        1 => format!("mpk::gpu::Add<{}>", gpu_float(a)?),
        n => format!("mpk::gpu::Add<{}, {}>", gpu_float(a)?, n + 1),
    })
}

/// The GPU code that also norms the rows.
fn gpu_rows(
    site: &GpuSite<'_>,
    summands: &[mpk_operand],
    norm: &mpk_operand,
    sum: &mpk_operand,
    normed: &mpk_operand,
) -> Result<String, String> {
    gpu_rows_contiguous(site.inputs.iter().chain([sum]))?;
    let words = size_of::<mpk_add_rows_params>() / 4;
    let bytes = bytemuck::cast_slice(site.params.get(..words).ok_or("its parameters are too few")?);
    let params: mpk_add_rows_params = bytemuck::pod_read_unaligned(bytes);
    for operand in summands.iter().chain([sum]) {
        if gpu_float(operand)? != "MPK_F32" {
            return Err("it must sum f32 and norm the rows".to_string());
        }
    }
    if !(2..=MOST_SUMMANDS).contains(&summands.len()) || params.rows.source != 1 || params.sum.first_row != 0
    {
        return Err(format!("it must sum 2 to {MOST_SUMMANDS} matrices and norm the rows"));
    }
    Ok(format!(
        "mpk::gpu::AddRows<{}, {}, {}, {}, {}>",
        summands.len(),
        gpu_float(norm)?,
        gpu_float(normed)?,
        gpu_pieces(params.rows.columns, sum.dtype, 1),
        normed.dims[3],
    ))
}

/// Maximum number of inputs. If several tasks share the k of a product, it has at most this many parts.
pub const MOST_SUMMANDS: usize = 4;

/// Contract of `add`.
#[derive(Debug)]
pub struct Add;

impl TaskType for Add {
    fn name(&self) -> &'static str {
        "add"
    }

    fn is_sum(&self) -> bool {
        true
    }

    /// If a task has whole rows, it has the code of the norm too.
    fn sums_rows(&self, op: &LocalOp<'_>) -> bool {
        let of_all =
            contract::attr_u32(op.global.attrs, "first_row").is_ok_and(|first| first.unwrap_or(0) == 0);
        of_all && op.inputs.iter().chain(&op.outputs).all(|ty| ty.dtype == DType::F32)
    }

    fn may_overwrite(&self) -> &'static [(usize, usize)] {
        &[(1, 0), (0, 0)]
    }

    fn is_pure(&self) -> bool {
        true
    }

    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        contract::num_inputs(op, 2, MOST_SUMMANDS)?;
        let (a, others) = (&op.inputs[0], &op.inputs[1..]);
        contract::matrix(a)?;
        contract::float(a)?;
        for other in others {
            contract::dtype(other, DType::F32)?;
            if a.ty.dims == other.ty.dims && a.ty.rows != other.ty.rows {
                return Err(contract::other_rows(a, other));
            }
            if a.ty.dims != other.ty.dims {
                return Err(OpError(format!(
                    "`{}` {:?} and `{}` {:?} must have the same dimensions",
                    a.name, a.ty.dims, other.name, other.ty.dims
                )));
            }
        }
        Ok(vec![TensorType { dtype: DType::F32, ..a.ty.clone() }])
    }

    fn shard(&self, op: &OpView<'_>, _world: u32) -> Result<ShardRule, OpError> {
        let a = &op.inputs[0];
        let alike = op.inputs.iter().all(|other| other.sharding == a.sharding);
        if alike && contract::split_columns(a.sharding).is_some() {
            return Ok(ShardRule {
                inputs: vec![Need::AsIs; op.inputs.len()],
                outputs: vec![a.sharding.clone()],
            });
        }
        Ok(replicated(op.inputs.len(), 1))
    }

    fn partition(&self, op: &LocalOp<'_>, target: &Target) -> Result<Partition, OpError> {
        let (rows, columns) = contract::local_matrix(&op.outputs[0])?;
        let first_row = contract::attr_u32(op.global.attrs, "first_row")?.unwrap_or(0);
        let (summed, _) = contract::local_matrix(&op.inputs[0])?;
        if first_row.checked_add(summed) != Some(rows) {
            return Err(OpError(format!("{summed} rows from row {first_row} are not the last of {rows}")));
        }
        let params = mpk_add_params { rows_kind: contract::rows_kind(op.outputs[0].rows), first_row };
        let tasks = target
            .column_tiles(columns, 1)
            .into_iter()
            .map(|tile| {
                let region = Region::whole(&[summed, columns]).with(1, tile.start, tile.end);
                TaskSpec {
                    reads: (0..op.inputs.len()).map(|input| Access::new(input as u8, region)).collect(),
                    writes: [Access::new(0, region.with(0, first_row, rows))].into_iter().collect(),
                    args: [0; 8],
                    cost: region.volume() * (4 * op.inputs.len() as u64 + op.inputs[0].dtype.size()),
                }
            })
            .collect();
        // On the CPU target, room for a row before it is rounded.
        let rounded = op.outputs[0].dtype != DType::F32;
        let scratch_bytes = if rounded { (4 * u64::from(columns)).next_multiple_of(64) } else { 0 };
        Ok(Partition { params: params_words(&params), scratch_bytes, tasks })
    }
}

#[cfg(test)]
mod reference;
#[cfg(test)]
mod rows_test;
#[cfg(test)]
mod test;
