//! Sources of weights: a checkpoint, or a random function. Both are read by ranges.

use std::collections::HashMap;
use std::ops::Range;

use crate::model::{
    checkpoint::{Checkpoint, TensorView},
    convert::convert,
    error::InputError,
    hf_config::WeightDtype,
    mapped::Reads,
    random_weights::RandomWeights,
};

/// The weights of a model.
#[derive(Debug)]
pub enum WeightSource {
    /// A Hugging Face checkpoint.
    Checkpoint(Checkpoint),
    /// A function of seed, name and index.
    Random(RandomWeights),
    /// Given values by tensor name, row-major.
    Values(HashMap<String, Vec<f32>>),
}

impl WeightSource {
    /// While the result lives, read errors of mapped files end the process with a message.
    pub(crate) fn reads(&self, rank: u32) -> Option<Reads> {
        match self {
            WeightSource::Checkpoint(checkpoint) => Some(Reads::of(checkpoint.folder(), rank)),
            _ => None,
        }
    }
}

impl WeightSource {
    /// Writes the elements [rows, columns] of tensor `name` to `out` as `dtype`, row-major without gaps, little-endian.
    /// `shape` is the shape of the whole tensor. A tensor with one dimension counts as one row.
    ///
    /// # Errors
    /// The checkpoint has no such tensor, or the tensor has another shape or an unsupported dtype.
    ///
    /// # Panics
    /// The ranges are outside `shape`, or the size of `out` differs from theirs.
    pub fn read(
        &self,
        name: &str,
        shape: &[usize],
        rows: Range<usize>,
        columns: Range<usize>,
        dtype: WeightDtype,
        out: &mut [u8],
    ) -> Result<(), InputError> {
        match self {
            Self::Checkpoint(checkpoint) => {
                checkpoint_tensor(checkpoint, name, shape)?.copy(rows, columns, dtype, out)
            }
            Self::Random(random) => random.tensor(name, shape).fill(rows, columns, dtype, out),
            Self::Values(values) => {
                let pitch = shape.last().copied().unwrap_or(1);
                let values = values.get(name).map_or(&[][..], Vec::as_slice);
                let row_bytes = columns.len() * dtype.size();
                for (row, out) in rows.zip(out.chunks_exact_mut(row_bytes.max(1))) {
                    let values = &values[row * pitch + columns.start..row * pitch + columns.end];
                    convert(WeightDtype::F32, bytemuck::cast_slice(values), dtype, out);
                }
            }
        }
        Ok(())
    }
}

impl WeightSource {
    /// True if the source may hold values that are not numbers. Random weights are always numbers.
    pub fn may_lack_numbers(&self) -> bool {
        !matches!(self, Self::Random(_))
    }

    /// The element type in which tensor `name` is stored, which [`WeightSource::read`] returns without conversion.
    ///
    /// # Errors
    /// Those of [`WeightSource::read`].
    pub fn dtype(&self, name: &str, shape: &[usize]) -> Result<WeightDtype, InputError> {
        match self {
            Self::Checkpoint(checkpoint) => Ok(checkpoint_tensor(checkpoint, name, shape)?.dtype),
            Self::Random(_) | Self::Values(_) => Ok(WeightDtype::F32),
        }
    }
}

fn checkpoint_tensor<'a>(
    checkpoint: &'a Checkpoint,
    name: &str,
    shape: &[usize],
) -> Result<TensorView<'a>, InputError> {
    let tensor = checkpoint.tensor(name)?;
    if tensor.shape != shape {
        return Err(InputError::Tensor {
            path: tensor.path().into(),
            tensor: name.into(),
            problem: format!("has shape {:?}, expected {shape:?}", tensor.shape),
        });
    }
    Ok(tensor)
}
