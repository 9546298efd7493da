//! Collectives: operators that move or sum values between ranks. An open set.
//!
//! A collective is one file and one line in [`built_in`], or, outside of this crate, one call of
//! [`crate::Registry::register_collective`]. It says what sharding it needs and gives, which reshardings it can be
//! inserted for, and how it is carried out: a [`Lowered`] is a list of steps, each a table of sends between ranks or
//! tasks of a registered type. From the table the builder derives the copies, the events that peers trigger and
//! their trigger counts, and what is ordered before what, so a collective cannot state an order that does not hold.

mod all_to_all;
mod allgather;
mod allreduce;
mod contract;
mod hierarchical;
mod moves;
mod reduce_scatter;
mod slice;

pub use all_to_all::AllToAll;
pub use allgather::AllGather;
pub use allreduce::AllReduce;
pub use contract::{
    Alone, Buffer, Collective, CollectiveOp, Consumer, Exchange, Lowered, Operand, Placed, Send, Step,
    TaskStep,
};
pub use moves::{Move, local_copies, moves, rows_kind};
pub use reduce_scatter::ReduceScatter;
pub use slice::Slice;

use std::sync::Arc;

/// The collectives of this crate. Where several can do a resharding, the first one in the order of names does.
pub fn built_in() -> Vec<Arc<dyn Collective>> {
    vec![
        Arc::new(AllReduce),
        Arc::new(AllGather),
        Arc::new(ReduceScatter),
        Arc::new(AllToAll),
        Arc::new(Slice),
    ]
}
