//! Errors of reading a graph file.

use super::names::clean;

/// A graph file that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum GraphFileError {
    /// The file cannot be read.
    #[error("cannot read the graph: {0}")]
    Io(#[from] std::io::Error),
    /// Invalid JSON, a missing or unknown field, or a wrong type. The message names line and column.
    #[error("the graph does not match its schema: {0}")]
    Json(#[from] serde_json::Error),
    /// An invalid value.
    #[error("{place}: {message}")]
    Value {
        /// Path of the value, such as `all_tasks[17].inputs[0].base_ptr`.
        place: String,
        /// What is wrong, and what would be right.
        message: String,
    },
}

impl GraphFileError {
    /// An invalid value. Both texts may quote the file.
    pub(crate) fn at(place: impl Into<String>, message: impl Into<String>) -> Self {
        let (place, message): (String, String) = (place.into(), message.into());
        GraphFileError::Value { place: clean(&place), message: clean(&message) }
    }
}
