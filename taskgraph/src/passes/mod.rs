//! Passes over an op graph, before it is spread over ranks. An open set: each is a [`Pass`], and [`Passes`] is the
//! list that a user of the library can read, extend and reorder.
//!
//! What follows (`crate::lower`) works on tasks.

mod common;
mod compose;
mod dead;
mod fold;
mod fuse;
mod in_place;
mod infer;
mod list;
mod pass;
mod shard;
mod view;

pub use common::CommonSubexpressions;
pub use compose::Compose;
pub use dead::DeadOperators;
pub use fold::{Evaluate, FoldConstants};
pub use fuse::Fuse;
pub use in_place::InPlace;
pub use infer::Infer;
pub use list::Passes;
pub use pass::{Context, Pass, Property};
pub use shard::Shard;
pub(crate) use view::op_view;
