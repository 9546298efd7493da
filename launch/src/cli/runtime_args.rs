//! Options on where and how a model is run, the same for all programs that run one.

use crate::cli::choices::{
    Allreduce, AllreduceDtype, Backend, Bootstrap, Kv, Launch, Placement, PrefixCache, Transport, TuningTable,
};
use crate::engine::RunConfig;
use crate::engine::config::BackendChoice;
use crate::model::model_json::{self, Overrides};
use distributed::Fault;
use std::time::Duration;
use taskgraph::Tuning;

const SIZES: &str = "Sizes";
const MACHINE: &str = "Where and how to run";
/// Longest time that an option accepts: about thirty years.
pub const LONGEST_SECONDS: f64 = 1e9;

/// Options on where and how a model is run.
#[derive(Clone, Debug, clap::Args)]
pub struct RuntimeArgs {
    /// Maximum number of requests that run at once. Replaces max_batch of model.json.
    #[arg(long, value_name = "B", allow_negative_numbers = true, help_heading = SIZES)]
    pub max_batch: Option<u32>,
    /// Maximum number of tokens of a request, prompt and answer together. Replaces max_seq_len of model.json.
    #[arg(long, value_name = "L", allow_negative_numbers = true, help_heading = SIZES)]
    pub max_seq_len: Option<u32>,
    /// Share of an iteration's prompt rows (runtime.prefill_chunk) that prompts may use while other requests generate:
    /// above 0, at most 1. With a small share, a long prompt delays the other requests less.
    #[arg(long, value_name = "S", allow_negative_numbers = true, help_heading = SIZES)]
    pub prefill_share: Option<f64>,
    /// When a request gets pages of the KV cache.
    #[arg(long, value_enum, value_name = "WHEN", help_heading = SIZES)]
    pub kv: Option<Kv>,
    /// Keep the KV cache of prompts for later prompts that begin with the same tokens.
    #[arg(long, value_enum, value_name = "ON|OFF", help_heading = SIZES)]
    pub prefix_cache: Option<PrefixCache>,
    /// What runs the tasks.
    #[arg(long, value_enum, default_value_t = Backend::Auto, help_heading = MACHINE)]
    pub backend: Backend,
    /// How tasks are assigned to workers.
    #[arg(long, value_enum, help_heading = MACHINE)]
    pub placement: Option<Placement>,
    /// How an allreduce is carried out.
    #[arg(long, value_enum, help_heading = MACHINE)]
    pub allreduce: Option<Allreduce>,
    /// The type in which ranks send the summands of an allreduce. Replaces runtime.allreduce_dtype of model.json.
    #[arg(long, value_enum, value_name = "TYPE", help_heading = MACHINE)]
    pub allreduce_dtype: Option<AllreduceDtype>,
    /// Number of workers of each rank. Default: its share of the node's cores, or its GPU's multiprocessors.
    #[arg(long, value_name = "W", allow_negative_numbers = true, help_heading = MACHINE)]
    pub workers: Option<u32>,
    /// GPU: how ranks write to each other's memory.
    #[arg(long, value_enum, default_value_t = Transport::Auto, help_heading = MACHINE)]
    pub transport: Transport,
    /// GPU: how NVSHMEM connects the ranks.
    #[arg(long, value_enum, default_value_t = Bootstrap::UniqueId, help_heading = MACHINE)]
    pub bootstrap: Bootstrap,
    /// GPU: how the kernels of several ranks are launched.
    #[arg(long, value_enum, default_value_t = Launch::Auto, help_heading = MACHINE)]
    pub launch: Launch,
    /// End the run with an error if a wait sees no progress for this long.
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, allow_negative_numbers = true, help_heading = MACHINE)]
    pub deadline: f64,
    /// Whether to use the values that `mpk-bench tune` found for this machine and model, or those that come with the program.
    #[arg(long, value_enum, value_name = "AUTO|OFF", default_value_t = TuningTable::Auto, help_heading = MACHINE)]
    pub tuning: TuningTable,
    /// Set one tuning value; `mpk-bench tune --list` prints the names. May be given several times.
    #[arg(long, value_name = "NAME=VALUE", value_parser = tuned_value, help_heading = MACHINE)]
    pub tune: Vec<(String, u64)>,
    /// Log from every rank, not only from rank 0.
    #[arg(long, help_heading = MACHINE)]
    pub log_all_ranks: bool,
    /// Debug: drop the protection of receive buffers that peers may still read, and the check that refuses such graphs.
    /// Shows what a stall then breaks.
    #[arg(long, hide = true)]
    pub debug_unprotected: bool,
    /// Debug: delay worker 0 of RANK (on a GPU, every worker) by MS milliseconds before each task of operator OP (an
    /// index or a name).
    #[arg(long, value_name = "RANK:OP:MS", hide = true)]
    pub debug_stall: Option<String>,
    /// Debug: make RANK stop, pause or end before step STEP. KIND is `stop`, `kill`, `exit`, `exit=STATUS`, `panic`,
    /// `pause=MILLISECONDS`, or `fail`: it cannot launch its kernel from this step on. Steps are the points at which all ranks
    /// meet; MPI's start-up is 1.
    #[arg(long, value_name = "RANK:STEP:KIND", hide = true)]
    pub debug_fault: Option<String>,
}

/// NAME=VALUE of `--tune`. The valid names depend on the machine, so they are checked later.
fn tuned_value(text: &str) -> Result<(String, u64), String> {
    let (name, value) =
        text.split_once('=').ok_or("expected NAME=VALUE, such as attention.split_positions=256")?;
    let value = value.parse().map_err(|_| format!("{value} is not a whole number"))?;
    Ok((name.to_string(), value))
}

impl RuntimeArgs {
    /// The values that replace those of model.json. Limits are checked after they are merged.
    pub fn overrides(&self) -> Overrides {
        Overrides {
            max_batch: self.max_batch,
            max_seq_len: self.max_seq_len,
            placement: self.placement.map(Into::into),
            allreduce: self.allreduce.map(Into::into),
            allreduce_dtype: self.allreduce_dtype.map(Into::into),
            prefill_share: self.prefill_share,
            kv: self.kv.map(Into::into),
            prefix_cache: self.prefix_cache.map(Into::into),
            workers: self.workers,
            ..Overrides::default()
        }
    }

    /// The same for a benchmark. Its prompts are alike, so the prefix cache is off unless the command line turns it on.
    pub fn overrides_of_benchmark(&self) -> Overrides {
        let overrides = self.overrides();
        Overrides { prefix_cache: overrides.prefix_cache.or(Some(model_json::PrefixCache::Off)), ..overrides }
    }

    /// How to run a model. [`RuntimeArgs::contradiction`] reports invalid values.
    pub fn run_config(&self) -> RunConfig {
        let default = RunConfig::default();
        let mut tuning = Tuning::default();
        self.tune.iter().for_each(|(name, value)| tuning.set(name, *value));
        RunConfig {
            use_tuning_table: self.tuning == TuningTable::Auto,
            tuning,
            backend: self.backend.into(),
            transport: self.transport.into(),
            bootstrap: self.bootstrap.into(),
            launch: self.launch.into(),
            deadline: Duration::try_from_secs_f64(self.deadline).unwrap_or(default.deadline),
            unprotected: self.unprotected(),
            stall: self.debug_stall.clone(),
            fault: self.debug_fault.as_deref().and_then(Fault::parse),
            // All requests are submitted at once.
            max_waiting: usize::MAX,
            ..default
        }
    }

    /// True if a GPU may be used.
    pub fn gpu_possible(&self) -> bool {
        BackendChoice::from(self.backend) != BackendChoice::Cpu
    }

    /// `--debug-unprotected`, or MPK_DEBUG_UNPROTECTED=1.
    pub fn unprotected(&self) -> bool {
        self.debug_unprotected || std::env::var_os("MPK_DEBUG_UNPROTECTED").is_some_and(|value| value == "1")
    }

    /// The first invalid option, if there is one.
    pub fn contradiction(&self) -> Option<String> {
        // {:?} writes large numbers with an exponent.
        if !(self.deadline > 0.0 && self.deadline <= LONGEST_SECONDS) {
            let problem = "expected a number of seconds above 0, at most 1e9";
            return Some(format!("--deadline {:?}: {problem}", self.deadline));
        }
        let fault = self.debug_fault.as_ref().filter(|text| Fault::parse(text).is_none())?;
        Some(format!("--debug-fault {fault}: expected RANK:STEP:KIND, such as 1:3:kill"))
    }
}
