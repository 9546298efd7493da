//! Graphs as JSON files.
//!
//! * `task_graph.json` (`mpk-task-graph/1`): what one rank executes, written by [`write_json`] and read back
//!   without loss by [`from_json`]; schema in `schema/task_graph.schema.json`.
//! * An op graph of the user's own, the `"graph"` of model.json: [`op_graph_from_value`] and
//!   [`op_graph_to_value`]; schema in `schema/op_graph.schema.json`.

mod op_graph;
mod op_graph_file;
mod task_graph;
mod task_graph_file;

pub use op_graph::{op_graph_from_str, op_graph_from_value, op_graph_to_value};
pub use op_graph_file::{DataSource, DataSources, OpGraphFile, op_graph_schema};
pub use task_graph::{from_json, to_json, write_json};
pub use task_graph_file::{TASK_GRAPH_SCHEMA, task_graph_schema};

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
