//! The command line of `mpk-serve`.

use crate::cli::runtime_args::RuntimeArgs;
use crate::engine::{ModelSpec, RunConfig};
use crate::serve::limits::Limits;
use clap::Parser;
use std::path::PathBuf;
use std::time::Duration;

const HTTP: &str = "The server";
/// Variable that holds the key where the command line has none.
const KEY_VARIABLE: &str = "MPK_API_KEY";
/// Longest time that an option may name: thirty years.
const LONGEST_SECONDS: f64 = 1e9;

const EXAMPLES: &str = "\
Examples:
  mpk-serve examples/tiny/model.json
  mpirun -n 2 mpk-serve Qwen/Qwen3-8B --port 8000 --max-batch 16 --max-seq-len 8192
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{\"prompt\": \"Once\"}'

Shell completions: mpk-serve completions bash|elvish|fish|powershell|zsh
Manual page: mpk-serve man";

/// Serve a model over HTTP, with OpenAI's API: `mpirun -n N mpk-serve MODEL`.
#[derive(Clone, Debug, Parser)]
#[command(name = "mpk-serve", version, max_term_width = 110, after_help = EXAMPLES)]
pub struct ServeArgs {
    /// A model.json (schema mpk-model/1), a Hugging Face folder, or a hub name such as Qwen/Qwen3-8B that is in the
    /// Hugging Face cache.
    pub model: PathBuf,
    /// Address to listen on. 0.0.0.0 accepts requests from any machine; set an API key then.
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1", help_heading = HTTP)]
    pub host: String,
    /// Port to listen on; 0 picks a free one.
    #[arg(long, value_name = "PORT", default_value_t = 8000, help_heading = HTTP)]
    pub port: u16,
    /// API key that requests must carry (Authorization: Bearer KEY). Other users of this machine can see the command line, so prefer
    /// the environment variable MPK_API_KEY.
    #[arg(long, value_name = "KEY", help_heading = HTTP)]
    pub api_key: Option<String>,
    /// Name of the model in requests and answers; by default the name in model.json, or else the name of the folder.
    #[arg(long, value_name = "NAME", help_heading = HTTP)]
    pub served_model_name: Option<String>,
    /// Maximum number of requests that wait for a slot; further ones get status 429.
    #[arg(long, value_name = "Q", default_value_t = 256, value_parser = clap::value_parser!(u32).range(0..=1_000_000), help_heading = HTTP)]
    pub max_queued_requests: u32,
    /// Maximum number of open connections; further ones get status 503.
    #[arg(long, value_name = "C", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1_000_000), help_heading = HTTP)]
    pub max_connections: u32,
    /// Maximum size of a request's body in bytes; a larger one gets status 413.
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 20, value_parser = clap::value_parser!(u32).range(1024..=1 << 30), help_heading = HTTP)]
    pub max_body_bytes: u32,
    /// How long running requests may take to finish after SIGTERM or SIGINT.
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, help_heading = HTTP)]
    pub shutdown_timeout: f64,
    /// How long the kernel stays up without requests; the next request starts it again. 0: it never ends.
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0, help_heading = HTTP)]
    pub idle_exit: f64,
    /// Maximum number of log-probabilities per token that a request may ask for (at most 128).
    #[arg(long, value_name = "K", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=128), help_heading = HTTP)]
    pub logprobs: u32,
    /// When the server ends, write a timeline of all ranks (Chrome trace format) to FILE. It covers the last iterations, up to 20 MB.
    #[arg(long, value_name = "FILE", help_heading = HTTP)]
    pub trace: Option<PathBuf>,
    #[command(flatten)]
    #[allow(missing_docs, reason = "would be shown as help")]
    pub runtime: RuntimeArgs,
}

impl ServeArgs {
    /// Reads the command line.
    ///
    /// # Errors
    /// Wrong usage; or help or the version is asked for, which is printed in the same way.
    pub fn from_command_line() -> Result<ServeArgs, clap::Error> {
        ServeArgs::try_parse()
    }

    /// The key of the command line, else of the environment.
    pub fn key(&self) -> Option<String> {
        let variable = || std::env::var(KEY_VARIABLE).ok().filter(|key| !key.is_empty());
        self.api_key.clone().or_else(variable)
    }

    /// Bounds of the server.
    pub fn limits(&self) -> Limits {
        let default = Limits::default();
        let body_bytes = self.max_body_bytes as usize;
        Limits {
            connections: self.max_connections as usize,
            queued_requests: self.max_queued_requests as usize,
            body_bytes,
            all_bodies_bytes: default.all_bodies_bytes.max(4 * body_bytes),
            ..default
        }
    }

    /// What is to be run.
    pub fn model_spec(&self) -> ModelSpec {
        let mut spec = ModelSpec::path(&self.model);
        spec.overrides = self.runtime.overrides();
        spec
    }

    /// How it is run. The server's own queue is the shorter one.
    pub fn run_config(&self) -> RunConfig {
        let idle_exit = Duration::try_from_secs_f64(self.idle_exit).ok().filter(|time| !time.is_zero());
        RunConfig {
            logprobs: self.logprobs,
            max_waiting: usize::MAX,
            idle_exit,
            trace: self.trace.clone(),
            ..self.runtime.run_config()
        }
    }

    /// How long running requests may go on after a signal. What is no time is told by [`ServeArgs::contradiction`].
    pub fn patience(&self) -> Duration {
        Duration::try_from_secs_f64(self.shutdown_timeout).unwrap_or_default()
    }

    /// What is wrong with the options, if anything.
    pub fn contradiction(&self) -> Option<String> {
        let seconds = [("--shutdown-timeout", self.shutdown_timeout), ("--idle-exit", self.idle_exit)];
        for (name, value) in seconds {
            if !value.is_finite() || !(0.0..=LONGEST_SECONDS).contains(&value) {
                return Some(format!("{name} {value} is not a number of seconds"));
            }
        }
        if self.served_model_name.as_ref().is_some_and(|name| name.is_empty() || name.len() > 256) {
            return Some("--served-model-name has 1 to 256 bytes".into());
        }
        self.runtime.contradiction()
    }
}
