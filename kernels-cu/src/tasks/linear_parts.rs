//! Products of few rows with few tiles: several tasks share the k of a tile, so that more workers have one. Each writes its sums as a
//! summand of its own, and the readers add them: the next norm, and the next residual.
//!
//! The summands lie one after the other in one tensor, `[parts, rows, columns]` (f32). Their number follows from what the readers know:
//! the columns and the workers. Wide products of few rows do the same with two summands (`wide.rs`).

use crate::abi;
use crate::tasks::linear_knobs::{LEAST_PART_COLUMNS, MOST_PARTED_ROWS};
use std::ops::Range;
use taskgraph::task_type::{LocalOp, TensorType};
use taskgraph::{DType, Rows, Target};

/// The most parts. The GPU's code for the readers depends on their number.
const MOST_PARTS: u64 = 4;

/// `[rows, columns]` as several summands, one after the other.
pub fn stacked(parts: u64, rows: u64, columns: u64) -> TensorType {
    TensorType { dtype: DType::F32, dims: vec![parts, rows, columns], rows: Rows::Fixed }
}

/// The number of summands of a matrix of this local type.
pub fn parts_of(ty: &TensorType) -> u32 {
    if ty.dims.len() == 3 { ty.dims[0] as u32 } else { 1 }
}

/// The rows and columns of a matrix of this local type, for each summand.
pub fn matrix_of(ty: &TensorType) -> TensorType {
    let dims = if ty.dims.len() == 3 { ty.dims[1..].to_vec() } else { ty.dims.clone() };
    TensorType { dims, ..ty.clone() }
}

/// How many tasks share the k of a tile, so that most workers have a task.
fn parts_for(columns: u64, target: &Target) -> u64 {
    let tiles = columns.div_ceil(target.column_unit.into()).max(1);
    (u64::from(target.max_tiles) / tiles).clamp(1, MOST_PARTS)
}

/// The type in which a product of few rows wants input `input`, a normed x or a residual: as summands, if its writer has too few tiles
/// for the workers.
pub fn reads_as(op: &LocalOp<'_>, input: usize, target: &Target) -> Option<TensorType> {
    let ty = &op.inputs[input];
    let [rows, columns] = ty.dims[..] else { return None };
    let parts = parts_for(columns, target);
    let fits = op.world == 1 && ty.dtype == DType::F32 && rows <= target.tuned(&MOST_PARTED_ROWS);
    (fits && parts > 1).then(|| stacked(parts, rows, columns))
}

/// Whether tasks can write the output of a product with `k` columns as these summands.
pub fn writes_as(op: &LocalOp<'_>, k: u64, ty: &TensorType, target: &Target) -> bool {
    let ([rows, columns], &[parts, ..]) = (&op.outputs[0].dims[..], &ty.dims[..]) else { return false };
    op.world == 1
        && op.outputs[0].dtype == DType::F32
        && (2..=MOST_PARTS).contains(&parts)
        && *ty == stacked(parts, *rows, *columns)
        && *rows <= target.tuned(&MOST_PARTED_ROWS)
        && k >= parts * target.tuned(&LEAST_PART_COLUMNS).max(abi::MPK_FRAGMENT_K.into())
}

/// The columns of the weight that part `part` of `parts` has: whole blocks of the packed weight.
pub fn columns_of(part: u32, parts: u32, k: u32) -> Range<u32> {
    let blocks = k.div_ceil(abi::MPK_FRAGMENT_K);
    let at = |part: u32| (blocks * part / parts * abi::MPK_FRAGMENT_K).min(k);
    at(part)..at(part + 1)
}

#[cfg(test)]
#[path = "linear_parts_test.rs"]
mod tests;
