//! `add`: the sum of an activation `a` `[rows, n]` (f32 or the act dtype) and the residual stream `[rows, n]` (f32).
//!
//! Output `[rows, n]` f32. One task for each column tile.

use crate::abi::{mpk_add_params, mpk_task_add, params_words};
use crate::registry::Registration;
use crate::tasks::contract::{self, replicated};
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
    run: mpk_task_add,
    ready: None,
    gpu: None,
};

/// Contract of `add`.
#[derive(Debug)]
pub struct Add;

impl TaskType for Add {
    fn name(&self) -> &'static str {
        "add"
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
