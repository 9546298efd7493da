//! Why a graph file cannot be read.

/// A graph file that can't be read.
#[derive(Debug, thiserror::Error)]
pub enum GraphFileError {
    /// The file itself.
    #[error("cannot read the graph: {0}")]
    Io(#[from] std::io::Error),
    /// Not JSON, a missing or unknown field, or a wrong type; names line and column.
    #[error("the graph is not as its schema says: {0}")]
    Json(#[from] serde_json::Error),
    /// A value that makes no sense where it stands.
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
