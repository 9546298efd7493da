//! How a model is run: what is not a property of the model.

use distributed::Fault;
use distributed::cuda::{Bootstrap, Transport};
use distributed::probe::Probe;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use taskgraph::Tuning;

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
    /// Log-probabilities that a request may ask for, for each token. The graphs are built for as many.
    pub logprobs: u32,
    /// Requests may draw their tokens or have penalties. The graphs are built for it; without it they are greedy.
    pub sampling: bool,
    /// Requests that may wait before the kernel gets them. One more is refused.
    pub max_waiting: usize,
    /// The kernel ends after so long without requests, and the next one starts it again. `None`: it goes on waiting.
    pub idle_exit: Option<Duration>,
    /// Use what `mpk-bench tune` has kept for this machine and model, if it has.
    pub use_tuning_table: bool,
    /// Values that replace the table's and the defaults, by the names of [`knobs`](crate::engine::tuning::knobs).
    pub tuning: Tuning,
    /// Record every task's times, and write the timeline to this file at the end (Chrome trace format).
    pub trace: Option<PathBuf>,
    /// Iterations that the timeline holds, the last ones; without it as many as make a file of 20 MB.
    pub trace_iterations: Option<u32>,
    /// What the ranks of a job must have in common, by name and value: a difference ends the job before anything
    /// depends on it. The model is compared in any case; if this is empty, the fields of the configuration are.
    pub in_common: Vec<(String, String)>,
    /// Is told why the job ends, on the rank that knows, before any call of the engine returns; the process may end before
    /// one does. By default it goes to the log.
    pub tell: fn(&str),
    /// Is told of the weights that have come to their place.
    pub progress: Option<Progress>,
    /// On a GPU: kernels that leave work out, and when each runs. Their tokens mean nothing.
    pub probe: Option<Arc<Probe>>,
    /// For tests: leave out the protection of receive buffers that peers may still read, and the proof that refuses it.
    pub unprotected: bool,
    /// For tests: `RANK:OP:MILLISECONDS` delays a rank before each task of an operator.
    pub stall: Option<String>,
    /// For tests: what a rank does wrong.
    pub fault: Option<Fault>,
}

/// Is called with the bytes that have just come to their place, and the bytes that there are.
#[derive(Clone)]
pub struct Progress(pub Arc<dyn Fn(u64, u64) + Send + Sync>);

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Progress")
    }
}

impl RunConfig {
    /// By name and value, as far as results depend on it.
    pub(crate) fn to_compare(&self) -> Vec<(String, String)> {
        if !self.in_common.is_empty() {
            return self.in_common.clone();
        }
        let mut values = Vec::new();
        for (name, value) in [
            ("backend", format!("{:?}", self.backend)),
            ("transport", format!("{:?}", self.transport)),
            ("bootstrap", format!("{:?}", self.bootstrap)),
            ("launch", format!("{:?}", self.launch)),
            ("deadline", format!("{:?}", self.deadline)),
            ("logprobs", self.logprobs.to_string()),
            ("sampling", self.sampling.to_string()),
            ("idle_exit", format!("{:?}", self.idle_exit)),
            ("use_tuning_table", self.use_tuning_table.to_string()),
            ("tuning", format!("{:?}", self.tuning)),
            ("trace", format!("{:?}", self.trace)),
            ("trace_iterations", format!("{:?}", self.trace_iterations)),
            ("unprotected", self.unprotected.to_string()),
            ("stall", format!("{:?}", self.stall)),
        ] {
            values.push((name.into(), value));
        }
        values
    }
}

impl Default for RunConfig {
    fn default() -> Self {
        RunConfig {
            backend: BackendChoice::default(),
            transport: Transport::Auto,
            bootstrap: Bootstrap::UniqueId,
            launch: LaunchChoice::default(),
            deadline: Duration::from_secs(30),
            logprobs: 0,
            sampling: true,
            max_waiting: 1024,
            idle_exit: Some(Duration::from_secs(2)),
            use_tuning_table: true,
            tuning: Tuning::default(),
            trace: None,
            trace_iterations: None,
            in_common: Vec::new(),
            tell: |message| tracing::error!("{message}"),
            progress: None,
            probe: None,
            unprotected: false,
            stall: None,
            fault: None,
        }
    }
}
