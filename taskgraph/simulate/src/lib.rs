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
pub mod timeline;
mod work;

pub use cluster::{Cluster, ClusterError};
pub use engine::{SimulateError, simulate};
pub use timeline::{Outcome, Record, Waited};
pub use work::Load;

/// Picoseconds.
pub type Ps = u64;

/// Microseconds as picoseconds.
pub(crate) fn ps(us: f64) -> Ps {
    (us * 1e6).round() as Ps
}

/// The time that `bytes` take at a rate (or products at theirs).
pub(crate) fn at_rate(bytes: u64, giga_per_s: f64) -> Ps {
    (bytes as f64 * 1e3 / giga_per_s).round() as Ps
}
