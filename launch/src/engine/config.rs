//! How a model is run: what is not a property of the model.

use distributed::cuda::{Bootstrap, Transport};
use std::time::Duration;

/// Which kind of machine runs the tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum BackendChoice {
    /// CUDA where there is a GPU, otherwise the CPU.
    #[default]
    Auto,
    /// One persistent kernel per GPU.
    Cuda,
    /// Threads.
    Cpu,
}

/// How the kernels of several ranks are started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum LaunchChoice {
    /// By NVSHMEM's collective launch where it can be had, else cooperatively.
    #[default]
    Auto,
    /// By cuLaunchCooperativeKernel, each rank its own.
    Cooperative,
}

/// How a model is run. Every rank has the same.
#[derive(Clone, Debug)]
pub struct RunConfig {
    /// Where to run.
    pub backend: BackendChoice,
    /// GPU: how ranks write to each other's memory.
    pub transport: Transport,
    /// GPU: how NVSHMEM's ranks find each other.
    pub bootstrap: Bootstrap,
    /// GPU: how the kernels of several ranks are started.
    pub launch: LaunchChoice,
    /// A wait without progress for this long ends the run.
    pub deadline: Duration,
    /// Record every task's times.
    pub trace: bool,
    /// For tests: leave out the protection of receive buffers that peers may still read, and the proof that refuses it.
    pub unprotected: bool,
    /// For tests: `RANK:OP:MILLISECONDS` delays a rank before each task of an operator.
    pub stall: Option<String>,
}

impl Default for RunConfig {
    fn default() -> Self {
        RunConfig {
            backend: BackendChoice::default(),
            transport: Transport::Auto,
            bootstrap: Bootstrap::UniqueId,
            launch: LaunchChoice::default(),
            deadline: Duration::from_secs(30),
            trace: false,
            unprotected: false,
            stall: None,
        }
    }
}
