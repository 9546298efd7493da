//! `add`: the sum of an activation `a` `[rows, n]` (f32 or the act dtype) and the residual stream `[rows, n]` (f32).
//!
//! Output `[rows, n]` f32. One task for each column tile.

use crate::abi::{mpk_add_params, mpk_task_add, params_words};
use crate::registry::{GpuSite, Registration};
use crate::tasks::contract::{self, replicated};
use crate::tasks::linear_family::{gpu_float, gpu_rows_contiguous};
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
    let ([a, residual], [out]) = (site.inputs, site.outputs) else {
        return Err("it must have two inputs and one output".to_string());
    };
    gpu_rows_contiguous([a, residual, out])?;
    if gpu_float(residual)? != "MPK_F32" || gpu_float(out)? != "MPK_F32" {
        return Err("residual and output must be f32".to_string());
    }
    Ok(format!("mpk::gpu::Add<{}>", gpu_float(a)?))
}

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

    fn may_overwrite(&self) -> &'static [(usize, usize)] {
        &[(1, 0), (0, 0)]
    }

    fn is_pure(&self) -> bool {
        true
    }

    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        let [a, residual] = contract::inputs(op)?;
        contract::matrix(a)?;
        contract::float(a)?;
        contract::dtype(residual, DType::F32)?;
        if a.ty.dims != residual.ty.dims || a.ty.rows != residual.ty.rows {
            return Err(OpError(format!(
                "`{}` {:?} and `{}` {:?} must have the same dimensions",
                a.name, a.ty.dims, residual.name, residual.ty.dims
            )));
        }
        Ok(vec![TensorType { dtype: DType::F32, ..a.ty.clone() }])
    }

    fn shard(&self, op: &OpView<'_>, _world: u32) -> Result<ShardRule, OpError> {
        let [a, residual] = contract::inputs(op)?;
        if a.sharding == residual.sharding && contract::split_columns(a.sharding).is_some() {
            return Ok(ShardRule { inputs: vec![Need::AsIs; 2], outputs: vec![a.sharding.clone()] });
        }
        Ok(replicated(2, 1))
    }

    fn partition(&self, op: &LocalOp<'_>, target: &Target) -> Result<Partition, OpError> {
        let (rows, columns) = contract::local_matrix(&op.outputs[0])?;
        let params = mpk_add_params { rows_kind: contract::rows_kind(op.outputs[0].rows) };
        let tasks = target
            .column_tiles(columns, 1)
            .into_iter()
            .map(|tile| {
                let region = Region::whole(&[rows, columns]).with(1, tile.start, tile.end);
                TaskSpec {
                    reads: [Access::new(0, region), Access::new(1, region)].into_iter().collect(),
                    writes: [Access::new(0, region)].into_iter().collect(),
                    args: [0; 8],
                    cost: region.volume() * (8 + op.inputs[0].dtype.size()),
                }
            })
            .collect();
        Ok(Partition { params: params_words(&params), scratch_bytes: 0, tasks })
    }
}

#[cfg(test)]
mod reference;
#[cfg(test)]
mod test;
