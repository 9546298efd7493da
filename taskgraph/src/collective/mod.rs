//! Collectives: operators that move values between ranks or sum them over ranks. The set is open.
//!
//! A collective is one file and one line in [`built_in`], or in another crate one call of
//! [`crate::Registry::register_collective`]. It declares the sharding that it needs and gives, the changes of sharding that it
//! can be inserted for, and how it is carried out. A [`Lowered`] is a list of steps; each step is a table of sends between ranks,
//! or tasks of a registered type. From the table the builder derives the copies, the events that peers trigger with their numbers
//! of triggers, and the resulting order. So a collective cannot claim an order that does not hold.

mod all_to_all;
mod allgather;
mod allreduce;
mod contract;
mod hierarchical;
mod moves;
mod reduce_scatter;
mod slice;
mod sum;

pub use all_to_all::AllToAll;
pub use allgather::AllGather;
pub use allreduce::AllReduce;
pub(crate) use allreduce::{JOINED_ROWS, JOINED_SUMS};
pub use contract::{
    Alone, Buffer, Collective, CollectiveOp, Consumer, Exchange, Lowered, Operand, Placed, Send, Step,
    SumRows, TaskStep,
};
pub use moves::{Move, local_copies, moves, rows_kind};
pub use reduce_scatter::ReduceScatter;
pub use slice::Slice;
pub(crate) use sum::OWNED_ROWS;

use std::sync::Arc;

/// The collectives of this crate. If several can make a change of sharding, the first one by name is used.
pub fn built_in() -> Vec<Arc<dyn Collective>> {
    vec![
        Arc::new(AllReduce),
        Arc::new(AllGather),
        Arc::new(ReduceScatter),
        Arc::new(AllToAll),
        Arc::new(Slice),
    ]
}
