//! Errors of reading a graph file.

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
    pub(crate) fn at(place: impl Into<String>, message: impl Into<String>) -> Self {
        GraphFileError::Value { place: place.into(), message: message.into() }
    }
}
