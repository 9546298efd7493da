//! The tiled weight layout (`MPK_LAYOUT_TILED`): sizes, and packing from row-major sources.

use crate::abi;
use std::ops::Range;
use taskgraph::DType;

/// Elements of one row, padding included (`strides[0]` of a tiled operand).
pub fn tiled_stride(k: usize) -> usize {
    k.next_multiple_of(abi::MPK_TILE_K as usize)
}

/// Bytes of a tiled matrix [rows, k]: both padded, rows to 16 and k to 2.
pub fn tiled_bytes(rows: usize, k: usize, dtype: DType) -> usize {
    rows.next_multiple_of(abi::MPK_TILE_ROWS as usize) * tiled_stride(k) * dtype.size() as usize
}

/// Packs `rows` rows into a tiled matrix of `k_local` columns, from row `first_dst_row` on, converting `src_dtype`
/// to `dst_dtype` (round to nearest even).
///
/// Row i of the source starts at element `i * src_row_stride_elems`; its elements `src_col_range` are taken,
/// `k_local` of them. `dst` is the whole matrix (see [`tiled_bytes`]); padding of k is written, the padding of
/// the rows is left as it is, so `dst` must start as zeros.
///
/// # Panics
/// Where a slice is too short for what is asked, or a type is not a float type: errors of the caller.
#[allow(clippy::too_many_arguments)]
pub fn pack_rows(
    dst: &mut [u8],
    dst_dtype: DType,
    k_local: usize,
    first_dst_row: usize,
    src: &[u8],
    src_dtype: DType,
    src_row_stride_elems: usize,
    src_col_range: Range<usize>,
    rows: usize,
) {
    if rows == 0 || k_local == 0 {
        return;
    }
    assert_eq!(src_col_range.len(), k_local);
    assert!(dst_dtype.is_float() && src_dtype.is_float());
    assert!(dst.len() >= tiled_bytes(first_dst_row + rows, k_local, dst_dtype));
    let src_elems = (rows - 1) * src_row_stride_elems + src_col_range.end;
    assert!(src.len() >= src_elems * src_dtype.size() as usize);
    let source = &src[src_col_range.start * src_dtype.size() as usize..];
    // SAFETY: the lengths were checked above; the kernel writes rows first_dst_row.. of dst only.
    unsafe {
        mpk_pack_rows(
            dst.as_mut_ptr(),
            dst_dtype as u32,
            k_local as u64,
            first_dst_row as u64,
            source.as_ptr(),
            src_dtype as u32,
            src_row_stride_elems as u64,
            rows as u64,
        );
    }
}

unsafe extern "C" {
    fn mpk_pack_rows(
        dst: *mut u8,
        dst_dtype: u32,
        k: u64,
        first_dst_row: u64,
        src: *const u8,
        src_dtype: u32,
        src_stride: u64,
        rows: u64,
    );
}
