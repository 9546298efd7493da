//! `sample_partial`: the first step of sampling (`sample_family.rs`).
//!
//! Inputs: 0. `logits` f32 [samples, vocabulary], 1. `counts` u32 [slots, vocabulary] (see [`super::token_counts`]),
//! split alike on their columns on several ranks. Outputs, split on dimension 0: 0. `records` u32 [slices, parts,
//! samples, words] (`params.h` defines the words), 1. `lists` u32 [slices, parts, samples, 2 kept]: pairs (logit,
//! token) of the highest processed logits, as many as the request's `top_k`, in no order, filled with (-infinity, no
//! token).
//!
//! A greedy request's logits stay as they are. One task per part and some samples; `sample_family.rs` defines the arguments.

use crate::abi::{MPK_SAMPLE_WORDS, mpk_sample_partial_params, mpk_task_sample_partial, params_words};
use crate::registry::{GpuSite, Registration};
use crate::tasks::contract;
use crate::tasks::sample_family::{ATTRIBUTES, MOST_COLUMNS, Numbers, logits_need, part_tasks, samples};
use std::sync::Arc;
use taskgraph::task_type::{Access, LocalOp, Need, OpError, OpView, Partition, ShardRule, TensorType};
use taskgraph::{Attribute, DType, Region, Rows, Target, TaskType};

pub use crate::tasks::sample_family::{MOST_LISTED, kept, parts};

/// Registry entry.
pub const REGISTRATION: Registration = Registration {
    name: "sample_partial",
    core_number: None,
    contract: Some(|| Arc::new(SamplePartial)),
    run: Some(mpk_task_sample_partial),
    ready: None,
    gpu: Some(gpu),
};

/// The GPU code.
fn gpu(site: &GpuSite<'_>) -> Result<String, String> {
    match site.inputs.first() {
        Some(logits) if logits.dims[1] > MOST_COLUMNS => {
            Err(format!("a part has {} columns; the GPU code takes up to {MOST_COLUMNS}", logits.dims[1]))
        }
        _ => Ok("mpk::gpu::SamplePartial".to_string()),
    }
}

/// Contract of `sample_partial`.
#[derive(Debug)]
pub struct SamplePartial;

impl TaskType for SamplePartial {
    fn name(&self) -> &'static str {
        "sample_partial"
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        let numbers = Numbers::new(op.attrs)?;
        let [logits, counts] = contract::inputs(op)?;
        let samples = samples(&numbers, logits, counts)?;
        let of = |words: u32| TensorType {
            dtype: DType::U32,
            dims: vec![u64::from(numbers.slices), u64::from(numbers.parts), samples, u64::from(words)],
            rows: Rows::Fixed,
        };
        Ok(vec![of(MPK_SAMPLE_WORDS), of(2 * numbers.kept)])
    }

    fn shard(&self, op: &OpView<'_>, world: u32) -> Result<ShardRule, OpError> {
        let slices = Numbers::new(op.attrs)?.slices_of(world)?;
        let need = logits_need(&op.inputs[1], world)?;
        Ok(ShardRule { inputs: vec![need, Need::AsIs], outputs: vec![slices.clone(), slices] })
    }

    fn partition(&self, op: &LocalOp<'_>, target: &Target) -> Result<Partition, OpError> {
        let (numbers, mut tasks) = part_tasks(op, 0, target)?;
        let samples = op.inputs[0].dims[0] as u32;
        let mut most = 0;
        for task in &mut tasks {
            let [part, _, columns, first, count, ..] = task.args.map(|a| a as u32);
            most = most.max(columns);
            for (output, words) in [(0, MPK_SAMPLE_WORDS), (1, 2 * numbers.kept)] {
                let region = Region::whole(&[1, numbers.parts, samples, words]);
                let region = region.with(1, part, part + 1).with(2, first, first + count);
                task.writes.push(Access::new(output, region));
            }
        }
        let params = mpk_sample_partial_params { kept: numbers.kept };
        Ok(Partition { params: params_words(&params), scratch_bytes: 8 * u64::from(most), tasks })
    }
}

#[cfg(test)]
mod reference;
#[cfg(test)]
mod test;
