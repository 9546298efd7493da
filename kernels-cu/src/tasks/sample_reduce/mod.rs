//! `sample_reduce`: the token of each sample, the last step of sampling (`sample_family.rs`).
//!
//! Inputs, all of them replicated: 0. `records` of `sample_partial`, 1. those of `sample_weigh`, 2. the lists of
//! `sample_merge`, or on a single rank those of `sample_partial`. Output: `next_token` i32 `[slots]`, which the builder declares as a `Role::Persistent` tensor that
//! `mpk_batch` points to.
//!
//! One task per sample: arguments `[0, 0, 0, sample, 0..]`. A record whose hash of the batch state differs from this rank's
//! ends the run (`MPK_ABORT_DIVERGED`).

use crate::abi::{
    MPK_SAMPLE_WORDS, MPK_WEIGH_WORDS, mpk_sample_reduce_params, mpk_task_sample_reduce, params_words,
};
use crate::registry::{GpuSite, Registration};
use crate::tasks::contract;
use crate::tasks::sample_family::{ATTRIBUTES, Numbers, records_of};
use std::sync::Arc;
use taskgraph::task_type::{Access, LocalOp, OpError, OpView, Partition, ShardRule, TaskSpec, TensorType};
use taskgraph::{Attribute, DType, Region, Rows, Target, TaskType};

/// Registry entry.
pub const REGISTRATION: Registration = Registration {
    name: "sample_reduce",
    core_number: None,
    contract: Some(|| Arc::new(SampleReduce)),
    run: Some(mpk_task_sample_reduce),
    ready: None,
    gpu: Some(gpu),
};

/// The GPU code.
fn gpu(_site: &GpuSite<'_>) -> Result<String, String> {
    Ok("mpk::gpu::SampleReduce".to_string())
}

/// Contract of `sample_reduce`.
#[derive(Debug)]
pub struct SampleReduce;

impl TaskType for SampleReduce {
    fn name(&self) -> &'static str {
        "sample_reduce"
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        let numbers = Numbers::new(op.attrs)?;
        let [records, weighed, lists] = contract::inputs(op)?;
        for operand in [records, weighed, lists] {
            contract::dtype(operand, DType::U32)?;
        }
        let samples = records.ty.dims.get(2).copied().unwrap_or(0);
        let of =
            |words: u32| vec![u64::from(numbers.slices), u64::from(numbers.parts), samples, words.into()];
        // Of each part, or one.
        let lists_of_rank =
            lists.ty.dims.get(1).copied().filter(|&n| n == u64::from(numbers.parts)).unwrap_or(1);
        let listed = vec![u64::from(numbers.slices), lists_of_rank, samples, u64::from(2 * numbers.kept)];
        for (operand, dims) in
            [(records, of(MPK_SAMPLE_WORDS)), (weighed, of(MPK_WEIGH_WORDS)), (lists, listed)]
        {
            if operand.ty.dims != dims {
                return Err(OpError(format!(
                    "`{}` must be {dims:?}, not {:?}",
                    operand.name, operand.ty.dims
                )));
            }
        }
        let declared = op.outputs.first().filter(|o| !o.ty.dims.is_empty());
        let (slots, rows) = declared.map_or((samples, Rows::Samples), |o| (o.ty.dims[0], o.ty.rows));
        if slots < samples {
            return Err(OpError(format!("{slots} next tokens do not hold {samples} samples")));
        }
        Ok(vec![TensorType { dtype: DType::I32, dims: vec![slots], rows }])
    }

    fn shard(&self, op: &OpView<'_>, world: u32) -> Result<ShardRule, OpError> {
        Numbers::new(op.attrs)?.slices_of(world)?;
        Ok(contract::replicated(3, 1))
    }

    fn partition(&self, op: &LocalOp<'_>, _target: &Target) -> Result<Partition, OpError> {
        let numbers = Numbers::new(op.global.attrs)?;
        let tasks = (0..op.inputs[0].dims[2] as u32)
            .map(|sample| {
                let mut task = TaskSpec {
                    args: [0, 0, 0, sample as i32, 0, 0, 0, 0],
                    cost: op.inputs[0].dims[0] * op.inputs[0].dims[1] * u64::from(MPK_WEIGH_WORDS) * 4,
                    ..TaskSpec::default()
                };
                for (index, input) in op.inputs.iter().enumerate() {
                    task.reads.push(Access::new(index as u8, records_of(&input.dims, sample..sample + 1)));
                }
                task.writes.push(Access::new(0, Region::whole(&[0]).with(0, sample, sample + 1)));
                task
            })
            .collect();
        let params = mpk_sample_reduce_params { kept: numbers.kept };
        let lists = &op.inputs[2].dims;
        let scratch_bytes = 8 * lists[0] * lists[1] * u64::from(numbers.kept);
        Ok(Partition { params: params_words(&params), scratch_bytes, tasks })
    }
}

#[cfg(test)]
mod test;
