//! The command line of `mpk-serve`.

use crate::cli::runtime_args::{LONGEST_SECONDS, RuntimeArgs};
use crate::engine::{ModelSpec, RunConfig};
use crate::serve::auth::ApiKey;
use crate::serve::limits::Limits;
use clap::Parser;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

const HTTP: &str = "The server";
/// Variable with the key, used if the command line has none.
const KEY_VARIABLE: &str = "MPK_API_KEY";

const EXAMPLES: &str = "\
Examples:
  mpk-serve examples/tiny/model.json
  mpirun -n 2 mpk-serve Qwen/Qwen3-8B --port 8000 --max-batch 16 --max-seq-len 8192
  curl http://127.0.0.1:8000/v1/completions \\
    -H 'Content-Type: application/json' -d '{\"prompt\": \"Once\"}'

Other commands:
  mpk-serve completions SHELL   Print completions for bash, elvish, fish, powershell or zsh
  mpk-serve man                 Print the manual page";

/// Serve a model over HTTP, with OpenAI's API: `mpirun -n N mpk-serve MODEL`.
#[derive(Clone, Debug, Parser)]
#[command(name = "mpk-serve", version, max_term_width = 110, after_help = EXAMPLES)]
pub struct ServeArgs {
    /// A model.json (schema mpk-model/1), a Hugging Face folder, or a hub name such as Qwen/Qwen3-8B that is in the
    /// Hugging Face cache.
    pub model: PathBuf,
    /// Address to listen on. 0.0.0.0 accepts requests from any machine; then set an API key.
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1", help_heading = HTTP)]
    pub host: String,
    /// Port to listen on; 0 picks a free one.
    #[arg(long, value_name = "PORT", default_value_t = 8000, allow_negative_numbers = true, help_heading = HTTP)]
    pub port: u16,
    /// API key that requests must carry (Authorization: Bearer KEY). Other users of this machine can see the command
    /// line, so prefer the environment variable MPK_API_KEY.
    #[arg(long, value_name = "KEY", help_heading = HTTP)]
    pub api_key: Option<String>,
    /// Name of the model in requests and answers. Default: the name in model.json, the hub name, or the name of the
    /// folder.
    #[arg(long, value_name = "NAME", help_heading = HTTP)]
    pub served_model_name: Option<String>,
    /// Maximum number of requests that wait for a slot. Further requests get status 429.
    #[arg(long, value_name = "Q", default_value_t = 256, value_parser = clap::value_parser!(u32).range(0..=1_000_000), allow_negative_numbers = true, help_heading = HTTP)]
    pub max_queued_requests: u32,
    /// Maximum number of open connections. Further connections get status 503.
    #[arg(long, value_name = "C", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1_000_000), allow_negative_numbers = true, help_heading = HTTP)]
    pub max_connections: u32,
    /// Maximum size of a request's body in bytes. A larger request gets status 413.
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 20, value_parser = clap::value_parser!(u32).range(1024..=1 << 30), allow_negative_numbers = true, help_heading = HTTP)]
    pub max_body_bytes: u32,
    /// How long running requests may take to finish after SIGTERM or SIGINT.
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, allow_negative_numbers = true, help_heading = HTTP)]
    pub shutdown_timeout: f64,
    /// How long the kernel keeps running without requests. The next request starts it again. 0: it never stops.
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0, allow_negative_numbers = true, help_heading = HTTP)]
    pub idle_exit: f64,
    /// Maximum number of log-probabilities per token that a request may ask for, up to 128. They take time only for requests that ask for
    /// them. 0: none can be asked for, and the graphs have no room for them.
    #[arg(long, value_name = "K", default_value_t = 20, value_parser = clap::value_parser!(u32).range(0..=128), allow_negative_numbers = true, help_heading = HTTP)]
    pub logprobs: u32,
    /// Decode greedily only: the graphs have no sampling operators, and a request that samples or sets a penalty is refused. Ignores the
    /// sampling values of model.json and generation_config.json.
    #[arg(long, help_heading = HTTP)]
    pub greedy: bool,
    /// When the server ends, write a timeline of all ranks to FILE (Chrome trace format). It covers the last iterations,
    /// up to 20 MB.
    #[arg(long, value_name = "FILE", help_heading = HTTP)]
    pub trace: Option<PathBuf>,
    /// Number of iterations in the timeline, counted from the last one.
    #[arg(long, value_name = "K", requires = "trace", value_parser = clap::value_parser!(u32).range(1..), allow_negative_numbers = true, help_heading = HTTP)]
    pub trace_iterations: Option<u32>,
    #[command(flatten)]
    #[allow(missing_docs, reason = "would be shown as help")]
    pub runtime: RuntimeArgs,
}

impl ServeArgs {
    /// Reads the command line.
    ///
    /// # Errors
    /// Wrong usage. A request for help or the version is an error too: clap prints it the same way.
    pub fn from_command_line() -> Result<ServeArgs, clap::Error> {
        ServeArgs::try_parse()
    }

    /// The key from the command line, otherwise from the environment.
    ///
    /// # Errors
    /// It cannot be a key. An empty variable is an error too: what should have set it has failed, and the server would be open.
    pub fn key(&self) -> Result<Option<ApiKey>, String> {
        key_of(self.api_key.as_deref(), std::env::var_os(KEY_VARIABLE))
    }

    /// The server's limits.
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

    /// The model to run.
    pub fn model_spec(&self) -> ModelSpec {
        let mut spec = ModelSpec::path(&self.model);
        spec.overrides = self.runtime.overrides();
        spec
    }

    /// How to run it. The engine's queue has no limit, because the server limits its own.
    pub fn run_config(&self) -> RunConfig {
        let idle_exit = Duration::try_from_secs_f64(self.idle_exit).ok().filter(|time| !time.is_zero());
        RunConfig {
            logprobs: self.logprobs,
            sampling: !self.greedy,
            max_waiting: usize::MAX,
            idle_exit,
            trace: self.trace.clone(),
            trace_iterations: self.trace_iterations,
            ..self.runtime.run_config()
        }
    }

    /// How long running requests may continue after a signal. [`ServeArgs::contradiction`] reports an invalid time.
    pub fn patience(&self) -> Duration {
        Duration::try_from_secs_f64(self.shutdown_timeout).unwrap_or_default()
    }

    /// The first invalid option, if there is one.
    pub fn contradiction(&self) -> Option<String> {
        let seconds = [("--shutdown-timeout", self.shutdown_timeout), ("--idle-exit", self.idle_exit)];
        for (name, value) in seconds {
            if !(0.0..=LONGEST_SECONDS).contains(&value) {
                // {:?} writes large numbers with an exponent.
                return Some(format!("{name} {value:?}: expected a number of seconds from 0 to 1e9"));
            }
        }
        if self.served_model_name.as_ref().is_some_and(|name| name.is_empty() || name.len() > 256) {
            return Some("--served-model-name: expected 1 to 256 bytes".into());
        }
        self.runtime.contradiction()
    }
}

fn key_of(option: Option<&str>, variable: Option<OsString>) -> Result<Option<ApiKey>, String> {
    if let Some(key) = option {
        return ApiKey::new(key).map(Some).map_err(|problem| format!("--api-key: {problem}"));
    }
    let Some(key) = variable else { return Ok(None) };
    // What is not UTF-8 is no key either.
    let key = ApiKey::new(&key.to_string_lossy());
    key.map(Some)
        .map_err(|problem| format!("{KEY_VARIABLE}: {problem}; without the variable, no key is needed"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStringExt;

    #[test]
    fn a_variable_that_is_no_key_is_refused() {
        let variable = |bytes: &[u8]| Some(OsString::from_vec(bytes.to_vec()));
        for (option, variable, expected) in [
            (None, None, Ok(false)),
            (Some("secret"), variable(b""), Ok(true)),
            (None, variable(b"secret"), Ok(true)),
            (None, variable(b""), Err("MPK_API_KEY: an API key must have 1 to 256")),
            (None, variable(b"\xFF"), Err("MPK_API_KEY: ")),
            (Some(""), variable(b"secret"), Err("--api-key: ")),
        ] {
            match (key_of(option, variable), expected) {
                (Ok(key), Ok(there)) => assert_eq!(key.is_some(), there, "{option:?}"),
                (Err(problem), Err(begin)) => assert!(problem.starts_with(begin), "{problem}"),
                (found, expected) => panic!("{option:?}: {found:?}, expected {expected:?}"),
            }
        }
    }

    #[test]
    fn times_out_of_range_are_refused_with_the_range() {
        for option in ["--idle-exit", "--shutdown-timeout", "--deadline"] {
            for value in ["-1", "1e300", "nan", "inf"] {
                let args = ServeArgs::try_parse_from(["mpk-serve", "m", option, value]).unwrap();
                let problem = args.contradiction().unwrap_or_default();
                let says = problem.starts_with(option) && problem.contains("1e9") && problem.len() < 100;
                assert!(says, "{option} {value}: {problem}");
            }
        }
        assert_eq!(
            ServeArgs::try_parse_from(["mpk-serve", "m", "--idle-exit", "0"]).unwrap().contradiction(),
            None
        );
    }
}
