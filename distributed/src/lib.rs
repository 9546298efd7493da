//! The ranks of a job and what runs on them: MPI world, symmetric heap, launch, watchdog and abort.

pub mod affinity;
mod agreement;
mod arrays;
mod batch_memory;
mod control;
pub mod cpu;
pub mod cuda;
pub mod error;
mod fault;
pub mod fill;
mod heap_layout;
mod image;
mod interrupt;
pub mod launcher;
pub mod memory;
mod messages;
pub mod nodes;
pub mod online;
mod outputs;
pub mod plan;
mod queues;
pub mod rank;
mod report;
mod tensors;
pub mod trace;
pub mod urgency;
mod watch;
pub mod world;

pub use cpu::CpuRank;
pub use cuda::CudaRank;
pub use error::{Error, Result};
pub use fault::{Fault, FaultKind};
pub use interrupt::{end_on_signal, stop_kernel};
pub use rank::{Common, Rank};
pub use watch::WatchOptions;
pub use world::World;
