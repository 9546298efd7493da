//! The command line of `mpk-run`.

use crate::cli::choices::Backend;
use crate::cli::devices;
use crate::cli::runtime_args::RuntimeArgs;
use crate::cli::sampling_args::SamplingArgs;
use crate::engine::{ModelSpec, RunConfig};
use crate::model::app_error::AppError;
use crate::model::model_json::Overrides;
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser};
use serde_json::{Map, Value};
use std::path::PathBuf;

const PROMPTS: &str = "Prompts and answers";
const OUTPUT: &str = "Output";
const BUILD: &str = "Graphs";

const EXAMPLES: &str = "\
Examples:
  mpk-run examples/tiny/model.json --prompt \"In the beginning\"
  mpirun -n 2 mpk-run Qwen/Qwen3-8B --chat
  mpirun -n 2 mpk-run Qwen/Qwen3-8B --chat --prompt \"Why is the sky blue?\"
  mpirun -n 4 mpk-run model.json --prompt-tokens 1,2,3 --json
  mpk-run model.json --ranks 8 --device h200 --check

Other commands:
  mpk-run doctor [MODEL] [--ranks N]   Check whether this machine can run a model, and what is missing
  mpk-run completions SHELL            Print completions for bash, elvish, fish, powershell or zsh
  mpk-run man [doctor]                 Print the manual page";

/// Run a model as one persistent kernel per rank: `mpirun -n N mpk-run model.json`.
#[derive(Clone, Debug, Parser)]
#[command(name = "mpk-run", version, max_term_width = 110, after_help = EXAMPLES)]
pub struct Args {
    /// A model.json (schema mpk-model/1), a Hugging Face folder, or a hub name such as Qwen/Qwen3-8B that is in the
    /// Hugging Face cache.
    pub model: PathBuf,
    /// Prompt text. Replaces the prompts of model.json. May be given several times.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, help_heading = PROMPTS)]
    pub prompt: Vec<String>,
    /// Prompt as token ids, separated by commas. May be given several times.
    #[arg(long, value_name = "IDS", allow_hyphen_values = true, help_heading = PROMPTS)]
    pub prompt_tokens: Vec<String>,
    /// Chat with the model: each line of standard input is a message, formatted with the checkpoint's chat template.
    /// With --prompt, each prompt starts its own conversation and gets one answer.
    #[arg(long, help_heading = PROMPTS)]
    pub chat: bool,
    /// Argument for the chat template, such as enable_thinking=false. VALUE is read as JSON if possible, otherwise as
    /// text. May be given several times.
    #[arg(long, value_name = "NAME=VALUE", requires = "chat", help_heading = PROMPTS)]
    pub template_argument: Vec<String>,
    /// All prompts in the order of the command line. Filled by [`Args::from_command_line`].
    #[arg(skip)]
    pub prompts: Vec<GivenPrompt>,
    /// Maximum number of new tokens per request.
    #[arg(long, value_name = "K", allow_negative_numbers = true, help_heading = PROMPTS)]
    pub max_new_tokens: Option<u32>,
    /// Continue after an end-of-sequence token.
    #[arg(long, help_heading = PROMPTS)]
    pub ignore_eos: bool,
    /// End an answer before this text. Replaces generate.stop of model.json. May be given several times.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, help_heading = PROMPTS)]
    pub stop: Vec<String>,
    #[command(flatten)]
    #[allow(missing_docs, reason = "would be shown as help")]
    pub sampling: SamplingArgs,
    /// Report the log-probability of each new token, and the K highest at its place (at most 128).
    #[arg(long, value_name = "K", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=128), allow_negative_numbers = true, help_heading = OUTPUT)]
    pub logprobs: u32,
    /// Print one JSON object (schema mpk-run/1) instead of text.
    #[arg(long, help_heading = OUTPUT)]
    pub json: bool,
    /// Write a timeline of all ranks to FILE (Chrome trace format). It covers the last iterations, up to 20 MB.
    #[arg(long, value_name = "FILE", help_heading = OUTPUT)]
    pub trace: Option<PathBuf>,
    /// Number of iterations in the timeline, counted from the last one.
    #[arg(long, value_name = "K", requires = "trace", value_parser = clap::value_parser!(u32).range(1..), allow_negative_numbers = true, help_heading = OUTPUT)]
    pub trace_iterations: Option<u32>,
    #[command(flatten)]
    #[allow(missing_docs, reason = "would be shown as help")]
    pub runtime: RuntimeArgs,
    /// Number of ranks to build graphs for, without MPI (with --check, --emit-graph or --compile-only). Default: the
    /// launcher's number of processes, otherwise 1.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65535), allow_negative_numbers = true, help_heading = BUILD)]
    pub ranks: Option<u32>,
    /// Device to build graphs for, without a GPU. Default of --compile-only: this machine's GPU, otherwise h200.
    #[arg(long, value_name = "NAME", help_heading = BUILD, help = device_help())]
    pub device: Option<String>,
    /// Write all ranks' task graphs to DIR and exit.
    #[arg(long, value_name = "DIR", help_heading = BUILD)]
    pub emit_graph: Option<PathBuf>,
    /// Build and verify all ranks' graphs, print their tasks and events, and exit.
    #[arg(long, help_heading = BUILD)]
    pub check: bool,
    /// Compile the GPU kernels of all ranks' graphs into the cache, and exit.
    #[arg(long, help_heading = BUILD)]
    pub compile_only: bool,
    /// Run an op graph of your own (`graph` in model.json) this many times in one launch, to time it. Default: 1.
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..), allow_negative_numbers = true, help_heading = BUILD)]
    pub iterations: Option<u32>,
    /// Every option in force with its values, as given on the command line. Filled by [`Args::from_command_line`].
    #[arg(skip)]
    pub in_force: Vec<(String, String)>,
}

/// The help of `--device`.
fn device_help() -> String {
    format!(
        "Device to build graphs for, without a GPU (with --check, --emit-graph or --compile-only); the hardware table has {}. \
         Default of --compile-only: this machine's GPU, otherwise h200",
        devices::names()
    )
}

/// Check whether this machine can run a model, and what is missing: `mpk-run doctor [model.json]`.
#[derive(Clone, Debug, Parser)]
#[command(name = "mpk-run doctor", bin_name = "mpk-run doctor", version, max_term_width = 110)]
pub struct DoctorArgs {
    /// Model whose memory is checked too: a model.json, a Hugging Face folder, or a hub name.
    pub model: Option<PathBuf>,
    /// Number of ranks that the job will have.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65535), allow_negative_numbers = true)]
    pub ranks: u32,
    /// Backend that must work. auto accepts any.
    #[arg(long, value_enum, default_value_t = Backend::Auto)]
    pub backend: Backend,
}

/// The command that the command line names.
#[derive(Clone, Debug)]
pub enum Command {
    /// Run or build a model.
    Run(Box<Args>),
    /// Check the machine.
    Doctor(DoctorArgs),
}

/// A prompt of the command line: its index among the prompts of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GivenPrompt {
    /// In [`Args::prompt`].
    Text(usize),
    /// In [`Args::prompt_tokens`].
    Tokens(usize),
}

impl Args {
    /// The command line with its commands, for completions and the manual page.
    pub fn with_commands() -> clap::Command {
        Args::command().subcommand(DoctorArgs::command().name("doctor").display_name("mpk-run-doctor"))
    }

    /// Reads the command line.
    ///
    /// # Errors
    /// Wrong usage. A request for help or the version is an error too: clap prints it the same way.
    pub fn from_command_line() -> Result<Command, clap::Error> {
        let mut words = std::env::args_os();
        let program = words.next();
        // A model file with this name can be given as ./doctor.
        if words.next().is_some_and(|word| word == "doctor") {
            return Ok(Command::Doctor(DoctorArgs::try_parse_from(program.into_iter().chain(words))?));
        }
        Ok(Command::Run(Box::new(Args::from_matches(&Args::command().try_get_matches()?)?)))
    }

    fn from_matches(matches: &ArgMatches) -> Result<Args, clap::Error> {
        let mut args = Args::from_arg_matches(matches)?;
        let places = |name: &str| matches.indices_of(name).into_iter().flatten().enumerate();
        let mut prompts: Vec<(usize, GivenPrompt)> = places("prompt")
            .map(|(number, place)| (place, GivenPrompt::Text(number)))
            .chain(places("prompt_tokens").map(|(number, place)| (place, GivenPrompt::Tokens(number))))
            .collect();
        prompts.sort_by_key(|&(place, _)| place);
        args.prompts = prompts.into_iter().map(|(_, prompt)| prompt).collect();
        args.in_force = matches
            .ids()
            .filter_map(|id| {
                let values = matches.get_raw(id.as_str())?;
                let values: Vec<_> = values.map(|value| value.to_string_lossy()).collect();
                Some((id.as_str().to_string(), values.join(" ")))
            })
            .collect();
        Ok(args)
    }

    /// The arguments of `--template-argument`.
    ///
    /// # Errors
    /// One is not of the form NAME=VALUE, or would replace the messages.
    pub fn template_arguments(&self) -> Result<Map<String, Value>, AppError> {
        let pairs = self.template_argument.iter().map(|argument| {
            let (name, value) =
                argument.split_once('=').filter(|(name, _)| !name.is_empty()).ok_or_else(|| {
                    AppError::input(format!(
                        "--template-argument {argument}: expected NAME=VALUE, such as enable_thinking=false"
                    ))
                })?;
            if name == "messages" {
                let problem = "--template-argument messages=...: the messages are those of the conversation";
                return Err(
                    AppError::input(problem).with_help("give the message with --prompt or on standard input")
                );
            }
            let value = serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.into()));
            Ok((name.to_string(), value))
        });
        pairs.collect()
    }

    /// True if graphs are only built, for `--ranks` ranks without MPI, and nothing runs.
    pub fn builds_only(&self) -> bool {
        self.check || self.emit_graph.is_some() || self.compile_only
    }

    /// The settings that all ranks of a job must share, by name and value.
    pub fn to_compare(&self) -> Vec<(String, String)> {
        /// The model is compared by its contents, not by its path. clap also lists groups of options, which have no value.
        const LEFT_OUT: [&str; 5] = ["model", "log_all_ranks", "Args", "RuntimeArgs", "SamplingArgs"];
        let options = self.in_force.iter().filter(|(name, _)| !LEFT_OUT.contains(&name.as_str()));
        let mut values: Vec<(String, String)> =
            options.map(|(name, value)| (format!("--{}", name.replace('_', "-")), value.clone())).collect();
        values.push(("MPK_DEBUG_UNPROTECTED".into(), self.runtime.unprotected().to_string()));
        // The order of text prompts and token prompts among each other.
        values.push(("the order of prompts".into(), format!("{:?}", self.prompts)));
        values
    }

    /// The model to run, with the options that replace values of model.json.
    pub fn model_spec(&self) -> ModelSpec {
        let mut spec = ModelSpec::path(&self.model);
        spec.overrides = Overrides {
            max_new_tokens: self.max_new_tokens,
            ignore_eos: self.ignore_eos,
            stop: (!self.stop.is_empty()).then(|| self.stop.clone()),
            ..self.runtime.overrides()
        };
        spec
    }

    /// How to run it. [`Args::contradiction`] reports an invalid deadline.
    pub fn run_config(&self) -> RunConfig {
        RunConfig {
            logprobs: self.logprobs,
            trace: self.trace.clone(),
            trace_iterations: self.trace_iterations,
            in_common: self.to_compare(),
            ..self.runtime.run_config()
        }
    }

    /// True for a conversation on standard input.
    pub fn is_conversation(&self) -> bool {
        self.chat && self.prompts.is_empty() && !self.builds_only()
    }

    /// The first option that has no effect unless something runs. Prompts and the like are accepted, because model.json may have
    /// them, too.
    fn only_for_runs(&self) -> Option<&'static str> {
        let given = [
            ("--json", self.json),
            ("--chat", self.chat),
            // The kernels of a run with a timeline are compiled separately.
            ("--trace", self.trace.is_some() && !self.compile_only),
            ("--iterations", self.iterations.is_some()),
        ];
        given.into_iter().find_map(|(name, given)| given.then_some(name))
    }

    /// Checks that no option is given that has no effect on a user graph.
    ///
    /// # Errors
    /// Names the first such option.
    pub fn check_for_user_graph(&self) -> Result<(), AppError> {
        self.only_for_tokens().map_or(Ok(()), |option| {
            Err(AppError::input(format!(
                "{option} has no effect on a graph of your own, which has its own sizes and no tokens to generate"
            ))
            .with_help("leave it out"))
        })
    }

    /// The first option that has no effect on a user graph.
    fn only_for_tokens(&self) -> Option<&'static str> {
        let given = [
            ("--prompt", !self.prompt.is_empty()),
            ("--prompt-tokens", !self.prompt_tokens.is_empty()),
            ("--chat", self.chat),
            ("--max-new-tokens", self.max_new_tokens.is_some()),
            ("--ignore-eos", self.ignore_eos),
            ("--stop", !self.stop.is_empty()),
            ("--logprobs", self.logprobs > 0),
            ("--max-batch", self.runtime.max_batch.is_some()),
            ("--max-seq-len", self.runtime.max_seq_len.is_some()),
            ("--prefill-share", self.runtime.prefill_share.is_some()),
            ("--kv", self.runtime.kv.is_some()),
            ("--prefix-cache", self.runtime.prefix_cache.is_some()),
            ("--allreduce-dtype", self.runtime.allreduce_dtype.is_some()),
        ];
        given
            .into_iter()
            .find_map(|(name, given)| given.then_some(name))
            .or_else(|| self.sampling.first_given())
    }

    /// The first contradiction between options, if there is one.
    pub fn contradiction(&self) -> Option<String> {
        if let Some(option) = self.only_for_runs().filter(|_| self.builds_only()) {
            return Some(format!(
                "{option} has no effect with --check, --emit-graph or --compile-only, because nothing runs; leave it out"
            ));
        }
        if self.is_conversation() && (self.json || self.logprobs > 0) {
            return Some(
                "--json and --logprobs need a prompt: --chat without --prompt is an interactive conversation"
                    .into(),
            );
        }
        if !self.builds_only() {
            if self.ranks.is_some() {
                return Some(
                    "--ranks only builds graphs and needs --check, --emit-graph or --compile-only; to run on N ranks, use `mpirun -n N mpk-run ...`".into(),
                );
            }
            if self.device.is_some() {
                return Some("--device needs --check, --emit-graph or --compile-only".into());
            }
        }
        self.runtime.contradiction()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn template_arguments_are_json_or_text() {
        let args = |words: &[&str]| {
            let line = ["mpk-run", "m.json", "--chat"].iter().chain(words);
            Args::from_matches(&Args::command().try_get_matches_from(line).unwrap()).unwrap()
        };
        let given =
            args(&["--template-argument", "enable_thinking=false", "--template-argument", "date=1 May=x"]);
        let arguments = given.template_arguments().unwrap();
        assert_eq!(
            Value::Object(arguments),
            serde_json::json!({"enable_thinking": false, "date": "1 May=x"})
        );
        assert!(args(&["--template-argument", "=1"]).template_arguments().is_err());
        let error = args(&["--template-argument", "messages=[]"]).template_arguments().unwrap_err();
        assert!(error.message.contains("messages=...: the messages are"), "{}", error.message);
        for allowed in ["tools=[]", "add_generation_prompt=false"] {
            assert!(args(&["--template-argument", allowed]).template_arguments().is_ok());
        }
    }

    /// Not as an unknown option, `-1`.
    #[test]
    fn a_negative_number_is_refused_as_a_value() {
        for option in
            ["--max-new-tokens", "--logprobs", "--ranks", "--iterations", "--workers", "--max-batch"]
        {
            let error =
                Args::command().try_get_matches_from(["mpk-run", "m.json", option, "-1"]).unwrap_err();
            let expected = format!("invalid value '-1' for '{option} <");
            assert!(error.to_string().contains(&expected), "{error}");
        }
    }

    /// Not as an option: a list in Markdown begins with a dash.
    #[test]
    fn a_text_may_begin_with_a_dash() {
        let line =
            ["mpk-run", "m.json", "--prompt", "- a", "--stop", "---", "--prompt-tokens", "-1,2", "--json"];
        let args = Args::from_matches(&Args::command().try_get_matches_from(line).unwrap()).unwrap();
        assert_eq!((args.prompt[0].as_str(), args.stop[0].as_str()), ("- a", "---"));
        assert_eq!((args.prompt_tokens[0].as_str(), args.json), ("-1,2", true));
    }

    #[test]
    fn options_without_effect_are_refused_by_name() {
        let problem = |words: &[&str]| {
            let line = ["mpk-run", "m.json"].iter().chain(words);
            Args::from_matches(&Args::command().try_get_matches_from(line).unwrap()).unwrap().contradiction()
        };
        for build in
            [&["--check"][..], &["--emit-graph", "d"], &["--compile-only"], &["--check", "--emit-graph", "d"]]
        {
            assert_eq!(problem(build), None);
            for option in [&["--json"][..], &["--chat"], &["--iterations", "2"]] {
                let found = problem(&[build, option].concat()).unwrap_or_default();
                assert!(found.starts_with(&format!("{} has no effect", option[0])), "{option:?}: {found}");
            }
            for used in [
                &["--ranks", "2"][..],
                &["--logprobs", "3"],
                &["--temperature", "0.5"],
                &["--prompt", "x"],
                &["--prompt-tokens", "1"],
            ] {
                assert_eq!(problem(&[build, used].concat()), None, "{used:?}");
            }
        }
        assert!(problem(&["--check", "--trace", "t"]).is_some_and(|found| found.starts_with("--trace")));
        assert_eq!(
            problem(&["--compile-only", "--trace", "t"]),
            None,
            "compiles the kernels with a timeline"
        );
    }

    #[test]
    fn options_without_effect_on_a_user_graph_are_refused_by_name() {
        let check = |words: &[&str]| {
            let line = ["mpk-run", "m.json"].iter().chain(words);
            let args = Args::from_matches(&Args::command().try_get_matches_from(line).unwrap()).unwrap();
            args.check_for_user_graph().map_err(|error| error.message)
        };
        assert_eq!(check(&["--allreduce", "two-shot", "--iterations", "2"]), Ok(()));
        for option in [
            &["--prompt", "x"][..],
            &["--kv", "on-demand"],
            &["--prefix-cache", "off"],
            &["--allreduce-dtype", "f32"],
            &["--temperature", "0.5"],
        ] {
            let message = check(option).unwrap_err();
            assert!(message.starts_with(&format!("{} has no effect", option[0])), "{message}");
        }
    }

    #[test]
    fn prompts_of_both_kinds_keep_their_order() {
        let line =
            ["mpk-run", "m.json", "--prompt-tokens", "1", "--prompt", "a", "--json", "--prompt-tokens", "2"];
        let args = Args::from_matches(&Args::command().try_get_matches_from(line).unwrap()).unwrap();
        assert_eq!(args.prompts, [GivenPrompt::Tokens(0), GivenPrompt::Text(0), GivenPrompt::Tokens(1)]);
        assert_eq!(args.prompt_tokens, ["1", "2"]);
    }
}
