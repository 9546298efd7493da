//! `token_logprob`: the log-probability of the token that was chosen for each sample.
//!
//! Inputs, both replicated: 0. `logit` f32 [slices, samples] of [`super::token_logit`], 1. `log_sum` u32 [slots, 3] of
//! [`super::argmax_reduce`]. Output: `token_logprob` f32 `[slots]`, the natural logarithm of the softmax over the whole vocabulary,
//! before penalties, temperature and filters. If the token is among the highest ones, it is the same number as in `top_logprob`.
//! The builder declares it as a `Role::Persistent` tensor that `mpk_batch` points to.
//!
//! One task, without arguments.

use crate::abi::{MPK_LOG_SUM_WORDS, mpk_task_token_logprob};
use crate::registry::{GpuSite, Registration};
use crate::tasks::contract;
use std::sync::Arc;
use taskgraph::task_type::{Access, LocalOp, OpError, OpView, Partition, ShardRule, TaskSpec, TensorType};
use taskgraph::{DType, Region, Rows, Target, TaskType};

/// Registry entry.
pub const REGISTRATION: Registration = Registration {
    name: "token_logprob",
    core_number: None,
    contract: Some(|| Arc::new(TokenLogprob)),
    run: Some(mpk_task_token_logprob),
    ready: None,
    gpu: Some(gpu),
};

/// The GPU code.
fn gpu(_site: &GpuSite<'_>) -> Result<String, String> {
    Ok("mpk::gpu::TokenLogprob".to_string())
}

/// Contract of `token_logprob`.
#[derive(Debug)]
pub struct TokenLogprob;

impl TaskType for TokenLogprob {
    fn name(&self) -> &'static str {
        "token_logprob"
    }

    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        let [logit, log_sum] = contract::inputs(op)?;
        contract::dtype(logit, DType::F32)?;
        contract::dtype(log_sum, DType::U32)?;
        let (_, samples) = contract::matrix(logit)?;
        match log_sum.ty.dims[..] {
            [slots, words] if slots >= samples && words == u64::from(MPK_LOG_SUM_WORDS) => {}
            _ => {
                return Err(OpError(format!(
                    "`{}` must be [{samples} or more, {MPK_LOG_SUM_WORDS}], not {:?}",
                    log_sum.name, log_sum.ty.dims
                )));
            }
        }
        let declared = op.outputs.first().filter(|o| !o.ty.dims.is_empty());
        let (slots, rows) = declared.map_or((samples, Rows::Samples), |o| (o.ty.dims[0], o.ty.rows));
        if slots < samples {
            return Err(OpError(format!("{slots} log-probabilities do not hold {samples} samples")));
        }
        Ok(vec![TensorType { dtype: DType::F32, dims: vec![slots], rows }])
    }

    fn shard(&self, _op: &OpView<'_>, _world: u32) -> Result<ShardRule, OpError> {
        Ok(contract::replicated(2, 1))
    }

    fn partition(&self, op: &LocalOp<'_>, _target: &Target) -> Result<Partition, OpError> {
        let (slices, samples) = contract::local_matrix(&op.inputs[0])?;
        let mut task = TaskSpec { cost: 64 * u64::from(samples), ..TaskSpec::default() };
        task.reads.push(Access::new(0, Region::whole(&[slices, samples])));
        task.reads.push(Access::new(1, Region::whole(&[samples, MPK_LOG_SUM_WORDS])));
        task.writes.push(Access::new(0, Region::whole(&[samples])));
        Ok(Partition { params: Vec::new(), scratch_bytes: 0, tasks: vec![task] })
    }
}
