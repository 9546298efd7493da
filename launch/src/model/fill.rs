//! Fills a rank's weights and constants in the layout that the kernels read.

use crate::model::app_error::AppError;
use crate::model::families::names;
use crate::model::hf_config::{ModelConfig, WeightDtype, rope_table};
use crate::model::not_numbers::NotNumbers;
use crate::model::weights::WeightSource;
use distributed::fill::{Piece, TensorSource, Values};
use kernels_cu::layout::pack_rows;
use std::ops::Range;
use taskgraph::DType;
use taskgraph::op_graph::Role;
use taskgraph::task_graph::{LocalPart, TensorEntry};

/// Bytes that are read from the source before they are packed. Small enough to stay in a core's cache.
const PIECE_BYTES: usize = 256 << 10;

/// The weights and constants of a model, for the ranks of all targets.
pub struct ModelValues<'a> {
    /// The constants depend on it.
    pub config: &'a ModelConfig,
    /// The source of the weights.
    pub weights: &'a WeightSource,
    /// Records weights that are not numbers.
    pub not_numbers: &'a NotNumbers,
}

impl TensorSource for ModelValues<'_> {
    type Error = AppError;

    fn fill(&self, tensor: &TensorEntry, bytes: &mut [u8]) -> Result<(), AppError> {
        match tensor.role {
            Role::Constant if tensor.name == names::ROPE => {
                let table = rope_table(&self.config.rope, self.config.head_dim, tensor.dims[0]);
                bytes[..table.len() * 4].copy_from_slice(bytemuck::cast_slice(&table));
                Ok(())
            }
            _ => fill_weight(self.weights, self.not_numbers, tensor, bytes),
        }
    }

    fn pieces(&self, tensor: &TensorEntry) -> Result<Vec<Piece>, AppError> {
        if matches!(tensor.role, Role::Constant) {
            return Ok(vec![filled(tensor, |bytes| self.fill(tensor, bytes))?]);
        }
        weight_pieces(self.weights, tensor)
    }

    fn read(&self, piece: &Piece, rows: Range<u64>, out: &mut [u8]) -> Result<(), AppError> {
        read_piece(self.weights, self.not_numbers, piece, rows, out)
    }
}

/// A tensor's bytes as the CPU's kernels read them. Tensors that are not packed have the same bytes on every target.
pub fn filled(
    tensor: &TensorEntry,
    fill: impl FnOnce(&mut [u8]) -> Result<(), AppError>,
) -> Result<Piece, AppError> {
    let mut bytes = vec![0; tensor.bytes as usize];
    fill(&mut bytes)?;
    Ok(Piece { values: Values::Bytes(bytes), first_row: 0, first_column: 0, rows: 0, columns: 0 })
}

/// The pieces of a weight: this rank's range of each part.
pub fn weight_pieces(weights: &WeightSource, tensor: &TensorEntry) -> Result<Vec<Piece>, AppError> {
    check_dtype(tensor)?;
    let mut pieces = Vec::new();
    let mut next = 0;
    for part in &tensor.parts {
        let shape: Vec<usize> = part.dims.iter().map(|&d| d as usize).collect();
        let range = |dim: usize| match &part.range {
            Some((d, r)) if *d == dim => r.clone(),
            _ => 0..part.dims[dim],
        };
        let (rows, columns) = if shape.len() == 1 { (0..1, range(0)) } else { (range(0), range(1)) };
        let origin = (rows.start, columns.start);
        let values = match weights {
            WeightSource::Random(random) => {
                let values = random.tensor(&part.source, &shape);
                Values::Random {
                    key: values.key(),
                    norm: values.is_norm(),
                    pitch: values.columns() as u64,
                    origin,
                }
            }
            other => Values::Rows {
                source: part.source.clone(),
                dtype: other.dtype(&part.source, &shape)?.dtype(),
                shape: shape.clone(),
                origin,
            },
        };
        let (rows, columns) = (rows.end - rows.start, columns.end - columns.start);
        let (first_row, first_column) = if shape.len() == 1 { (0, next) } else { (next, 0) };
        next += if shape.len() == 1 { columns } else { rows };
        pieces.push(Piece { values, first_row, first_column, rows, columns });
    }
    Ok(pieces)
}

/// Some rows of a piece, in its own type.
pub fn read_piece(
    weights: &WeightSource,
    not_numbers: &NotNumbers,
    piece: &Piece,
    rows: Range<u64>,
    out: &mut [u8],
) -> Result<(), AppError> {
    let Values::Rows { source, shape, origin, dtype } = &piece.values else { return Ok(()) };
    let dtype = weight_dtype(*dtype).ok_or_else(|| {
        AppError::input(format!(
            "weight {source}: cannot read values of type {dtype}; f32, f16 and bf16 are supported"
        ))
    })?;
    let rows = (origin.0 + rows.start) as usize..(origin.0 + rows.end) as usize;
    let columns = origin.1 as usize..(origin.1 + piece.columns) as usize;
    read_looking(weights, not_numbers, source, shape, rows, columns, dtype, out)
}

/// Like [`WeightSource::read`], in steps that stay in a core's cache until their values have been checked.
#[allow(clippy::too_many_arguments)]
fn read_looking(
    weights: &WeightSource,
    not_numbers: &NotNumbers,
    source: &str,
    shape: &[usize],
    rows: Range<usize>,
    columns: Range<usize>,
    dtype: WeightDtype,
    out: &mut [u8],
) -> Result<(), AppError> {
    let row_bytes = columns.len() * dtype.size();
    if row_bytes == 0 {
        return Ok(());
    }
    let step = (PIECE_BYTES / row_bytes).max(1);
    for (first, out) in rows.clone().step_by(step).zip(out.chunks_mut(step * row_bytes)) {
        let last = rows.end.min(first + step);
        weights.read(source, shape, first..last, columns.clone(), dtype, out)?;
        if weights.may_lack_numbers() {
            not_numbers.look(source, dtype, out);
        }
    }
    Ok(())
}

fn check_dtype(tensor: &TensorEntry) -> Result<WeightDtype, AppError> {
    weight_dtype(tensor.dtype).ok_or_else(|| {
        AppError::input(format!(
            "weight {} has type {}; f32, f16 and bf16 are supported",
            tensor.name, tensor.dtype
        ))
    })
}

/// Fills a weight part by part, each with this rank's range of the part.
pub fn fill_weight(
    weights: &WeightSource,
    not_numbers: &NotNumbers,
    tensor: &TensorEntry,
    bytes: &mut [u8],
) -> Result<(), AppError> {
    let dtype = check_dtype(tensor)?;
    let mut first_row = 0;
    for part in &tensor.parts {
        first_row += fill_part(weights, not_numbers, tensor, part, dtype, first_row, bytes)?;
    }
    Ok(())
}

/// Fills one part, starting at local row `first` (of a vector: at that element). Returns the number of rows.
fn fill_part(
    weights: &WeightSource,
    not_numbers: &NotNumbers,
    tensor: &TensorEntry,
    part: &LocalPart,
    dtype: WeightDtype,
    first: usize,
    bytes: &mut [u8],
) -> Result<usize, AppError> {
    let shape: Vec<usize> = part.dims.iter().map(|&d| d as usize).collect();
    let range = |dim: usize| match &part.range {
        Some((d, r)) if *d == dim => r.start as usize..r.end as usize,
        _ => 0..shape[dim],
    };
    let size = dtype.size();
    if let [_] = shape[..] {
        let columns = range(0);
        let out = &mut bytes[first * size..(first + columns.len()) * size];
        read_looking(weights, not_numbers, &part.source, &shape, 0..1, columns.clone(), dtype, out)?;
        return Ok(columns.len());
    }
    let (rows, columns) = (range(0), range(1));
    let row_bytes = columns.len() * size;
    if row_bytes == 0 {
        return Ok(rows.len());
    }
    if !tensor.tiled {
        let out = &mut bytes[first * row_bytes..(first + rows.len()) * row_bytes];
        read_looking(weights, not_numbers, &part.source, &shape, rows.clone(), columns, dtype, out)?;
        return Ok(rows.len());
    }
    let step = (PIECE_BYTES / row_bytes).max(1);
    let mut piece = vec![0u8; step.min(rows.len()) * row_bytes];
    let mut row = rows.start;
    while row < rows.end {
        let count = step.min(rows.end - row);
        let piece = &mut piece[..count * row_bytes];
        read_looking(
            weights,
            not_numbers,
            &part.source,
            &shape,
            row..row + count,
            columns.clone(),
            dtype,
            piece,
        )?;
        let (k, local_row) = (columns.len(), first + row - rows.start);
        pack_rows(bytes, tensor.dtype, k, local_row, piece, tensor.dtype, k, 0..k, count);
        row += count;
    }
    Ok(rows.len())
}

/// The weight type that corresponds to an element type, if there is one.
pub fn weight_dtype(dtype: DType) -> Option<WeightDtype> {
    match dtype {
        DType::F32 => Some(WeightDtype::F32),
        DType::F16 => Some(WeightDtype::F16),
        DType::Bf16 => Some(WeightDtype::Bf16),
        _ => None,
    }
}
