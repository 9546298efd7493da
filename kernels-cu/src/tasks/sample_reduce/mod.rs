//! `sample_reduce`: the token of each sample, the last step of sampling (`sample_family.rs`).
//!
//! Inputs on several ranks, all of them replicated: 0. `records` of `sample_partial`, 1. those of `sample_weigh`, 2. the
//! lists of `sample_merge`. On one rank: 0. `records`, 1. `masses` and 2. `lists` of `sample_partial`, 3. `logits` and
//! 4. `counts` as there: what the masses leave open is decided by the logits. Output: `next_token` i32 `[slots]`, which the
//! builder declares as a `Role::Persistent` tensor that `mpk_batch` points to.
//!
//! One task for each sample: arguments `[0, 0, columns of the logits, sample, 0..]`.

use crate::abi::{
    MPK_SAMPLE_BINS, MPK_SAMPLE_FRONTIER, MPK_SAMPLE_WORDS, MPK_WEIGH_WORDS, mpk_sample_reduce_params,
    mpk_task_sample_reduce, params_words,
};
use crate::registry::{GpuSite, Registration};
use crate::tasks::contract;
use crate::tasks::sample_family::{ATTRIBUTES, Numbers, records_of, samples};
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
fn gpu(site: &GpuSite<'_>) -> Result<String, String> {
    Ok(format!("mpk::gpu::SampleReduce<{}>", site.params.get(1) == Some(&1)))
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
        let direct = numbers.slices == 1;
        let [records, second, lists] = match (op.inputs.len(), direct) {
            (3, false) | (5, true) => [&op.inputs[0], &op.inputs[1], &op.inputs[2]],
            (found, _) => {
                let wanted = if direct { 5 } else { 3 };
                return Err(OpError(format!(
                    "needs {wanted} inputs with {} slices, not {found}",
                    numbers.slices
                )));
            }
        };
        for operand in [records, second, lists] {
            contract::dtype(operand, DType::U32)?;
        }
        let of_samples = records.ty.dims.get(2).copied().unwrap_or(0);
        let of =
            |words: u32| vec![u64::from(numbers.slices), u64::from(numbers.parts), of_samples, words.into()];
        let (words, listed) = match direct {
            true => (MPK_SAMPLE_BINS, of(2 * numbers.kept)),
            false => {
                (MPK_WEIGH_WORDS, vec![u64::from(numbers.slices), of_samples, u64::from(2 * numbers.kept)])
            }
        };
        for (operand, dims) in [(records, of(MPK_SAMPLE_WORDS)), (second, of(words)), (lists, listed)] {
            if operand.ty.dims != dims {
                return Err(OpError(format!(
                    "`{}` must be {dims:?}, not {:?}",
                    operand.name, operand.ty.dims
                )));
            }
        }
        if direct && samples(&numbers, &op.inputs[3], &op.inputs[4])? != of_samples {
            return Err(OpError(format!("`{}` must have {of_samples} rows", op.inputs[3].name)));
        }
        let samples = of_samples;
        let declared = op.outputs.first().filter(|o| !o.ty.dims.is_empty());
        let (slots, rows) = declared.map_or((samples, Rows::Samples), |o| (o.ty.dims[0], o.ty.rows));
        if slots < samples {
            return Err(OpError(format!("{slots} next tokens do not hold {samples} samples")));
        }
        Ok(vec![TensorType { dtype: DType::I32, dims: vec![slots], rows }])
    }

    fn shard(&self, op: &OpView<'_>, world: u32) -> Result<ShardRule, OpError> {
        Numbers::new(op.attrs)?.slices_of(world)?;
        Ok(contract::replicated(op.inputs.len(), 1))
    }

    fn partition(&self, op: &LocalOp<'_>, _target: &Target) -> Result<Partition, OpError> {
        let numbers = Numbers::new(op.global.attrs)?;
        let dims = &op.inputs[0].dims;
        // On one rank the logits and the counts.
        let columns =
            op.inputs.get(3).map(contract::local_matrix).transpose()?.map_or(0, |(_, columns)| columns);
        let tasks = (0..dims[2] as u32)
            .map(|sample| {
                let mut task = TaskSpec {
                    args: [0, 0, columns as i32, sample as i32, 0, 0, 0, 0],
                    cost: dims[0] * dims[1] * u64::from(MPK_WEIGH_WORDS) * 4,
                    ..TaskSpec::default()
                };
                for (index, input) in op.inputs[..3].iter().enumerate() {
                    task.reads.push(Access::new(index as u8, records_of(&input.dims, sample)));
                }
                if let Some([logits, counts]) = op.inputs.get(3..5) {
                    let row = Region::whole(&[logits.dims[0] as u32, 0]).with(0, sample, sample + 1);
                    task.reads.push(Access::new(3, row.with(1, 0, columns)));
                    let counts = Region::whole(&[counts.dims[0] as u32, 0]).with(1, 0, columns);
                    task.reads.push(Access::new(4, counts));
                }
                task.writes.push(Access::new(0, Region::whole(&[0]).with(0, sample, sample + 1)));
                task
            })
            .collect();
        let params = mpk_sample_reduce_params { kept: numbers.kept, direct: u32::from(op.inputs.len() == 5) };
        let records = dims[0] * dims[1];
        let frontier = 16 * records * u64::from(MPK_SAMPLE_FRONTIER) + 4 * u64::from(MPK_WEIGH_WORDS);
        let scratch_bytes = frontier.max(8 * records * u64::from(numbers.kept));
        Ok(Partition { params: params_words(&params), scratch_bytes, tasks })
    }
}
