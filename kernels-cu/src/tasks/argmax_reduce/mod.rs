//! `argmax_reduce`: the next token of each sample, and the log-probabilities of the highest tokens, computed from the
//! records of all tiles of all ranks.
//!
//! Input: `partials` u32 [slices, tiles, samples, words], replicated (see [`super::argmax_partial`]). Outputs, which
//! the builder declares as `Role::Persistent` tensors, and `mpk_batch` points to:
//! 0. `next_token` i32 `[max_batch]`; with `top_k` > 0 also 1. `top_token` i32 `[max_batch, top_k]` and
//! 2. `top_logprob` f32 `[max_batch, top_k]`: natural logarithms of the softmax over the whole vocabulary, highest
//! first; where there are fewer tokens, token -1 and -infinity; with `log_sum` also 3. `log_sum` u32 `[max_batch, 3]`
//! (`params.h` defines the words), from which [`super::token_logprob`] computes the log-probability of any token.
//!
//! Attributes: `top_k` (default 0), the same as for `argmax_partial`; `log_sum` (default false), which needs `top_k` > 0;
//! `sampled` (default false), the same as for `argmax_partial`: then `sample_reduce` writes the tokens that count, and
//! output 0 is any tensor. The outputs of a request without log-probabilities are not written.
//!
//! One task per sample: arguments `[sample, 0..]`. A record whose hash of the batch state differs from this rank's ends
//! the run (`MPK_ABORT_DIVERGED`).

use super::argmax_partial::{GPU_MAX_KEPT, kept, words};
use crate::abi::{MPK_LOG_SUM_WORDS, mpk_argmax_reduce_params, mpk_task_argmax_reduce, params_words};
use crate::registry::{GpuSite, Registration};
use crate::tasks::contract;
use std::sync::Arc;
use taskgraph::op_graph::Attrs;
use taskgraph::task_type::{Access, LocalOp, OpError, OpView, Partition, ShardRule, TaskSpec, TensorType};
use taskgraph::{Attribute, AttributeKind, DType, Region, Rows, Target, TaskType};

/// Registry entry.
pub const REGISTRATION: Registration = Registration {
    name: "argmax_reduce",
    core_number: None,
    contract: Some(|| Arc::new(ArgmaxReduce)),
    run: Some(mpk_task_argmax_reduce),
    ready: None,
    gpu: Some(gpu),
};

/// The GPU code.
fn gpu(site: &GpuSite<'_>) -> Result<String, String> {
    match site.params {
        [kept @ 1..=GPU_MAX_KEPT, top_k, log_sum, sampled, ..] if top_k <= kept => {
            let options = match (*log_sum != 0, *sampled != 0) {
                (false, false) => "",
                (true, false) => ", true",
                (false, true) => ", false, true",
                (true, true) => ", true, true",
            };
            Ok(format!("mpk::gpu::ArgmaxReduce<{kept}, {top_k}{options}>"))
        }
        _ => Err(format!("candidates and top_k {:?}; the GPU code keeps 1 to {GPU_MAX_KEPT}", site.params)),
    }
}

const ATTRIBUTES: &[Attribute] = &[
    Attribute::new("top_k", AttributeKind::Whole),
    Attribute::new("log_sum", AttributeKind::Bool),
    Attribute::new("sampled", AttributeKind::Bool),
];

/// The attributes `top_k` and `log_sum`.
fn numbers(attrs: &Attrs) -> Result<(u32, bool), OpError> {
    let top_k = contract::attr_u32(attrs, "top_k")?.unwrap_or(0);
    let log_sum = contract::attr_bool(attrs, "log_sum")?;
    if log_sum && top_k == 0 {
        return Err(OpError("`log_sum` needs `top_k` above 0".to_string()));
    }
    Ok((top_k, log_sum))
}

/// Contract of `argmax_reduce`.
#[derive(Debug)]
pub struct ArgmaxReduce;

impl TaskType for ArgmaxReduce {
    fn name(&self) -> &'static str {
        "argmax_reduce"
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        let (top_k, log_sum) = numbers(op.attrs)?;
        let [partials] = contract::inputs(op)?;
        contract::dtype(partials, DType::U32)?;
        let samples = match partials.ty.dims[..] {
            [_, _, samples, w] if w == words(top_k) => samples,
            _ => {
                return Err(OpError(format!(
                    "`{}` must be [slices, tiles, samples, {}], not {:?}",
                    partials.name,
                    words(top_k),
                    partials.ty.dims
                )));
            }
        };
        let declared = op.outputs.first().filter(|o| !o.ty.dims.is_empty());
        let slots = declared.map_or(samples, |o| o.ty.dims[0]);
        if slots < samples {
            return Err(OpError(format!("{slots} next tokens do not hold {samples} samples")));
        }
        let rows = declared.map_or(Rows::Samples, |o| o.ty.rows);
        let mut types = vec![TensorType { dtype: DType::I32, dims: vec![slots], rows }];
        if top_k > 0 {
            for dtype in [DType::I32, DType::F32] {
                types.push(TensorType { dtype, dims: vec![slots, u64::from(top_k)], rows });
            }
        }
        if log_sum {
            let dims = vec![slots, u64::from(MPK_LOG_SUM_WORDS)];
            types.push(TensorType { dtype: DType::U32, dims, rows });
        }
        Ok(types)
    }

    fn shard(&self, op: &OpView<'_>, _world: u32) -> Result<ShardRule, OpError> {
        let (top_k, log_sum) = numbers(op.attrs)?;
        Ok(contract::replicated(1, if top_k > 0 { 3 + usize::from(log_sum) } else { 1 }))
    }

    fn partition(&self, op: &LocalOp<'_>, _target: &Target) -> Result<Partition, OpError> {
        let (top_k, log_sum) = numbers(op.global.attrs)?;
        let dims: Vec<u32> = op.inputs[0].dims.iter().map(|d| *d as u32).collect();
        let sampled = contract::attr_bool(op.global.attrs, "sampled")?.into();
        let params = mpk_argmax_reduce_params { kept: kept(top_k), top_k, log_sum: log_sum.into(), sampled };
        let tasks = (0..dims[2])
            .map(|s| {
                let mut task = TaskSpec {
                    args: [s as i32, 0, 0, 0, 0, 0, 0, 0],
                    cost: u64::from(dims[0]) * u64::from(dims[1]) * u64::from(dims[3]) * 4,
                    ..TaskSpec::default()
                };
                task.reads.push(Access::new(0, Region::whole(&dims).with(2, s, s + 1)));
                task.writes.push(Access::new(0, Region::whole(&[0]).with(0, s, s + 1)));
                if top_k > 0 {
                    let row = Region::whole(&[0, top_k]).with(0, s, s + 1);
                    task.writes.push(Access::new(1, row));
                    task.writes.push(Access::new(2, row));
                }
                if log_sum {
                    let row = Region::whole(&[0, MPK_LOG_SUM_WORDS]).with(0, s, s + 1);
                    task.writes.push(Access::new(3, row));
                }
                task
            })
            .collect();
        let scratch_bytes = 8 * u64::from(kept(top_k));
        Ok(Partition { params: params_words(&params), scratch_bytes, tasks })
    }
}

#[cfg(test)]
mod test;
