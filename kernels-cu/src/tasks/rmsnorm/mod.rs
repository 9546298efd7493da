//! `rmsnorm`: x `[rows, k]` (f32, f16 or bf16) / sqrt(mean(x^2) + eps) * weight `[k]`, computed in f32, rounded once.
//!
//! Output `[rows, k]` of `norm_dtype`, by default the weight's type. A task processes whole rows. Attributes: `eps`
//! (1e-6), `norm_dtype`.

use crate::abi::{mpk_rmsnorm_params, mpk_task_rmsnorm, params_words};
use crate::registry::{GpuSite, Registration};
use crate::tasks::contract::eps;
use crate::tasks::contract::{self, replicated};
use crate::tasks::operand::{gpu_float, gpu_rows_contiguous};
use std::sync::Arc;
use taskgraph::task_type::{Access, LocalOp, OpError, OpView, Partition, ShardRule, TaskSpec, TensorType};
use taskgraph::{Attribute, AttributeKind, Region, Target, TaskType};

#[cfg(test)]
pub(crate) mod reference;
#[cfg(test)]
mod test;

/// Registry entry.
pub const REGISTRATION: Registration = Registration {
    name: "rmsnorm",
    core_number: None,
    contract: Some(|| Arc::new(RmsNorm)),
    run: Some(mpk_task_rmsnorm),
    ready: None,
    gpu: Some(gpu),
};

/// The GPU code.
fn gpu(site: &GpuSite<'_>) -> Result<String, String> {
    let ([x, weight], [out]) = (site.inputs, site.outputs) else {
        return Err("it must have two inputs and one output".to_string());
    };
    gpu_rows_contiguous([x, weight, out])?;
    Ok(format!("mpk::gpu::RmsNorm<{}, {}, {}>", gpu_float(x)?, gpu_float(weight)?, gpu_float(out)?))
}

const ATTRIBUTES: &[Attribute] =
    &[Attribute::new("eps", AttributeKind::Number), Attribute::new("norm_dtype", AttributeKind::DType)];

/// Contract of `rmsnorm`.
#[derive(Debug)]
pub struct RmsNorm;

impl TaskType for RmsNorm {
    fn name(&self) -> &'static str {
        "rmsnorm"
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn is_pure(&self) -> bool {
        true
    }

    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        let [x, weight] = contract::inputs(op)?;
        let (_, k) = contract::matrix(x)?;
        contract::float(x)?;
        contract::vector(weight, k)?;
        contract::float(weight)?;
        eps(op)?;
        let dtype = contract::attr_dtype(op.attrs, "norm_dtype")?.unwrap_or(weight.ty.dtype);
        if !dtype.is_float() {
            return Err(OpError(format!("`norm_dtype` must be f32, f16 or bf16, not {dtype}")));
        }
        Ok(vec![TensorType { dtype, ..x.ty.clone() }])
    }

    fn shard(&self, op: &OpView<'_>, _world: u32) -> Result<ShardRule, OpError> {
        Ok(replicated(op.inputs.len(), 1))
    }

    fn partition(&self, op: &LocalOp<'_>, target: &Target) -> Result<Partition, OpError> {
        let (rows, k) = contract::local_matrix(&op.outputs[0])?;
        let params = mpk_rmsnorm_params {
            rows_kind: contract::rows_kind(op.outputs[0].rows),
            rows,
            eps: eps(op.global)?,
        };
        let blocks = rows.min(target.max_tiles.max(1));
        let start = |b: u32| (u64::from(rows) * u64::from(b) / u64::from(blocks)) as u32;
        let tasks = (0..blocks)
            .map(|b| {
                let region = Region::whole(&[rows, k]).with(0, start(b), start(b + 1));
                let mut task = TaskSpec::default();
                task.reads.push(Access::new(0, region));
                task.reads.push(Access::new(1, Region::whole(&[k])));
                task.writes.push(Access::new(0, region));
                task.args[0] = start(b) as i32;
                task.cost = region.volume() * (op.inputs[0].dtype.size() + op.outputs[0].dtype.size());
                task
            })
            .collect();
        Ok(Partition { params: params_words(&params), scratch_bytes: 4 * u64::from(k), tasks })
    }

    fn constant_inputs(&self) -> &'static [usize] {
        &[1]
    }
}
