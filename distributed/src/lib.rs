//! The ranks of a job and what runs on them: MPI world, symmetric heap, launch, watchdog and abort.

pub mod affinity;
mod arrays;
mod batch_memory;
pub mod error;
mod heap_layout;
pub mod memory;
pub mod plan;
mod queues;
pub mod rank;
mod report;
mod run;
pub mod symmetric;
pub mod trace;
pub mod world;

pub use error::{Error, Result};
pub use rank::CpuRank;
pub use world::World;
