//! A discrete-event simulator of task graphs on a described cluster.
//!
//! It runs one iteration of the very graphs that ranks would run: workers take tasks from their lists (static placement)
//! or from a queue (dynamic), events count, weights stream ahead through each worker's ring and share the memory, flagged
//! words and puts travel over links that have latency, bandwidth and other messages. What a task costs follows from the
//! accesses that it declares; no task type is known by name but those of the protocol.
//!
//! The same input gives the same output, to the picosecond.

pub mod cluster;
mod edges;
mod engine;
mod resources;
mod time;
pub mod timeline;
mod work;

pub use cluster::{Cluster, ClusterError};
pub use engine::{SimulateError, simulate};
pub use time::Ps;
pub use timeline::{Outcome, Record, Waited};
pub use work::Load;
