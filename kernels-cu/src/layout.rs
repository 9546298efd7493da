//! The tiled weight layout (`MPK_LAYOUT_TILED`): sizes, and packing from row-major sources.

use crate::abi;
use std::ops::Range;
use taskgraph::DType;
use taskgraph::target::Backend;
use taskgraph::task_graph::TensorEntry;

const _: () = {
    assert!(Backend::Cpu.tile_k() == abi::MPK_TILE_K && Backend::Cuda.tile_k() == abi::MPK_FRAGMENT_K);
    assert!(matches!(Backend::Cuda.pair_rows(), Some(abi::MPK_PAIR_ROWS)));
    assert!(2 * abi::MPK_PAIR_ROWS == abi::MPK_TILE_ROWS);
};

/// The `enum mpk_layout` of a tensor.
pub fn layout_of(tensor: &TensorEntry, backend: Backend) -> u8 {
    let layout = match (tensor.tiled, backend) {
        (false, _) => abi::MPK_LAYOUT_STRIDED,
        (true, Backend::Cpu) => abi::MPK_LAYOUT_TILED,
        (true, Backend::Cuda) if tensor.paired => abi::MPK_LAYOUT_PAIRED,
        (true, Backend::Cuda) => abi::MPK_LAYOUT_FRAGMENT,
    };
    layout as u8
}

/// The element of `MPK_LAYOUT_WIDE` for (row, column) of a matrix with `columns` columns.
pub fn wide_index(row: usize, column: usize, columns: usize) -> usize {
    let tile = (abi::MPK_WIDE_ROWS as usize, abi::MPK_WIDE_COLUMNS as usize);
    index_in_tiles(tile, row, column, columns, row % 8)
}

/// The same for the narrower column tiles, if the tiles have `tile_rows` rows.
pub fn narrow_index(tile_rows: usize, row: usize, column: usize, columns: usize) -> usize {
    index_in_tiles((tile_rows, abi::MPK_WIDE_NARROW as usize), row, column, columns, row / 4 % 2)
}

/// The same for tiles of these rows and columns. In the row, piece p of 8 elements is in place p ^ `turned`.
fn index_in_tiles(
    (tile_rows, width): (usize, usize),
    row: usize,
    column: usize,
    columns: usize,
    turned: usize,
) -> usize {
    let wide = abi::MPK_WIDE_COLUMNS as usize;
    let tile = row / tile_rows * (columns.div_ceil(wide) * wide / width) + column / width;
    let (row, c) = (row % tile_rows, column % width);
    let place = c % 4 / 2 * 8 + c % 16 / 4 * 2 + c % 2;
    tile * tile_rows * width + row * width + ((c / 16 * 2 + place / 8) ^ turned) * 8 + place % 8
}

/// Elements per row including padding (`strides[0]` of a tiled operand).
pub fn tiled_stride(k: usize) -> usize {
    k.next_multiple_of(abi::MPK_TILE_K as usize)
}

/// Bytes of a tiled matrix `[rows, k]`, with rows padded to 16 and k to 2.
pub fn tiled_bytes(rows: usize, k: usize, dtype: DType) -> usize {
    rows.next_multiple_of(abi::MPK_TILE_ROWS as usize) * tiled_stride(k) * dtype.size() as usize
}

/// Packs `rows` rows into a tiled matrix with `k_local` columns, starting at row `first_dst_row`. Converts `src_dtype`
/// to `dst_dtype` (round to nearest even).
///
/// Row i of the source starts at element `i * src_row_stride_elems`; its `k_local` elements `src_col_range` are used.
/// `dst` is the whole matrix (see [`tiled_bytes`]). The padding of k is written. The padding of the rows is not, so
/// `dst` must start as zeros.
///
/// # Panics
/// A slice is too short, or a type is not a float type. These are errors of the caller.
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

/// Fills `rows` rows of a tiled matrix, starting at row `first_dst_row`, with the values that `row_values` writes. It
/// is called with the number of each row, counted from 0, and a slice of `k_local` values.
///
/// # Panics
/// Those of [`pack_rows`].
pub fn fill_rows(
    dst: &mut [u8],
    dst_dtype: DType,
    k_local: usize,
    first_dst_row: usize,
    rows: usize,
    mut row_values: impl FnMut(usize, &mut [f32]),
) {
    let tile = abi::MPK_TILE_ROWS as usize;
    let mut values = vec![0.0f32; tile * k_local];
    let mut row = 0;
    while row < rows {
        // up to the end of a tile
        let count = (tile - (first_dst_row + row) % tile).min(rows - row);
        for (i, part) in values.chunks_exact_mut(k_local.max(1)).take(count).enumerate() {
            row_values(row + i, part);
        }
        let bytes = bytemuck::cast_slice(&values);
        pack_rows(
            dst,
            dst_dtype,
            k_local,
            first_dst_row + row,
            bytes,
            DType::F32,
            k_local,
            0..k_local,
            count,
        );
        row += count;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{decode, encode, random_values, rounded};

    /// Index of an element of a tiled matrix, as defined in `abi.h`.
    fn tiled_index(dtype: DType, stride: usize, row: usize, i: usize) -> usize {
        let in_tile = match dtype {
            DType::Bf16 => (i / 2 * 16 + row % 16) * 2 + i % 2,
            _ => i * 16 + row % 16,
        };
        row / 16 * 16 * stride + in_tile
    }

    #[test]
    fn parts_at_any_row_with_any_columns_land_where_the_abi_says() {
        let dtypes = [DType::F32, DType::F16, DType::Bf16];
        for src_dtype in dtypes {
            for dst_dtype in dtypes {
                for (parts, src_k, columns) in [
                    (vec![16usize, 32], 64usize, 0..64usize),
                    (vec![5, 17, 1, 40], 97, 3..94),
                    (vec![100], 700, 100..613),
                    (vec![3, 16, 16], 1, 0..1),
                ] {
                    let k = columns.len();
                    let rows: usize = parts.iter().sum();
                    let mut dst = vec![0u8; tiled_bytes(rows, k, dst_dtype)];
                    let mut filled = dst.clone();
                    let mut expected = Vec::new();
                    let mut first = 0;
                    for (seed, part) in parts.iter().enumerate() {
                        let values = random_values(seed as u64, part * src_k);
                        let source = encode(src_dtype, &values);
                        let range = columns.clone();
                        pack_rows(&mut dst, dst_dtype, k, first, &source, src_dtype, src_k, range, *part);
                        let values = rounded(dst_dtype, &rounded(src_dtype, &values));
                        let row = |r: usize| &values[r * src_k..][columns.clone()];
                        fill_rows(&mut filled, dst_dtype, k, first, *part, |r, out| {
                            out.copy_from_slice(row(r))
                        });
                        (0..*part).for_each(|r| expected.push(row(r).to_vec()));
                        first += part;
                    }
                    assert_eq!(dst, filled);
                    let got = decode(dst_dtype, &dst);
                    let stride = tiled_stride(k);
                    let mut places = vec![false; got.len()];
                    for (r, row) in expected.iter().enumerate() {
                        for (i, value) in row.iter().enumerate() {
                            let at = tiled_index(dst_dtype, stride, r, i);
                            assert_eq!(got[at], *value, "{src_dtype} -> {dst_dtype} row {r} column {i}");
                            places[at] = true;
                        }
                    }
                    let padding = got.iter().zip(&places).filter(|(_, used)| !**used);
                    assert!(padding.into_iter().all(|(value, _)| *value == 0.0));
                }
            }
        }
    }
}
