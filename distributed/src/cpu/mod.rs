//! The CPU target: ranks are MPI processes, workers are threads.

mod rank;
mod run;
mod symmetric;

pub use rank::CpuRank;
pub use symmetric::shared_memory_free;
