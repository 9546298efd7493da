//! Op graphs, the passes that turn them into per-rank task graphs, and the verifier that proves a set of task
//! graphs safe before it is launched. Pure Rust: no MPI, no CUDA.

pub mod builder;
pub mod digest;
pub mod dtype;
pub mod ids;
pub mod json;
mod lower;
pub mod op_graph;
pub mod passes;
pub mod region;
pub mod split;
pub mod stats;
pub mod target;
pub mod task_graph;
pub mod task_type;
pub mod trust;
pub mod verify;

pub use builder::{BuildError, BuildOptions, Builder, build_all, build_rank};
pub use dtype::DType;
pub use ids::{EventId, TaskId};
pub use op_graph::{Attrs, Capacity, OpGraph, Role, Rows, TensorId};
pub use region::Region;
pub use split::{Sharding, Split};
pub use target::{Backend, Target};
pub use task_graph::{Allreduce, Placement, TaskGraph};
pub use task_type::{Registry, TaskType};
pub use trust::Trust;
