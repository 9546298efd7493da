//! The ranks of a job and what runs on them: MPI world, symmetric heap, launch, watchdog and abort.

pub mod affinity;
mod agreement;
mod arrays;
mod batch_memory;
mod control;
pub mod cpu;
pub mod cuda;
pub mod error;
pub mod fill;
mod heap_layout;
mod image;
mod interrupt;
pub mod memory;
mod outputs;
pub mod plan;
mod queues;
pub mod rank;
mod report;
mod tensors;
pub mod trace;
pub mod world;

pub use cpu::CpuRank;
pub use cuda::CudaRank;
pub use error::{Error, Result};
pub use rank::{Common, Rank};
pub use world::World;
