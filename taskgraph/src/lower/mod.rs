//! From a sharded op graph to each rank's tasks and events.
//!
//! `plan` is what all ranks share: the sequence of **slots** (an operator's tasks, a collective's copies, arrivals
//! and sums), the tensors they touch, and for each rank how each slot is cut into tasks. From it `events` derives a
//! rank's dependencies, `order` what is ordered before what over all ranks, `memory` the buffers, and `emit` the
//! finished [`TaskGraph`](crate::TaskGraph).

mod classes;
mod collectives;
mod columns;
mod dynamic;
mod emit;
mod entries;
mod events;
mod layouts;
mod local;
mod memory;
mod operands;
mod order;
mod overlap;
mod place;
mod plan;
mod shared;
mod types;

pub(crate) use shared::Shared;
pub use shared::Spares;
