//! Passes over an op graph, before it is split over ranks. The set is open: each pass is a [`Pass`], and [`Passes`] is the list,
//! which users of the library can read, extend and reorder.
//!
//! The next stage (`crate::lower`) works on tasks.

mod common;
mod compose;
mod dead;
mod fold;
mod fuse;
mod in_place;
mod infer;
mod list;
mod pass;
mod roles;
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
pub(crate) use roles::check_all_roles;
pub use shard::Shard;
pub(crate) use view::op_view;
