//! Fills a rank's weights and constants in the layout that the kernels read.

use crate::model::app_error::AppError;
use crate::model::families::names;
use crate::model::hf_config::{ModelConfig, WeightDtype, rope_table};
use crate::model::not_numbers::{NotNumbers, all_fit};
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
    /// Records weights that are not numbers, or too large for their type.
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
        // The GPU converts the values.
        read_piece_for(self.weights, self.not_numbers, piece, rows, Some(self.config.dtype), out)
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
    read_piece_for(weights, not_numbers, piece, rows, None, out)
}

/// Like [`read_piece`], for values that will be converted to `target`.
fn read_piece_for(
    weights: &WeightSource,
    not_numbers: &NotNumbers,
    piece: &Piece,
    rows: Range<u64>,
    target: Option<WeightDtype>,
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
    read_looking(weights, not_numbers, source, shape, rows, columns, (dtype, target.unwrap_or(dtype)), out)
}

/// Like [`WeightSource::read`], in steps that stay in a core's cache until their values have been checked. The second type is the one that
/// the values will be converted to.
#[allow(clippy::too_many_arguments)]
fn read_looking(
    weights: &WeightSource,
    not_numbers: &NotNumbers,
    source: &str,
    shape: &[usize],
    rows: Range<usize>,
    columns: Range<usize>,
    (dtype, target): (WeightDtype, WeightDtype),
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
        if weights.may_lack_numbers() && !all_fit(dtype, out, target) {
            // The conversion may be what made them infinite.
            let stored = weights.dtype(source, shape)?;
            let mut values = vec![0; (last - first) * columns.len() * stored.size()];
            weights.read(source, shape, first..last, columns.clone(), stored, &mut values)?;
            not_numbers.look(source, stored, &values, target);
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
        read_looking(weights, not_numbers, &part.source, &shape, 0..1, columns.clone(), (dtype, dtype), out)?;
        return Ok(columns.len());
    }
    let (rows, columns) = (range(0), range(1));
    let row_bytes = columns.len() * size;
    if row_bytes == 0 {
        return Ok(rows.len());
    }
    if !tensor.tiled {
        let out = &mut bytes[first * row_bytes..(first + rows.len()) * row_bytes];
        read_looking(weights, not_numbers, &part.source, &shape, rows.clone(), columns, (dtype, dtype), out)?;
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
            (dtype, dtype),
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    /// Values for the CPU are converted when they are read, those for a GPU later. A warning says of both what they become.
    #[test]
    fn values_that_are_too_large_for_their_type_are_noticed_on_both_targets() {
        let weights = WeightSource::Values(HashMap::from([("w".to_string(), vec![1.0, 2.0, 7e4, 4.0])]));
        for (read_as, target, noticed) in [
            (DType::F16, None, true),
            (DType::F32, Some(WeightDtype::F16), true),
            (DType::F32, Some(WeightDtype::Bf16), false),
            (DType::F32, None, false),
        ] {
            let values =
                Values::Rows { source: "w".into(), dtype: read_as, shape: vec![2, 2], origin: (0, 0) };
            let piece = Piece { values, first_row: 0, first_column: 0, rows: 2, columns: 2 };
            let not_numbers = NotNumbers::default();
            let mut out = vec![0; 4 * weight_dtype(read_as).unwrap().size()];
            read_piece_for(&weights, &not_numbers, &piece, 0..2, target, &mut out).unwrap();
            let messages = not_numbers.messages();
            assert_eq!(messages.len(), usize::from(noticed), "{read_as} {target:?}: {messages:?}");
            assert!(messages.iter().all(|message| message.contains("w (value 70000.0)")), "{messages:?}");
        }
    }
}
