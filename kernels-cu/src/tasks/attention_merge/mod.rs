//! `attention_merge`: combines the partial results that `attention` with more than one split writes.
//!
//! Inputs: 0. [rows, heads, splits, head_dim] f32, sums of values weighted by exp(score - maximum). 1. [rows,
//! heads, splits, 2] f32, that maximum and the sum of the weights. A sum of 0 means that the split has no key;
//! then its values are not read. Output: [rows, heads head_dim], or the same in `MPK_LAYOUT_WIDE`.
//!
//! Attributes: `heads`, `kv_heads`, `head_dim` (of all ranks), `splits`, and `dtype`, the act dtype. `attention`'s
//! expansion creates it; its inputs are the rank's own, its output is split by heads.
//!
//! One task per active slot a and local key-value head h: arguments `[a, first local query head, query heads,
//! 0..]`. Regions name rows of a slot by their row share (see [`super::attention`]).

use crate::abi::{mpk_attention_merge_params, mpk_task_attention_merge, params_words};
use crate::registry::{GpuSite, Registration};
use crate::tasks::attended;
use crate::tasks::contract;
use crate::tasks::heads::{Heads, MAX_SPLITS, row_share, rows_and_active};
use crate::tasks::operand::gpu_float;
use std::sync::Arc;
use taskgraph::task_type::{Access, LocalOp, OpError, OpView, Partition, ShardRule, TaskSpec, TensorType};
use taskgraph::{Attribute, AttributeKind, DType, Region, Target, TaskType};

/// Registry entry.
pub const REGISTRATION: Registration = Registration {
    name: "attention_merge",
    core_number: None,
    contract: Some(|| Arc::new(AttentionMerge)),
    run: Some(mpk_task_attention_merge),
    ready: None,
    gpu: Some(gpu),
};

/// The GPU code.
fn gpu(site: &GpuSite<'_>) -> Result<String, String> {
    let ([partial, _], [out]) = (site.inputs, site.outputs) else {
        return Err("it must have two inputs and one output".to_string());
    };
    let [_, _, splits, dim] = partial.dims;
    if splits == 0 || splits > MAX_SPLITS || dim == 0 {
        return Err(format!("{splits} splits; the GPU code takes 1 to {MAX_SPLITS}"));
    }
    let more = match attended::gpu_columns(out) {
        0 => String::new(),
        columns => format!(", {columns}"),
    };
    Ok(format!("mpk::gpu::AttentionMerge<{}, {dim}{more}>", gpu_float(out)?))
}

const ATTRIBUTES: &[Attribute] = &[Attribute::new("dtype", AttributeKind::DType)];

/// Contract of `attention_merge`.
#[derive(Debug)]
pub struct AttentionMerge;

impl TaskType for AttentionMerge {
    fn name(&self) -> &'static str {
        "attention_merge"
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        let heads = Heads::global(op.attrs)?;
        let [partial, softmax] = contract::inputs(op)?;
        contract::dtype(partial, DType::F32)?;
        contract::dtype(softmax, DType::F32)?;
        let Some(dtype) = contract::attr_dtype(op.attrs, "dtype")?.filter(|d| d.is_float()) else {
            return Err(OpError("attribute `dtype` must be f32, f16 or bf16".to_string()));
        };
        let [rows, local_heads, splits, head_dim] = partial.ty.dims[..] else {
            return Err(OpError(format!("`{}` must have 4 dimensions", partial.name)));
        };
        if head_dim != heads.head_dim || softmax.ty.dims != [rows, local_heads, splits, 2] {
            return Err(OpError(format!(
                "`{}` {:?} and `{}` {:?} do not fit head_dim {}",
                partial.name, partial.ty.dims, softmax.name, softmax.ty.dims, heads.head_dim
            )));
        }
        Ok(vec![TensorType { dtype, dims: vec![rows, local_heads * head_dim], rows: partial.ty.rows }])
    }

    fn shard(&self, _op: &OpView<'_>, _world: u32) -> Result<ShardRule, OpError> {
        Ok(contract::replicated(2, 1))
    }

    fn partition(&self, op: &LocalOp<'_>, _target: &Target) -> Result<Partition, OpError> {
        let heads = Heads::local(op.global.attrs, op.global.outputs[0].sharding, op.rank, op.world)?;
        let [rows, queries, splits, dim] = op.inputs[0].dims[..] else {
            return Err(OpError("partial results must have 4 dimensions".to_string()));
        };
        if queries != heads.num_queries() || rows != attended::rows(op)? {
            return Err(OpError(format!(
                "{rows} rows and {queries} heads of partial results, {} rows and {} heads on this rank",
                attended::rows(op)?,
                heads.num_queries()
            )));
        }
        attended::check(op, queries * dim)?;
        let (rows, active) = rows_and_active(rows, op.global.capacity.active)?;
        let (queries, splits, dim) = (queries as u32, splits as u32, dim as u32);
        let params = mpk_attention_merge_params { head_dim: dim, splits };
        let mut tasks = Vec::new();
        for a in 0..active {
            let share = row_share(rows, a, active);
            for h in 0..heads.num_key_values() {
                let readers = heads.readers(h);
                let (first, last) = (readers.start as u32, readers.end as u32);
                let mut task = TaskSpec {
                    args: [a as i32, first as i32, (last - first) as i32, 0, 0, 0, 0, 0],
                    cost: u64::from(rows / active * (last - first) * splits * dim * 4),
                    ..TaskSpec::default()
                };
                for (operand, width) in [(0, dim), (1, 2)] {
                    let region = Region::whole(&[rows, queries, splits, width])
                        .with(0, share.start, share.end)
                        .with(1, first, last);
                    task.reads.push(Access::rows_of_slot(operand, region, a, active));
                }
                let columns = first * dim..last * dim;
                task.writes.push(attended::write(op, columns, (a, active), Access::rows_of_slot));
                tasks.push(task);
            }
        }
        Ok(Partition { params: params_words(&params), scratch_bytes: 4 * u64::from(splits), tasks })
    }
}

#[cfg(test)]
mod test;
