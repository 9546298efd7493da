//! From a sharded op graph to the tasks and events of each rank.
//!
//! `plan` is shared by all ranks: the sequence of **slots** (an operator's tasks, a collective's copies, arrivals and sums), the
//! tensors that they access, and for each rank how each slot is cut into tasks. From the plan, `events` derives a rank's
//! dependencies, `order` the order over all ranks, `memory` the buffers, and `emit` the finished [`TaskGraph`](crate::TaskGraph).

mod classes;
mod collectives;
mod columns;
mod dynamic;
mod emit;
mod entries;
mod events;
mod grouping;
mod joined;
mod layouts;
mod local;
mod memory;
mod one_event;
mod operands;
mod order;
mod overlap;
mod own_rows;
mod owned;
mod paired;
mod place;
mod plan;
mod shared;
mod stores;
mod turning;
mod types;

pub(crate) use shared::Shared;
pub use shared::Spares;
