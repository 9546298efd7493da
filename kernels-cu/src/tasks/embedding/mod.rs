//! `embedding`: the rows of the table `[vocabulary, k]` (tiled) for the iteration's tokens.
//!
//! Output `[token rows, k]` f32. With a table that is split over the vocabulary, a rank writes 0 for tokens of other
//! ranks, and the output is partial.

use crate::abi::{self, mpk_embedding_params, mpk_task_embedding, params_words};
use crate::registry::{GpuSite, Registration};
use crate::tasks::contract;
use crate::tasks::operand::{gpu_float, gpu_rows_contiguous};
use std::sync::Arc;
use taskgraph::task_type::{
    Access, LocalOp, Need, OpError, OpView, Partition, ShardRule, TaskSpec, TensorType,
};
use taskgraph::{DType, Region, Rows, Sharding, Target, TaskType};

#[cfg(test)]
mod reference;
#[cfg(test)]
mod test;

/// Registry entry.
pub const REGISTRATION: Registration = Registration {
    name: "embedding",
    core_number: None,
    contract: Some(|| Arc::new(Embedding)),
    run: Some(mpk_task_embedding),
    ready: None,
    gpu: Some(gpu),
};

/// The GPU code.
fn gpu(site: &GpuSite<'_>) -> Result<String, String> {
    let ([table], [out]) = (site.inputs, site.outputs) else {
        return Err("it must have one input and one output".to_string());
    };
    if u32::from(table.layout) != abi::MPK_LAYOUT_FRAGMENT {
        return Err(format!("its table [{}, {}] is not packed for the GPU", table.dims[0], table.dims[1]));
    }
    gpu_rows_contiguous([out])?;
    let flagged = out.dtype == abi::MPK_F32_FLAGGED as u8;
    let out = if flagged { "MPK_F32_FLAGGED" } else { gpu_float(out)? };
    Ok(format!("mpk::gpu::Embedding<{}, {out}>", gpu_float(table)?))
}

/// Contract of `embedding`.
#[derive(Debug)]
pub struct Embedding;

impl TaskType for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        let [table] = contract::inputs(op)?;
        let (_, k) = contract::matrix(table)?;
        contract::float(table)?;
        let dims = vec![u64::from(op.capacity.rows), k];
        Ok(vec![TensorType { dtype: DType::F32, dims, rows: Rows::Tokens }])
    }

    fn shard(&self, op: &OpView<'_>, world: u32) -> Result<ShardRule, OpError> {
        let [table] = contract::inputs(op)?;
        let output = match table.sharding {
            Sharding::Replicated => Sharding::Replicated,
            Sharding::Split { dim: 0, parts } if parts.len() == 1 => {
                contract::held_once(table, world)?;
                if world == 1 { Sharding::Replicated } else { Sharding::Partial }
            }
            _ => {
                return Err(OpError(format!(
                    "table `{}` must be replicated, or split on dimension 0, the vocabulary, in one part",
                    table.name
                )));
            }
        };
        Ok(ShardRule { inputs: vec![Need::AsIs], outputs: vec![output] })
    }

    fn partition(&self, op: &LocalOp<'_>, target: &Target) -> Result<Partition, OpError> {
        let (rows, columns) = contract::local_matrix(&op.outputs[0])?;
        let (tokens, k) = contract::local_matrix(&op.inputs[0])?;
        let first_token = op.input_ranges(0).first().map_or(0, |range| range.start) as u32;
        let params = mpk_embedding_params { push: 0, first_token, num_tokens: tokens };
        // On several ranks, the sum may be split over the ranks in blocks of columns. Then no tile spans two blocks.
        let blocks = (op.world > 1).then(|| target.column_tiles_of_blocks(columns, op.world)).flatten();
        let tasks = blocks
            .unwrap_or_else(|| target.column_tiles(columns, 1))
            .into_iter()
            .map(|tile| {
                let region = Region::whole(&[rows, columns]).with(1, tile.start, tile.end);
                let mut task = TaskSpec::default();
                task.reads.push(Access::new(0, Region::whole(&[tokens, k])));
                task.writes.push(Access::new(0, region));
                task.args[0] = tile.start as i32;
                // a cache line for every pair of values
                task.cost = region.volume() * (32 + 4);
                task
            })
            .collect();
        Ok(Partition { params: params_words(&params), scratch_bytes: 0, tasks })
    }

    fn tiled_inputs(&self) -> &'static [usize] {
        &[0]
    }

    fn constant_inputs(&self) -> &'static [usize] {
        &[0]
    }

    fn gathered_inputs(&self) -> &'static [usize] {
        &[0]
    }

    fn pushable_output(&self) -> Option<usize> {
        Some(0)
    }

    fn push_param(&self) -> Option<usize> {
        Some(0)
    }
}
