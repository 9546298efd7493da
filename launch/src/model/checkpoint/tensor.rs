//! A tensor of a checkpoint, read by ranges.

use std::{ops::Range, path::Path};

use super::shard::Shard;
use crate::model::{convert::convert, error::InputError, hf_config::WeightDtype};
use safetensors::Dtype;

/// Bytes of the file that are mapped at a time while a range is copied.
const COPY_BLOCK: usize = 4 << 20;

/// Row parts of at least this many bytes are read by one system call each. Shorter parts are cheaper to map.
const READ_ROW: usize = 1024;

/// A tensor in a mapped file. A tensor with one dimension counts as a matrix with one row.
#[derive(Debug, Clone)]
pub struct TensorView<'a> {
    /// Element type in the file.
    pub dtype: WeightDtype,
    /// Dimensions as the file has them.
    pub shape: Vec<usize>,
    pub(super) shard: &'a Shard,
    pub(super) begin: usize,
    pub(super) end: usize,
}

impl<'a> TensorView<'a> {
    /// Tensor `name` of `shard`.
    pub(super) fn of(shard: &'a Shard, name: &str) -> Result<Self, InputError> {
        let error =
            |problem: String| InputError::Tensor { path: shard.path.clone(), tensor: name.into(), problem };
        let info = shard.info(name).ok_or_else(|| error("missing from this file".into()))?;
        let dtype = match info.dtype {
            Dtype::F32 => WeightDtype::F32,
            Dtype::F16 => WeightDtype::F16,
            Dtype::BF16 => WeightDtype::Bf16,
            other => {
                return Err(error(format!(
                    "has dtype {other}, which is not supported; supported are F32, F16 and BF16"
                )));
            }
        };
        let range = shard.range(info).ok_or_else(|| error("lies outside the file".into()))?;
        Ok(TensorView { dtype, shape: info.shape.clone(), shard, begin: range.start, end: range.end })
    }

    /// The file that holds the tensor.
    pub fn path(&self) -> &'a Path {
        &self.shard.path
    }

    /// All bytes: row-major, little-endian. Reading them maps them; see [`TensorView::release`].
    pub fn bytes(&self) -> &'a [u8] {
        self.shard.bytes(self.begin, self.end)
    }

    /// Rows and columns: `[n]` is 1 x n; further dimensions count as columns.
    pub fn matrix(&self) -> (usize, usize) {
        matrix(&self.shape)
    }

    /// The bytes of some rows, clamped to those that exist.
    pub fn row_bytes(&self, rows: Range<usize>) -> &'a [u8] {
        let (begin, end) = self.row_range(rows);
        self.shard.bytes(begin, end)
    }

    /// Releases the memory that reading `rows` took. They can be read again.
    pub fn release(&self, rows: Range<usize>) {
        let (begin, end) = self.row_range(rows);
        self.shard.release(begin, end);
    }

    fn row_range(&self, rows: Range<usize>) -> (usize, usize) {
        let (count, columns) = self.matrix();
        let pitch = columns * self.dtype.size();
        let last = rows.end.min(count);
        let first = rows.start.min(last);
        (self.begin + first * pitch, self.begin + last * pitch)
    }

    /// Reads elements without conversion and without mapping the file: whole rows at once, otherwise row by row if the
    /// rows are long enough. Returns false if the bytes must be read another way.
    fn read(&self, rows: &Range<usize>, columns: &Range<usize>, pitch: usize, out: &mut [u8]) -> bool {
        let element = self.dtype.size();
        let first = self.begin + rows.start * pitch + columns.start * element;
        if columns.len() * element == pitch {
            return self.shard.read(first, out);
        }
        let length = columns.len() * element;
        length >= READ_ROW
            && out
                .chunks_exact_mut(length)
                .enumerate()
                .all(|(row, out)| self.shard.read(first + row * pitch, out))
    }

    /// Copies the elements [rows, columns] to `out` as `dtype`, row-major without gaps. Releases the file's memory on
    /// the way, so that at most a few megabytes of the file are mapped at a time.
    ///
    /// Conversions round to nearest even.
    ///
    /// # Panics
    /// The ranges are outside the tensor, or the size of `out` differs from theirs.
    pub fn copy(&self, rows: Range<usize>, columns: Range<usize>, dtype: WeightDtype, out: &mut [u8]) {
        let (row_count, column_count) = self.matrix();
        assert!(rows.start <= rows.end && rows.end <= row_count, "rows {rows:?} of {row_count}");
        assert!(
            columns.start <= columns.end && columns.end <= column_count,
            "columns {columns:?} of {column_count}"
        );
        let out_pitch = columns.len() * dtype.size();
        assert_eq!(out.len(), rows.len() * out_pitch, "size of the copy's target");
        if out.is_empty() {
            return;
        }
        let element = self.dtype.size();
        let pitch = column_count * element;
        if dtype == self.dtype && self.read(&rows, &columns, pitch, out) {
            return;
        }
        let rows_of_block = (COPY_BLOCK / pitch).max(1);
        for (block, out) in out.chunks_mut(rows_of_block * out_pitch).enumerate() {
            let first = rows.start + block * rows_of_block;
            let block_rows = first..first + out.len() / out_pitch;
            let source = self.row_bytes(block_rows.clone());
            for (row, out) in source.chunks_exact(pitch).zip(out.chunks_exact_mut(out_pitch)) {
                convert(self.dtype, &row[columns.start * element..columns.end * element], dtype, out);
            }
            self.release(block_rows);
        }
    }
}

/// Rows and columns of a tensor of this shape.
pub(crate) fn matrix(shape: &[usize]) -> (usize, usize) {
    match shape {
        [] => (1, 1),
        [columns] => (1, *columns),
        [rows, columns @ ..] => (*rows, columns.iter().product()),
    }
}
