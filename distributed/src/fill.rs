//! The interface through which targets get the values of weights and constants.

use std::ops::Range;
use std::thread::{Builder, Scope, ScopedJoinHandle};
use taskgraph::DType;
use taskgraph::task_graph::TensorEntry;

/// Provides the values of weights and constants.
pub trait TensorSource: Sync {
    /// The error of reading them.
    type Error: From<crate::Error> + Send;

    /// Fills the zeroed bytes of `tensor` in the layout that the CPU's kernels read.
    ///
    /// # Errors
    /// The values cannot be read.
    fn fill(&self, tensor: &TensorEntry, bytes: &mut [u8]) -> Result<(), Self::Error>;

    /// The pieces of `tensor`, for a GPU that packs them itself.
    ///
    /// # Errors
    /// The source lacks the tensor.
    fn pieces(&self, tensor: &TensorEntry) -> Result<Vec<Piece>, Self::Error>;

    /// Reads some rows of a piece with [`Values::Rows`]: row-major without gaps, in the piece's own type.
    ///
    /// # Errors
    /// The values cannot be read.
    fn read(&self, piece: &Piece, rows: Range<u64>, out: &mut [u8]) -> Result<(), Self::Error>;
}

/// A part of a tensor: a matrix of consecutive rows. A tensor with one dimension counts as one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The source of its values.
    pub values: Values,
    /// First row in the tensor.
    pub first_row: u64,
    /// First element in the row, for tensors with one dimension; otherwise 0.
    pub first_column: u64,
    /// Number of rows.
    pub rows: u64,
    /// Elements per row.
    pub columns: u64,
}

/// The source of a piece's values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Values {
    /// From [`TensorSource::read`].
    Rows {
        /// Name in the source.
        source: String,
        /// Shape of the whole tensor there.
        shape: Vec<usize>,
        /// Row and column there of the piece's first element.
        origin: (u64, u64),
        /// Element type there: f32, f16 or bf16.
        dtype: DType,
    },
    /// Random values; `launch::random_weights` documents the formula.
    Random {
        /// The tensor's key.
        key: u64,
        /// Values near 1 instead of near 0.
        norm: bool,
        /// Columns of the whole tensor.
        pitch: u64,
        /// Row and column there of the piece's first element.
        origin: (u64, u64),
    },
    /// The tensor's bytes, from the first one.
    Bytes(Vec<u8>),
}

/// Starts up to `wanted` threads of `run`, as many as the system allows. Each thread gets its number.
///
/// # Errors
/// The system allows none.
pub(crate) fn threads<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    wanted: usize,
    run: impl Fn(usize) -> T + Copy + Send + 'scope,
) -> crate::Result<Vec<ScopedJoinHandle<'scope, T>>> {
    let mut handles = Vec::new();
    for index in 0..wanted.max(1) {
        match Builder::new().name("weights".into()).spawn_scoped(scope, move || run(index)) {
            Ok(handle) => handles.push(handle),
            Err(error) if handles.is_empty() => {
                return Err(crate::Error::Readers { reason: error.to_string() });
            }
            Err(_) => break,
        }
    }
    Ok(handles)
}
