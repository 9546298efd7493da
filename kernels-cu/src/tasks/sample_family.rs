//! What the sampling operators share: `sample_partial`, `sample_merge`, `sample_weigh` and `sample_reduce`.
//!
//! They find the token of each sample, including greedy ones; in a graph that has them, they alone choose the tokens. Each
//! rank looks at its columns of the logits only. The order is: penalties, temperature, min-p, top-k, top-p, noise.
//!
//! 1. `sample_partial` processes, for each sample and part of the columns, the logits and adds noise. It finds the
//!    highest logit and the *frontier*: the tokens that no other one beats both in order (higher logit, lower token
//!    among equals) and in noisy value. Each of the three filters keeps the first tokens in order. The highest noisy
//!    value among any number of first tokens is in the frontier, which has about ten entries. For a request with top-k,
//!    if that is small or there is top-p, it returns the `top_k` highest logits instead.
//! 2. `sample_weigh`, the second pass, joins all ranks' frontiers. For each entry it returns the number and the weight
//!    of the part's tokens before it. A single entry, the highest logit, is always drawn and needs neither. On several
//!    ranks, `sample_merge` joins the lists of a rank's parts.
//! 3. `sample_reduce` adds these up, and takes the last entry of the frontier that the filters keep.
//!
//! So two small exchanges, and one of merged lists, give the exact result for any logits and any number of tokens that a filter keeps. Weights
//! are whole numbers, so their sums are the same in any order. The token depends neither on the number of ranks nor on
//! how the columns are cut. Steps that a request's parameters do not need are skipped for it at run time.

use super::argmax_partial::cut;
use super::contract;
use crate::abi::MPK_SAMPLE_MOST_LISTED;
use std::ops::Range;
use taskgraph::op_graph::Attrs;
use taskgraph::task_type::{Access, LocalOp, Need, OpError, OperandView, TaskSpec};
use taskgraph::{Attribute, AttributeKind, DType, Region, Sharding, Split, Target};

/// Capacity of a list of the highest logits: the largest `top_k` that is allowed together with a `top_p` below 1.
pub const MOST_LISTED: u32 = MPK_SAMPLE_MOST_LISTED;

/// Maximum number of columns of a part. The GPU code has room for two samples of so many, or for four of half as many.
pub(crate) const MOST_COLUMNS: u32 = 5376;
/// Maximum number of entries of the lists that a task joins. The GPU code divides numbers below 2^20 only.
const MOST_LISTED_TOGETHER: u64 = (1 << 20) - 1;
/// Minimum number of columns of a part, if the rank has that many. With smaller parts there is only more to exchange.
const FEWEST_COLUMNS: u64 = 2048;

/// The attributes `slices` (the number of ranks), `parts` (of each rank's columns) and `kept` (capacity of a list).
pub(crate) const ATTRIBUTES: &[Attribute] = &[
    Attribute::new("slices", AttributeKind::Whole),
    Attribute::new("parts", AttributeKind::Whole),
    Attribute::new("kept", AttributeKind::Whole),
];

/// The values of [`ATTRIBUTES`].
pub(crate) struct Numbers {
    pub slices: u32,
    pub parts: u32,
    pub kept: u32,
}

impl Numbers {
    pub fn new(attrs: &Attrs) -> Result<Self, OpError> {
        let number = |name, otherwise| Ok(contract::attr_u32(attrs, name)?.unwrap_or(otherwise));
        let numbers =
            Numbers { slices: number("slices", 1)?, parts: number("parts", 1)?, kept: number("kept", 1)? };
        if numbers.slices == 0 || numbers.parts == 0 || !(1..=MOST_LISTED).contains(&numbers.kept) {
            return Err(OpError(format!("`slices` and `parts` must be above 0, `kept` 1 to {MOST_LISTED}")));
        }
        let listed = u64::from(numbers.slices.max(numbers.parts)) * u64::from(numbers.kept);
        if listed > MOST_LISTED_TOGETHER {
            return Err(OpError(format!(
                "lists of {} logits from {} slices or {} parts are more than {MOST_LISTED_TOGETHER} together",
                numbers.kept, numbers.slices, numbers.parts
            )));
        }
        Ok(numbers)
    }

    /// The exchanged tensors are split on their first dimension, a slice for each rank.
    pub fn slices_of(&self, world: u32) -> Result<Sharding, OpError> {
        if self.slices != world {
            return Err(OpError(format!("`slices` is {}; on {world} ranks it must be {world}", self.slices)));
        }
        Ok(match world {
            1 => Sharding::Replicated,
            _ => Sharding::split(0, u64::from(world), Split::Even { unit: 1 }),
        })
    }
}

/// What a sample costs in a task beside its columns, as if it had so many more of them: barriers, and what one warp does.
const SAMPLE_COLUMNS: u64 = 1536;

/// What it costs if parts cut tiles, likewise. On an H200, 31 parts instead of 33 cost 7 us at batch 8, of which their width is one; a
/// thousand columns of two samples take about 1 us (results/log.md, 2026-11-29).
const CUT_TILES_COLUMNS: u64 = 8192;

/// The attribute `parts`, for graphs with room for `samples` samples, whose logits come in `tiles` tiles of columns a rank.
/// Each of a rank's `workers` has one task, if the parts are not too wide then. Of the ways to share parts and samples among
/// the workers, this is the one that takes the least time; of equal ones, the one with the fewest parts, since all parts'
/// records are joined. It counts that parts which end where a tile does wait for their own tiles only. Otherwise the builder
/// may join the events of neighbours, up to one event of all tiles.
pub fn parts(vocabulary: u64, world: u32, samples: u32, workers: u32, tiles: u32) -> u32 {
    let share = vocabulary.div_ceil(u64::from(world.max(1)));
    let least = share.div_ceil(u64::from(MOST_COLUMNS - 16)).max(1); // parts differ by one unit of 16 columns
    let most = share.div_ceil(FEWEST_COLUMNS).max(least);
    let (workers, samples) = (u64::from(workers.max(1)), u64::from(samples.max(1)));
    let cost = |parts: u64| {
        let groups = sample_groups(samples, parts, workers);
        let rounds = (parts * groups).div_ceil(workers);
        rounds * samples.div_ceil(groups) * (share.div_ceil(parts) + SAMPLE_COLUMNS)
    };
    let waiting = |parts: u64| if u64::from(tiles).is_multiple_of(parts) { 0 } else { CUT_TILES_COLUMNS };
    (least..=most).min_by_key(|&parts| (cost(parts) + waiting(parts), parts)).unwrap_or(least) as u32
}

/// The samples are processed in so many groups, a task for each part and group: one task for each worker, or a few less.
fn sample_groups(samples: u64, parts: u64, workers: u64) -> u64 {
    let each = samples.div_ceil((workers / parts.max(1)).clamp(1, samples.max(1)));
    samples.div_ceil(each.max(1))
}

/// Checks `logits` f32 [samples, vocabulary] and `counts` u32 [slots, vocabulary]. Returns the number of samples.
pub(crate) fn samples(
    numbers: &Numbers,
    logits: &OperandView<'_>,
    counts: &OperandView<'_>,
) -> Result<u64, OpError> {
    contract::dtype(logits, DType::F32)?;
    contract::dtype(counts, DType::U32)?;
    let (samples, vocabulary) = contract::matrix(logits)?;
    if contract::matrix(counts)?.1 != vocabulary {
        return Err(OpError(format!(
            "`{}` must have a column for each of the {vocabulary} tokens, not {:?}",
            counts.name, counts.ty.dims
        )));
    }
    if numbers.kept != kept(vocabulary) {
        return Err(OpError(format!("`kept` must be {} for {vocabulary} tokens", kept(vocabulary))));
    }
    Ok(samples)
}

/// The attribute `kept`.
pub fn kept(vocabulary: u64) -> u32 {
    vocabulary.min(u64::from(MOST_LISTED)) as u32
}

/// The sharding that the logits need: that of the counts.
pub(crate) fn logits_need(counts: &OperandView<'_>, world: u32) -> Result<Need, OpError> {
    if world == 1 {
        return Ok(Need::AsIs);
    }
    contract::held_once(counts, world)?;
    match contract::split_columns(counts.sharding) {
        Some([_]) => Ok(Need::Split(counts.sharding.clone())),
        _ => Err(OpError(format!("`{}` must be split on its columns, in one part", counts.name))),
    }
}

/// A task for each part of the columns of `logits`, input `input`, followed by `counts`, and some samples: arguments
/// `[part, first token, columns, first sample, samples, 0..]`. A part without columns does not read them.
pub(crate) fn part_tasks(
    op: &LocalOp<'_>,
    input: usize,
    target: &Target,
) -> Result<(Numbers, Vec<TaskSpec>), OpError> {
    let numbers = Numbers::new(op.global.attrs)?;
    let (samples, columns) = contract::local_matrix(&op.inputs[input])?;
    let (slots, _) = contract::local_matrix(&op.inputs[input + 1])?;
    let first_token = op.input_ranges(input).first().map_or(0, |range| range.start as u32);
    let ranges = cut(columns, numbers.parts);
    let groups = sample_groups(u64::from(samples), u64::from(numbers.parts), u64::from(target.workers));
    let each = u64::from(samples).div_ceil(groups.max(1)) as u32;
    let mut tasks = Vec::with_capacity(groups as usize * ranges.len());
    for first in (0..samples).step_by(each.max(1) as usize) {
        let end = (first + each).min(samples);
        for (part, range) in (0..).zip(&ranges) {
            let count = range.end - range.start;
            let mut task = TaskSpec {
                args: [
                    part,
                    (first_token + range.start) as i32,
                    count as i32,
                    first as i32,
                    (end - first) as i32,
                    0,
                    0,
                    0,
                ],
                cost: u64::from(count) * u64::from(end - first) * 8,
                ..TaskSpec::default()
            };
            if count > 0 {
                let columns = |rows: Region| rows.with(1, range.start, range.end);
                let rows = Region::whole(&[samples, 0]).with(0, first, end);
                task.reads.push(Access::new(input as u8, columns(rows)));
                task.reads.push(Access::new(input as u8 + 1, columns(Region::whole(&[slots, 0]))));
            }
            tasks.push(task);
        }
    }
    Ok((numbers, tasks))
}

/// All records of some samples, in a tensor [slices, parts, samples, words].
pub(crate) fn records_of(dims: &[u64], samples: Range<u32>) -> Region {
    let dims: Vec<u32> = dims.iter().map(|d| *d as u32).collect();
    Region::whole(&dims).with(dims.len() - 2, samples.start, samples.end)
}
