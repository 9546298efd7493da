//! Where the values of weights and constants come from, as the targets ask for them.

use std::ops::Range;
use std::thread::{Builder, Scope, ScopedJoinHandle};
use taskgraph::DType;
use taskgraph::task_graph::TensorEntry;

/// Gives the values of weights and constants.
pub trait TensorSource: Sync {
    /// What can go wrong with them.
    type Error: From<crate::Error> + Send;

    /// Fills the zeroed bytes of `tensor` in the layout that the CPU's kernels read.
    ///
    /// # Errors
    /// The values can't be read.
    fn fill(&self, tensor: &TensorEntry, bytes: &mut [u8]) -> Result<(), Self::Error>;

    /// What `tensor` is made of, for a GPU that packs the pieces itself.
    ///
    /// # Errors
    /// The source lacks the tensor.
    fn pieces(&self, tensor: &TensorEntry) -> Result<Vec<Piece>, Self::Error>;

    /// Some rows of a piece with [`Values::Rows`]: row-major without gaps, in the piece's own type.
    ///
    /// # Errors
    /// The values can't be read.
    fn read(&self, piece: &Piece, rows: Range<u64>, out: &mut [u8]) -> Result<(), Self::Error>;
}

/// Part of a tensor: a matrix of rows that follow each other in it. A tensor of one dimension counts as one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where its values come from.
    pub values: Values,
    /// Row of the tensor that it begins at.
    pub first_row: u64,
    /// Element of the row that it begins at: of tensors of one dimension, else 0.
    pub first_column: u64,
    /// Number of rows.
    pub rows: u64,
    /// Elements of a row.
    pub columns: u64,
}

/// Where a piece's values come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Values {
    /// From [`TensorSource::read`].
    Rows {
        /// Name in the source.
        source: String,
        /// Its whole shape there.
        shape: Vec<usize>,
        /// Row and column there of the piece's first element.
        origin: (u64, u64),
        /// Element type there: f32, f16 or bf16.
        dtype: DType,
    },
    /// Random values; `launch::random_weights` words the formula.
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
    /// These bytes are the tensor's, from the first on.
    Bytes(Vec<u8>),
}

/// As many threads of `run` as the system gives, of at most `wanted`; each is told its number.
///
/// # Errors
/// It gives none.
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
