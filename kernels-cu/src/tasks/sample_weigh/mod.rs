//! `sample_weigh`: the second pass over the logits, a step of sampling (`sample_family.rs`).
//!
//! Inputs: 0. `records` of `sample_partial`, of all ranks; 1. `logits` and 2. `counts`, the inputs of `sample_partial`.
//! Output, split on dimension 0: u32 [slices, parts, samples, words] (`params.h` defines the words). Written only for
//! requests whose filters need more than a list. One task per part and some samples; `sample_family.rs` defines the arguments.

use crate::abi::{
    MPK_SAMPLE_FRONTIER, MPK_SAMPLE_WORDS, MPK_WEIGH_WORDS, mpk_sample_weigh_params, mpk_task_sample_weigh,
    params_words,
};
use crate::registry::{GpuSite, Registration};
use crate::tasks::contract;
use crate::tasks::sample_family::{
    ATTRIBUTES, MOST_COLUMNS, Numbers, logits_need, part_tasks, records_of, samples,
};
use std::sync::Arc;
use taskgraph::task_type::{Access, LocalOp, Need, OpError, OpView, Partition, ShardRule, TensorType};
use taskgraph::{Attribute, DType, Region, Rows, Target, TaskType};

/// Registry entry.
pub const REGISTRATION: Registration = Registration {
    name: "sample_weigh",
    core_number: None,
    contract: Some(|| Arc::new(SampleWeigh)),
    run: Some(mpk_task_sample_weigh),
    ready: None,
    gpu: Some(gpu),
};

/// The GPU code.
fn gpu(site: &GpuSite<'_>) -> Result<String, String> {
    match site.inputs.get(1) {
        Some(logits) if logits.dims[1] > MOST_COLUMNS => {
            Err(format!("a part has {} columns; the GPU code takes up to {MOST_COLUMNS}", logits.dims[1]))
        }
        _ => Ok("mpk::gpu::SampleWeigh".to_string()),
    }
}

/// Contract of `sample_weigh`.
#[derive(Debug)]
pub struct SampleWeigh;

impl TaskType for SampleWeigh {
    fn name(&self) -> &'static str {
        "sample_weigh"
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        let numbers = Numbers::new(op.attrs)?;
        let [records, logits, counts] = contract::inputs(op)?;
        contract::dtype(records, DType::U32)?;
        let samples = samples(&numbers, logits, counts)?;
        let mut dims =
            vec![u64::from(numbers.slices), u64::from(numbers.parts), samples, u64::from(MPK_SAMPLE_WORDS)];
        if records.ty.dims != dims {
            return Err(OpError(format!("`{}` must be {dims:?}, not {:?}", records.name, records.ty.dims)));
        }
        dims[3] = u64::from(MPK_WEIGH_WORDS);
        Ok(vec![TensorType { dtype: DType::U32, dims, rows: Rows::Fixed }])
    }

    fn shard(&self, op: &OpView<'_>, world: u32) -> Result<ShardRule, OpError> {
        let slices = Numbers::new(op.attrs)?.slices_of(world)?;
        let need = logits_need(&op.inputs[2], world)?;
        Ok(ShardRule { inputs: vec![Need::Replicated, need, Need::AsIs], outputs: vec![slices] })
    }

    fn partition(&self, op: &LocalOp<'_>, target: &Target) -> Result<Partition, OpError> {
        let (numbers, mut tasks) = part_tasks(op, 1, target)?;
        let dims = &op.inputs[0].dims;
        let samples = op.inputs[1].dims[0] as u32;
        for task in &mut tasks {
            let [part, _, _, first, count, ..] = task.args.map(|a| a as u32);
            task.reads.insert(0, Access::new(0, records_of(dims, first..first + count)));
            let region = Region::whole(&[1, numbers.parts, samples, MPK_WEIGH_WORDS]);
            task.writes.push(Access::new(0, region.with(1, part, part + 1).with(2, first, first + count)));
        }
        let params = mpk_sample_weigh_params { kept: numbers.kept };
        let scratch_bytes = 16 * dims[0] * dims[1] * u64::from(MPK_SAMPLE_FRONTIER);
        Ok(Partition { params: params_words(&params), scratch_bytes, tasks })
    }
}
