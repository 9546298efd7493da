//! `silu_mul`: converts gate_up `[rows, 2n]` = `[gate | up]` to activation(gate) * up `[rows, n]` of the same type,
//! computed in f32 and rounded once. A rank that holds parts of gate and up must hold the same part of both.
//!
//! Attribute `activation`: `silu` (the default), `gelu-tanh` or `gelu`.

use crate::abi::{mpk_silu_mul_params, mpk_task_silu_mul, params_words};
use crate::registry::{GpuSite, Registration};
use crate::tasks::contract::{self, replicated};
use crate::tasks::operand::{gpu_float, gpu_rows_contiguous};
use std::sync::Arc;
use taskgraph::task_type::{
    Access, LocalOp, Need, OpError, OpView, Partition, ShardRule, TaskSpec, TensorType,
};
use taskgraph::words::counted;
use taskgraph::{Attribute, Region, Sharding, Target, TaskType};

#[cfg(test)]
pub(crate) mod reference;
#[cfg(test)]
mod test;

/// Registry entry.
pub const REGISTRATION: Registration = Registration {
    name: "silu_mul",
    core_number: None,
    contract: Some(|| Arc::new(SiluMul)),
    run: Some(mpk_task_silu_mul),
    ready: None,
    gpu: Some(gpu),
};

/// The GPU code.
fn gpu(site: &GpuSite<'_>) -> Result<String, String> {
    let ([gate, up], [out]) = (site.inputs, site.outputs) else {
        return Err("it must have two inputs and one output".to_string());
    };
    gpu_rows_contiguous([gate, up, out])?;
    if gate.dtype != out.dtype || up.dtype != out.dtype {
        return Err("gate, up and output must have one type".to_string());
    }
    Ok(format!("mpk::gpu::SiluMul<{}>", gpu_float(out)?))
}

/// Contract of `silu_mul`.
#[derive(Debug)]
pub struct SiluMul;

const ATTRIBUTES: &[Attribute] = &[contract::ACTIVATION];

impl TaskType for SiluMul {
    fn name(&self) -> &'static str {
        "silu_mul"
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn is_pure(&self) -> bool {
        true
    }

    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        let [gate_up] = contract::inputs(op)?;
        let (rows, columns) = contract::matrix(gate_up)?;
        contract::float(gate_up)?;
        contract::activation(op.attrs)?;
        if columns % 2 != 0 {
            return Err(OpError(format!(
                "`{}` must be gate and up side by side, but has {}",
                gate_up.name,
                counted(columns, "column")
            )));
        }
        Ok(vec![TensorType { dims: vec![rows, columns / 2], ..gate_up.ty.clone() }])
    }

    fn shard(&self, op: &OpView<'_>, _world: u32) -> Result<ShardRule, OpError> {
        let [gate_up] = contract::inputs(op)?;
        match contract::split_columns(gate_up.sharding) {
            Some([gate, up]) if gate == up => Ok(ShardRule {
                inputs: vec![Need::AsIs],
                outputs: vec![Sharding::Split { dim: 1, parts: vec![*gate] }],
            }),
            _ => Ok(replicated(1, 1)),
        }
    }

    fn partition(&self, op: &LocalOp<'_>, target: &Target) -> Result<Partition, OpError> {
        let (rows, columns) = contract::local_matrix(&op.outputs[0])?;
        let params = mpk_silu_mul_params {
            rows_kind: contract::rows_kind(op.outputs[0].rows),
            activation: contract::activation(op.global.attrs)?,
        };
        let tiles = target.column_tiles(columns, 1);
        let widest = tiles.iter().map(|t| t.end - t.start).max().unwrap_or(0);
        let tasks = tiles
            .into_iter()
            .map(|tile| {
                let both = Region::whole(&[rows, 2 * columns]);
                let out = Region::whole(&[rows, columns]).with(1, tile.start, tile.end);
                let mut task = TaskSpec::default();
                task.reads.push(Access::new(0, both.with(1, tile.start, tile.end)));
                task.reads.push(Access::new(0, both.with(1, columns + tile.start, columns + tile.end)));
                task.writes.push(Access::new(0, out));
                task.cost = out.volume() * 3 * op.outputs[0].dtype.size();
                task
            })
            .collect();
        Ok(Partition { params: params_words(&params), scratch_bytes: 4 * u64::from(widest), tasks })
    }
}
