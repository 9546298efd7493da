//! Graphs as JSON files.
//!
//! * `task_graph.json` (`mpk-task-graph/1`): the tasks that one rank executes, written by [`write_json`] and read back without
//!   loss by [`from_json`]. Its schema is `schema/task_graph.schema.json`.
//! * A user graph, the `"graph"` of model.json: [`op_graph_from_value`] and [`op_graph_to_value`]. Its schema is
//!   `schema/op_graph.schema.json`.

mod distinct;
mod error;
mod names;
mod op_graph;
mod op_graph_file;
mod parse;
mod read;
mod shard;
mod task_graph_file;
mod write;

pub use distinct::distinct_keys;
pub use error::GraphFileError;
pub use names::clean;
pub use op_graph::{op_graph_from_str, op_graph_from_value, op_graph_to_value};
pub use op_graph_file::{DataSource, DataSources, OpGraphFile, op_graph_schema};
pub use parse::plain;
pub use read::from_json;
pub use shard::{shard_from_value, shard_to_value};
pub use task_graph_file::{TASK_GRAPH_SCHEMA, task_graph_schema};
pub use write::{to_json, write_json};
