//! Op graphs, the passes that turn them into per-rank task graphs, and the verifier that proves a set of task
//! graphs safe before it is launched. Pure Rust: no MPI, no CUDA.

pub mod attribute;
pub mod blocks;
pub mod builder;
pub mod collective;
pub mod digest;
pub mod dtype;
mod error;
pub mod ids;
pub mod json;
mod lower;
pub mod op_graph;
mod options;
pub mod parallel;
pub mod passes;
pub mod region;
mod registry;
pub mod split;
pub mod stats;
pub mod target;
pub mod task_graph;
pub mod task_type;
pub mod trust;
pub mod tuning;
pub mod verify;
pub mod words;

pub use attribute::{Attribute, AttributeKind};
pub use builder::{Builder, build_all, build_rank};
pub use collective::Collective;
pub use dtype::DType;
pub use error::BuildError;
pub use ids::{EventId, TaskId};
pub use op_graph::{Attrs, Capacity, OpGraph, Role, Rows, TensorId};
pub use options::BuildOptions;
pub use passes::{Pass, Passes};
pub use region::Region;
pub use registry::Registry;
pub use split::{Sharding, Split};
pub use target::{Backend, Target};
pub use task_graph::{Allreduce, Placement, TaskGraph};
pub use task_type::TaskType;
pub use trust::Trust;
pub use tuning::{Knob, Tuning};
