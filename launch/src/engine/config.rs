//! How to run a model: everything that is not a property of the model.

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

/// How the kernels of several ranks are launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum LaunchChoice {
    /// NVSHMEM's collective launch if it is available, otherwise cooperative.
    #[default]
    Auto,
    /// Each rank calls cuLaunchCooperativeKernel.
    Cooperative,
}

/// How to run a model. All ranks use the same values.
#[derive(Clone, Debug)]
pub struct RunConfig {
    /// What runs the tasks.
    pub backend: BackendChoice,
    /// GPU: how ranks write to each other's memory.
    pub transport: Transport,
    /// GPU: how NVSHMEM's ranks find each other.
    pub bootstrap: Bootstrap,
    /// GPU: how the kernels of several ranks are launched.
    pub launch: LaunchChoice,
    /// A wait without progress for this long ends the run with an error.
    pub deadline: Duration,
    /// Maximum number of log-probabilities per token that a request may ask for. The graphs are built for this number.
    pub logprobs: u32,
    /// Requests may sample or use penalties. The graphs are built for it; otherwise all requests are greedy.
    pub sampling: bool,
    /// Maximum number of requests that wait before the kernel gets them. Further requests are refused.
    pub max_waiting: usize,
    /// The kernel ends after this time without requests, and the next request starts it again. `None`: it keeps running.
    pub idle_exit: Option<Duration>,
    /// Use the values that `mpk-bench tune` saved for this machine and model, if any.
    pub use_tuning_table: bool,
    /// Values that override the table and the defaults, by the names of [`knobs`](crate::engine::tuning::knobs).
    pub tuning: Tuning,
    /// Record the times of every task, and write the timeline to this file at the end (Chrome trace format).
    pub trace: Option<PathBuf>,
    /// Number of iterations on the timeline, counted from the last. By default, as many as fit in a file of 20 MB.
    pub trace_iterations: Option<u32>,
    /// Values that all ranks of a job must share, by name. A difference ends the job before anything depends on it. The
    /// model is always compared. If this list is empty, the fields of this configuration are compared too.
    pub in_common: Vec<(String, String)>,
    /// Called with the reason why the job ends, on the rank that knows it. The call comes before any call of the engine
    /// returns; the process may even end before one does. By default the reason goes to the log.
    pub tell: fn(&str),
    /// Called while weights are loaded.
    pub progress: Option<Progress>,
    /// On a GPU: kernels that leave out work, and when each of them runs. Their tokens mean nothing.
    pub probe: Option<Arc<Probe>>,
    /// For tests: leave out the protection of receive buffers that peers may still read, and the check that refuses such
    /// graphs.
    pub unprotected: bool,
    /// For tests: `RANK:OP:MILLISECONDS` delays a rank before each task of an operator.
    pub stall: Option<String>,
    /// For tests: a fault that a rank causes.
    pub fault: Option<Fault>,
}

/// Called with the number of bytes that have just been loaded, and the total.
#[derive(Clone)]
pub struct Progress(pub Arc<dyn Fn(u64, u64) + Send + Sync>);

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Progress")
    }
}

impl RunConfig {
    /// The values that results depend on, by name.
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
            ("tuning", self.tuning.to_string()),
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
