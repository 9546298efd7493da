//! The result of attention: `[rows, query heads * head_dim]`, or the same numbers in `MPK_LAYOUT_WIDE` if the next product reads them so.
//! Then no task changes the layout in between.
//!
//! Which rows a task writes is known only at run time. In the wide layout too, the task's share of all rows stands for them in regions
//! ([`taskgraph::trust::share_of_tiles`]). A head has whole column tiles.

use crate::abi::{self, mpk_operand};
use crate::tasks::heads::{Heads, row_share};
use crate::tasks::wide::{is_narrow, is_wide, narrow_dims, wide_dims};
use std::ops::Range;
use taskgraph::Region;
use taskgraph::task_type::{Access, LocalOp, OpError, TensorType};
use taskgraph::trust::share_of_tiles;

/// The dimensions of a result of this size in the layout of `ty`.
fn dims_in(ty: &TensorType, rows: u64, columns: u64) -> Vec<u64> {
    match (is_wide(ty), is_narrow(ty)) {
        (_, true) => narrow_dims(rows, columns),
        (true, false) => wide_dims(rows, columns),
        (false, false) => vec![rows, columns],
    }
}

/// Whether attention can write its result as `ty`, for [`taskgraph::TaskType::writes_as`]. The padding of a column tile would have no
/// writer, and two heads in a column tile would share its bytes.
///
/// On several ranks, the result stays in rows if the product has several row tiles. Each rank may begin with another one of them, and
/// attention's shares do not turn with them, so the proof would have to look at the graphs of all ranks.
pub(crate) fn writes_as(op: &LocalOp<'_>, ty: &TensorType) -> bool {
    let ([rows, columns], Ok(heads)) = (&op.outputs[0].dims[..], Heads::global(op.global.attrs)) else {
        return false;
    };
    is_wide(ty)
        && (op.world == 1 || (is_narrow(ty) && ty.dims[0] == 1))
        && ty.dtype == op.outputs[0].dtype
        && ty.dims == dims_in(ty, *rows, *columns)
        && columns.is_multiple_of(u64::from(abi::MPK_WIDE_COLUMNS))
        && heads.head_dim.is_multiple_of(ty.dims[3])
}

/// The number of rows of output 0.
pub(crate) fn rows(op: &LocalOp<'_>) -> Result<u64, OpError> {
    let rows = op.global.outputs[0].ty.dims.first();
    rows.copied().ok_or_else(|| OpError("the output has no rows".to_string()))
}

/// Checks that output 0 has this number of columns.
pub(crate) fn check(op: &LocalOp<'_>, columns: u64) -> Result<(), OpError> {
    let dims = &op.outputs[0].dims;
    if *dims == dims_in(&op.outputs[0], rows(op)?, columns) {
        return Ok(());
    }
    Err(OpError(format!("the output is {dims:?}, but the rank's heads have {columns} columns")))
}

/// A write of `columns` of output 0, for the rows of share `index` of `of`. `by`: whose rows these are, [`Access::rows_of_slot`] or
/// [`Access::rows_of_units`].
pub(crate) fn write(
    op: &LocalOp<'_>,
    columns: Range<u32>,
    (index, of): (u32, u32),
    by: fn(u8, Region, u32, u32) -> Access,
) -> Access {
    let ty = &op.outputs[0];
    let dims: Vec<u32> = ty.dims.iter().map(|d| *d as u32).collect();
    if is_wide(ty) {
        let (tiles, rows) = share_of_tiles(dims[0], dims[2], index, of);
        let region = Region::whole(&dims).with(0, tiles.start, tiles.end).with(2, rows.start, rows.end);
        let region = region.with(1, columns.start / dims[3], columns.end / dims[3]);
        return by(0, region, index, of).in_tiles();
    }
    let rows = row_share(dims[0], index, of);
    let region = Region::whole(&dims).with(0, rows.start, rows.end).with(1, columns.start, columns.end);
    by(0, region, index, of)
}

/// The template argument of the GPU code for a result in this operand: the columns of a column tile, or 0 for rows.
pub(crate) fn gpu_columns(out: &mpk_operand) -> u32 {
    if out.ndim == 4 { out.dims[3] } else { 0 }
}
