//! A discrete-event simulator of task graphs on a described cluster.
//!
//! It simulates one iteration of exactly the graphs that ranks would run. Workers take tasks from their lists (static
//! placement) or from a queue (dynamic). Events count. Weights stream ahead through each worker's ring and share the
//! memory. Flagged words and puts travel over links with latency, bandwidth and other messages. The cost of a task
//! follows from the accesses that it declares: apart from the protocol's own task types, the simulator knows none by
//! name.
//!
//! The same input gives the same output, to the picosecond.

pub mod cluster;
mod edges;
mod engine;
mod rank_state;
mod resources;
mod stream;
mod time;
pub mod timeline;
mod work;

pub use cluster::{Cluster, ClusterError};
pub use engine::{SimulateError, check_network, simulate};
pub use time::Ps;
pub use timeline::{Outcome, Record, Waited};
pub use work::Load;
