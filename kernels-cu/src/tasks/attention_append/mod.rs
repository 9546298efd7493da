//! `attention_append`: the first step of attention over many rows. Applies norm and rope to queries and keys, writes
//! keys and values to their pages, and queries to a separate tensor. Created by `attention`'s expansion.
//!
//! Inputs: 0. `qkv`, 1. `rope`, 2. and 3. with `qk_norm` the weights of the norms, all as for `attention`. Outputs:
//! 0. [rows, local heads head_dim], act dtype; 1. the cache.
//!
//! One task per block of rows b and local key-value head h: arguments `[first row, h, 0..]`. Blocks consist of the
//! graph's rows, so it is known which query rows a task writes. The pages of its rows are known only at run time. Since
//! a position has one row in an iteration, the tasks write different positions. The region for the positions of (b, h)
//! is one index of `kv_region_dims`.

use crate::abi::{mpk_attention_append_params, mpk_task_attention_append, params_words};
use crate::registry::{GpuSite, Registration};
use crate::tasks::attention_prefill::{gpu_page_size, step_only};
use crate::tasks::contract;
use crate::tasks::heads::{Heads, MAX_SPLITS, rows_and_active, scratch_bytes};
use crate::tasks::operand::gpu_float;
use std::sync::Arc;
use taskgraph::task_type::{Access, LocalOp, OpError, OpView, Partition, ShardRule, TaskSpec, TensorType};
use taskgraph::{Region, Target, TaskType};

/// Registry entry.
pub const REGISTRATION: Registration = Registration {
    name: "attention_append",
    core_number: None,
    contract: Some(|| Arc::new(AttentionAppend)),
    run: Some(mpk_task_attention_append),
    ready: None,
    gpu: Some(gpu),
};

/// The GPU code.
fn gpu(site: &GpuSite<'_>) -> Result<String, String> {
    let words = size_of::<mpk_attention_append_params>() / 4;
    let bytes = bytemuck::cast_slice(site.params.get(..words).ok_or("its parameters are too few")?);
    let params: mpk_attention_append_params = bytemuck::pod_read_unaligned(bytes);
    let norm = params.qk_norm != 0;
    let [out, cache] = site.outputs else { return Err("it must have two outputs".to_string()) };
    if site.inputs.len() != if norm { 6 } else { 4 } {
        return Err("it must have four inputs, or six with norms".to_string());
    }
    let page_size = gpu_page_size(cache, params.head_dim)?;
    for operand in site.inputs[..3].iter().chain([out]).chain(&site.inputs[4..]) {
        if operand.dtype != cache.dtype || (operand.ndim == 2 && operand.strides[0] % 8 != 0) {
            return Err("its operands must have the cache's type, and rows of whole 16 bytes".to_string());
        }
    }
    Ok(format!("mpk::gpu::AttentionAppend<{}, {}, {page_size}, {norm}>", gpu_float(cache)?, params.head_dim))
}

/// Contract of `attention_append`.
#[derive(Debug)]
pub struct AttentionAppend;

impl TaskType for AttentionAppend {
    fn name(&self) -> &'static str {
        "attention_append"
    }

    fn infer(&self, _op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        Err(step_only(self.name()))
    }

    fn shard(&self, _op: &OpView<'_>, _world: u32) -> Result<ShardRule, OpError> {
        Err(step_only(self.name()))
    }

    fn partition(&self, op: &LocalOp<'_>, target: &Target) -> Result<Partition, OpError> {
        let attrs = op.global.attrs;
        let heads = Heads::local(attrs, op.global.inputs[0].sharding, op.rank, op.world)?;
        let (rows, active) = rows_and_active(op.inputs[0].dims[0], op.global.capacity.active)?;
        let (queries, key_values, dim) =
            (heads.num_queries() as u32, heads.num_key_values() as u32, heads.head_dim as u32);
        let columns = op.inputs[0].dims[1];
        if columns != u64::from((queries + 2 * key_values) * dim) {
            return Err(OpError(format!("local width of qkv is {columns}")));
        }
        let params = mpk_attention_append_params {
            head_dim: dim,
            qk_norm: u32::from(op.inputs.len() == 4),
            eps: contract::attr_f64(attrs, "eps")?.unwrap_or(0.0) as f32,
        };
        let most = rows.min(active.saturating_mul(MAX_SPLITS));
        // The sizes of blocks are powers of two, so no block needs rows of two tiles of the product before.
        let block_rows =
            rows.div_ceil((target.workers / key_values.max(1)).clamp(1, most)).next_power_of_two();
        let blocks = rows.div_ceil(block_rows);
        let splits = blocks.div_ceil(active);
        let at = |b: u32| (b * block_rows).min(rows);
        let whole = |index: usize| {
            let dims: Vec<u32> = op.inputs[index].dims.iter().map(|d| *d as u32).collect();
            Access::new(index as u8, Region::whole(&dims))
        };
        let mut tasks = Vec::with_capacity((blocks * key_values) as usize);
        for b in 0..blocks {
            let block = |first: u32, count: u32| {
                Region::whole(&[rows, 0]).with(0, at(b), at(b + 1)).with(
                    1,
                    first * dim,
                    (first + count) * dim,
                )
            };
            for h in 0..key_values {
                let readers = heads.readers(u64::from(h));
                let (first, count) = (readers.start as u32, (readers.end - readers.start) as u32);
                let mut task = TaskSpec {
                    args: [at(b) as i32, h as i32, 0, 0, 0, 0, 0, 0],
                    cost: u64::from((at(b + 1) - at(b)) * (count + 2) * dim) * 2 * op.inputs[0].dtype.size(),
                    ..TaskSpec::default()
                };
                task.reads.push(Access::new(0, block(first, count)));
                task.reads.push(Access::new(0, block(queries + h, 1)));
                task.reads.push(Access::new(0, block(queries + key_values + h, 1)));
                task.reads.extend((1..op.inputs.len()).map(whole));
                task.writes.push(Access::new(0, block(first, count)));
                let (a, i) = (b / splits, b % splits);
                let cache = Region::whole(&[0, 0, 0]).with(0, a, a + 1).with(1, h, h + 1).with(2, i, i + 1);
                task.writes.push(Access::pages_of_rows(1, cache));
                tasks.push(task);
            }
        }
        let scratch_bytes = scratch_bytes(heads.head_dim);
        Ok(Partition { params: params_words(&params), scratch_bytes, tasks })
    }

    fn constant_inputs(&self) -> &'static [usize] {
        &[1, 2, 3]
    }
}
