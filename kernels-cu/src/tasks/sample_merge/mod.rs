//! `sample_merge`: joins the lists of a rank's parts, a step of sampling (`sample_family.rs`).
//!
//! Input: `lists` of `sample_partial`. Output, split on dimension 0: u32 [slices, 1, samples, 2 kept], the same pairs for
//! all the rank's columns. So ranks exchange one list each; a single rank does without. Written only for requests that
//! take lists. One task per sample: arguments `[0, 0, 0, sample, 0..]`.

use crate::abi::{mpk_sample_merge_params, mpk_task_sample_merge, params_words};
use crate::registry::{GpuSite, Registration};
use crate::tasks::contract;
use crate::tasks::sample_family::{ATTRIBUTES, Numbers, records_of};
use std::sync::Arc;
use taskgraph::task_type::{
    Access, LocalOp, Need, OpError, OpView, Partition, ShardRule, TaskSpec, TensorType,
};
use taskgraph::{Attribute, DType, Region, Rows, Target, TaskType};

/// Registry entry.
pub const REGISTRATION: Registration = Registration {
    name: "sample_merge",
    core_number: None,
    contract: Some(|| Arc::new(SampleMerge)),
    run: Some(mpk_task_sample_merge),
    ready: None,
    gpu: Some(gpu),
};

/// The GPU code.
fn gpu(_site: &GpuSite<'_>) -> Result<String, String> {
    Ok("mpk::gpu::SampleMerge".to_string())
}

/// Contract of `sample_merge`.
#[derive(Debug)]
pub struct SampleMerge;

impl TaskType for SampleMerge {
    fn name(&self) -> &'static str {
        "sample_merge"
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        let numbers = Numbers::new(op.attrs)?;
        let [lists] = contract::inputs(op)?;
        contract::dtype(lists, DType::U32)?;
        let words = u64::from(2 * numbers.kept);
        match lists.ty.dims[..] {
            [slices, _, samples, w] if w == words && slices == u64::from(numbers.slices) => {
                Ok(vec![TensorType {
                    dtype: DType::U32,
                    dims: vec![slices, 1, samples, words],
                    rows: Rows::Fixed,
                }])
            }
            _ => Err(OpError(format!(
                "`{}` must be [{}, parts, samples, {words}], not {:?}",
                lists.name, numbers.slices, lists.ty.dims
            ))),
        }
    }

    fn shard(&self, op: &OpView<'_>, world: u32) -> Result<ShardRule, OpError> {
        let slices = Numbers::new(op.attrs)?.slices_of(world)?;
        Ok(ShardRule { inputs: vec![Need::AsIs], outputs: vec![slices] })
    }

    fn partition(&self, op: &LocalOp<'_>, _target: &Target) -> Result<Partition, OpError> {
        let numbers = Numbers::new(op.global.attrs)?;
        let dims = &op.inputs[0].dims;
        let tasks = (0..dims[2] as u32)
            .map(|sample| {
                let mut task = TaskSpec {
                    args: [0, 0, 0, sample as i32, 0, 0, 0, 0],
                    cost: dims[1] * dims[3] * 4,
                    ..TaskSpec::default()
                };
                task.reads.push(Access::new(0, records_of(dims, sample..sample + 1)));
                let region = Region::whole(&[1, 1, 0, 2 * numbers.kept]).with(2, sample, sample + 1);
                task.writes.push(Access::new(0, region));
                task
            })
            .collect();
        let params = mpk_sample_merge_params { kept: numbers.kept };
        let scratch_bytes = 8 * dims[1] * u64::from(numbers.kept);
        Ok(Partition { params: params_words(&params), scratch_bytes, tasks })
    }
}
