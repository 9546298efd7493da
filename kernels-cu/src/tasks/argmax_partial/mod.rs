//! `argmax_partial`: for each sample and column tile of the logits, the highest values with their tokens and the
//! sum of exponentials.
//!
//! Input: `logits` [samples, vocabulary] f32. On several ranks it is split on its columns, or replicated; then each
//! rank takes its share of the columns. Output: `partials` u32 [slices, tiles, samples, words], split on dimension 0:
//! rank r writes slice r. A record of `words` words holds the hash of the batch state (low word, high word), the
//! maximum (f32), the sum of exp(x - maximum) (f32), and K pairs of value (f32) and global token (u32), highest value
//! first, and among equal values lowest token first. K = max(1, top_k), words = 4 + 2 K. A tile with fewer than K
//! candidates is filled up with (-infinity, 0xFFFFFFFF). NaN counts as -infinity.
//!
//! Attributes: `top_k` (default 0), `slices` (the number of ranks; default 1), `tiles` (column tiles per rank, the same
//! number on all ranks; [`tiles`] computes it; default 1), `vocab_size` (columns from there on are padding; default:
//! all columns), `sampled` (default false: the sampling operators find the tokens, so the columns of requests without
//! log-probabilities are not looked at, and their records have no candidates).
//!
//! One task per tile: arguments `[tile, first global token, columns, 0..]`. A tile without columns has no input and
//! writes records without candidates.

use crate::abi::{MPK_ARGMAX_PAIRS, mpk_argmax_partial_params, mpk_task_argmax_partial, params_words};
use crate::registry::{GpuSite, Registration};
use crate::tasks::contract;
use std::ops::Range;
use std::sync::Arc;
use taskgraph::op_graph::Attrs;
use taskgraph::task_type::{
    Access, LocalOp, Need, OpError, OpView, OperandView, Partition, ShardRule, TaskSpec, TensorType,
};
use taskgraph::{Attribute, AttributeKind, DType, Region, Rows, Sharding, Split, Target, TaskType};

/// Registry entry.
pub const REGISTRATION: Registration = Registration {
    name: "argmax_partial",
    core_number: None,
    contract: Some(|| Arc::new(ArgmaxPartial)),
    run: Some(mpk_task_argmax_partial),
    ready: None,
    gpu: Some(gpu),
};

/// Maximum number of candidates per record that the GPU code has room for.
pub(crate) const GPU_MAX_KEPT: u32 = 256;

/// The GPU code.
fn gpu(site: &GpuSite<'_>) -> Result<String, String> {
    match site.params {
        [kept @ 1..=GPU_MAX_KEPT, 0, ..] => Ok(format!("mpk::gpu::ArgmaxPartial<{kept}>")),
        [kept @ 1..=GPU_MAX_KEPT, ..] => Ok(format!("mpk::gpu::ArgmaxPartial<{kept}, true>")),
        [kept, ..] => Err(format!("{kept} candidates; the GPU code keeps 1 to {GPU_MAX_KEPT}")),
        [] => Err("it has no parameters".to_string()),
    }
}

/// Number of candidates per record: max(1, `top_k`).
pub fn kept(top_k: u32) -> u32 {
    top_k.max(1)
}

/// Number of words per record.
pub fn words(top_k: u32) -> u64 {
    u64::from(MPK_ARGMAX_PAIRS) + 2 * u64::from(kept(top_k))
}

/// The attribute `tiles`: the number of column tiles that the target makes of the largest share of `vocabulary`
/// columns.
pub fn tiles(vocabulary: u64, world: u32, target: &Target) -> u32 {
    let share = vocabulary.div_ceil(u64::from(world.max(1))).min(u64::from(u32::MAX));
    (target.column_tiles(share as u32, 1).len() as u32).max(1)
}

/// `columns` cut into exactly `tiles` ranges, as `Target::column_tiles` cuts them; the last ones may be empty.
pub(crate) fn cut(columns: u32, tiles: u32) -> Vec<Range<u32>> {
    let units = u64::from(columns.div_ceil(16));
    let full = units.min(u64::from(tiles)).max(1);
    let at = |t: u32| ((units * u64::from(t).min(full) / full * 16) as u32).min(columns);
    (0..tiles).map(|t| at(t)..at(t + 1)).collect()
}

/// The sharding that `logits` needs, and that of a result with one slice for each rank on dimension 0.
pub(crate) fn slice_of_rank(
    logits: &OperandView<'_>,
    slices: u32,
    world: u32,
) -> Result<(Need, Sharding), OpError> {
    let by_columns = contract::split_columns(logits.sharding).is_some();
    if by_columns {
        contract::held_once(logits, world)?;
    }
    let need = if by_columns { Need::AsIs } else { Need::Replicated };
    if slices == 1 && (world == 1 || !by_columns) {
        return Ok((need, Sharding::Replicated));
    }
    if slices != world {
        return Err(OpError(format!("`slices` is {slices}; on {world} ranks it must be {world}")));
    }
    Ok((need, Sharding::split(0, u64::from(slices), Split::Even { unit: 1 })))
}

/// The columns of the local logits, input `input`, that this rank processes, and the token of the tensor's first column.
pub(crate) fn columns_of_rank(
    op: &LocalOp<'_>,
    input: usize,
    slices: u32,
) -> Result<(Range<u32>, u64), OpError> {
    let (_, local) = contract::local_matrix(&op.inputs[input])?;
    match op.input_ranges(input)[..] {
        [ref range] => Ok((0..local, range.start)),
        [] if slices > 1 => {
            let columns = op.global.inputs[input].ty.dims[1];
            let own = Split::Even { unit: 16 }.range(columns, op.rank, op.world);
            Ok((own.start as u32..own.end as u32, 0))
        }
        [] => Ok((0..local, 0)),
        _ => Err(OpError("the logits must be split in one part".to_string())),
    }
}

struct Numbers {
    top_k: u32,
    slices: u32,
    tiles: u32,
    sampled: bool,
}

fn numbers(attrs: &Attrs) -> Result<Numbers, OpError> {
    let numbers = Numbers {
        top_k: contract::attr_u32(attrs, "top_k")?.unwrap_or(0),
        slices: contract::attr_u32(attrs, "slices")?.unwrap_or(1),
        tiles: contract::attr_u32(attrs, "tiles")?.unwrap_or(1),
        sampled: contract::attr_bool(attrs, "sampled")?,
    };
    if numbers.slices == 0 || numbers.tiles == 0 || numbers.top_k > 1 << 20 {
        return Err(OpError("`slices` and `tiles` must be above 0, `top_k` at most 1048576".to_string()));
    }
    Ok(numbers)
}

const ATTRIBUTES: &[Attribute] = &[
    Attribute::new("top_k", AttributeKind::Whole),
    Attribute::new("slices", AttributeKind::Whole),
    Attribute::new("tiles", AttributeKind::Whole),
    Attribute::new("vocab_size", AttributeKind::Whole),
    Attribute::new("sampled", AttributeKind::Bool),
];

/// Contract of `argmax_partial`.
#[derive(Debug)]
pub struct ArgmaxPartial;

impl TaskType for ArgmaxPartial {
    fn name(&self) -> &'static str {
        "argmax_partial"
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, op: &OpView<'_>) -> Result<Vec<TensorType>, OpError> {
        let numbers = numbers(op.attrs)?;
        let [logits] = contract::inputs(op)?;
        contract::dtype(logits, DType::F32)?;
        let (samples, columns) = contract::matrix(logits)?;
        match contract::attr_u32(op.attrs, "vocab_size")? {
            Some(size) if size == 0 || u64::from(size) > columns => {
                return Err(OpError(format!(
                    "`vocab_size` {size} must be 1 to {columns}, the columns of `{}`",
                    logits.name
                )));
            }
            _ => {}
        }
        let dims = vec![u64::from(numbers.slices), u64::from(numbers.tiles), samples, words(numbers.top_k)];
        Ok(vec![TensorType { dtype: DType::U32, dims, rows: Rows::Fixed }])
    }

    fn shard(&self, op: &OpView<'_>, world: u32) -> Result<ShardRule, OpError> {
        let [logits] = contract::inputs(op)?;
        let (need, slice) = slice_of_rank(logits, numbers(op.attrs)?.slices, world)?;
        Ok(ShardRule { inputs: vec![need], outputs: vec![slice] })
    }

    fn partition(&self, op: &LocalOp<'_>, _target: &Target) -> Result<Partition, OpError> {
        let numbers = numbers(op.global.attrs)?;
        let (samples, _) = contract::local_matrix(&op.inputs[0])?;
        let vocabulary = match contract::attr_u32(op.global.attrs, "vocab_size")? {
            Some(size) => u64::from(size),
            None => op.global.inputs[0].ty.dims[1],
        };
        let (columns, first_token) = columns_of_rank(op, 0, numbers.slices)?;
        let real = vocabulary.saturating_sub(first_token).min(u64::from(u32::MAX)) as u32;
        let kept = kept(numbers.top_k);
        let words = words(numbers.top_k) as u32;
        let tasks = cut(columns.end - columns.start, numbers.tiles)
            .into_iter()
            .zip(0u32..)
            .map(|(range, tile)| {
                let first = columns.start + range.start;
                let last = (columns.start + range.end).min(real).max(first);
                let token = first_token + u64::from(first);
                let mut task = TaskSpec {
                    args: [tile as i32, token as i32, (last - first) as i32, 0, 0, 0, 0, 0],
                    cost: u64::from(samples) * u64::from(last - first) * 4,
                    ..TaskSpec::default()
                };
                if last > first {
                    task.reads.push(Access::new(0, Region::whole(&[samples, 0]).with(1, first, last)));
                }
                let region = Region::whole(&[1, 0, samples, words]).with(1, tile, tile + 1);
                task.writes.push(Access::new(0, region));
                task
            })
            .collect();
        let params = mpk_argmax_partial_params { kept, sampled: numbers.sampled.into() };
        Ok(Partition { params: params_words(&params), scratch_bytes: 0, tasks })
    }
}

#[cfg(test)]
pub(crate) mod reference;
#[cfg(test)]
mod test;
