//! Passes over an op graph, before it is spread over ranks: each takes the graph and changes it in place.
//!
//! [`infer()`] checks the graph and fills in types, [`shard()`] decides what lives where and inserts collectives,
//! [`fuse()`] joins operators. What follows (`crate::lower`) works on tasks.

mod collective_ops;
mod fuse;
mod infer;
mod shard;
mod view;

pub use collective_ops::{ADD, ALLGATHER, ALLREDUCE};
pub use fuse::fuse;
pub use infer::infer;
pub use shard::shard;
pub(crate) use view::op_view;
