//! The command line of `mpk-run`.

use crate::model_json::{Allreduce, Placement};
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, ValueEnum};
use std::path::PathBuf;

/// Most workers of a rank.
pub const MAX_WORKERS: u32 = 4096;

/// Which kind of machine runs the tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendChoice {
    /// CUDA where there is a GPU, otherwise the CPU.
    Auto,
    /// One persistent kernel per GPU.
    Cuda,
    /// Threads.
    Cpu,
}

/// Run a model as one persistent kernel per rank: `mpirun -n N mpk-run model.json`.
#[derive(Clone, Debug, Parser)]
#[command(name = "mpk-run", version, max_term_width = 110)]
pub struct Args {
    /// What to run (schema mpk-model/1).
    pub model: PathBuf,
    /// A prompt; replaces those of model.json. May be given several times.
    #[arg(long, value_name = "TEXT")]
    pub prompt: Vec<String>,
    /// A prompt as token ids, separated by commas. May be given several times.
    #[arg(long, value_name = "IDS")]
    pub prompt_tokens: Vec<String>,
    /// All of these in the order of the command line; filled by [`Args::from_command_line`].
    #[arg(skip)]
    pub prompts: Vec<GivenPrompt>,
    /// Most new tokens of a request.
    #[arg(long, value_name = "K")]
    pub max_new_tokens: Option<u32>,
    /// Go on after an end-of-sequence token.
    #[arg(long)]
    pub ignore_eos: bool,
    /// Where to run.
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    pub backend: BackendChoice,
    /// How tasks get to workers.
    #[arg(long, value_enum)]
    pub placement: Option<Placement>,
    /// How an allreduce is lowered.
    #[arg(long, value_enum)]
    pub allreduce: Option<Allreduce>,
    /// Report the K best log-probabilities of each new token (at most 128).
    #[arg(long, value_name = "K", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=128))]
    pub logprobs: u32,
    /// Print one JSON object (schema mpk-run/1) instead of text.
    #[arg(long)]
    pub json: bool,
    /// Write a timeline of all ranks (Chrome trace format) to FILE.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Workers of each rank; by default its share of the node's cores.
    #[arg(long, value_name = "W", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_WORKERS)))]
    pub workers: Option<u32>,
    /// End the run when a wait sees no progress for this long.
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0)]
    pub deadline: f64,
    /// Without MPI: build the graphs of this many ranks (with --check, --emit-graph, --compile-only).
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65535))]
    pub ranks: Option<u32>,
    /// Without a GPU: build for this device of the hardware table (a100, h100, h200, b200).
    #[arg(long, value_name = "NAME")]
    pub device: Option<String>,
    /// Write every rank's task graphs to DIR, run nothing.
    #[arg(long, value_name = "DIR")]
    pub emit_graph: Option<PathBuf>,
    /// Build and verify all ranks' graphs, print what they hold, run nothing.
    #[arg(long)]
    pub check: bool,
    /// Compile the GPU code of all ranks' graphs into the cache, run nothing.
    #[arg(long)]
    pub compile_only: bool,
    /// Log from every rank, not only from rank 0.
    #[arg(long)]
    pub log_all_ranks: bool,
    /// Debug: RANK:OP:MILLISECONDS delays worker 0 of RANK before each task of operator OP (an index or a name).
    #[arg(long, value_name = "RANK:OP:MS", hide = true)]
    pub debug_stall: Option<String>,
}

/// A prompt of the command line: its number among those of its kind, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GivenPrompt {
    /// In [`Args::prompt`].
    Text(usize),
    /// In [`Args::prompt_tokens`].
    Tokens(usize),
}

impl Args {
    /// Reads the command line.
    ///
    /// # Errors
    /// Wrong usage; or help or the version is asked for, which is printed in the same way.
    pub fn from_command_line() -> Result<Args, clap::Error> {
        Args::from_matches(&Args::command().try_get_matches()?)
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
        Ok(args)
    }

    /// True where nothing is run: graphs are built for `--ranks` ranks without MPI.
    pub fn builds_only(&self) -> bool {
        self.check || self.emit_graph.is_some() || self.compile_only
    }

    /// What the options contradict in each other, if anything.
    pub fn contradiction(&self) -> Option<String> {
        if !self.builds_only() {
            if self.ranks.is_some() {
                return Some(
                    "--ranks builds graphs without MPI and needs --check, --emit-graph or --compile-only; to run on N ranks use `mpirun -n N mpk-run ...`".into(),
                );
            }
            if self.device.is_some() {
                return Some("--device needs --check, --emit-graph or --compile-only".into());
            }
        }
        if !self.deadline.is_finite() || self.deadline <= 0.0 || self.deadline > 1e9 {
            return Some(format!("--deadline {} is not a positive number of seconds", self.deadline));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_of_both_kinds_keep_their_order() {
        let line =
            ["mpk-run", "m.json", "--prompt-tokens", "1", "--prompt", "a", "--json", "--prompt-tokens", "2"];
        let args = Args::from_matches(&Args::command().try_get_matches_from(line).unwrap()).unwrap();
        assert_eq!(args.prompts, [GivenPrompt::Tokens(0), GivenPrompt::Text(0), GivenPrompt::Tokens(1)]);
        assert_eq!(args.prompt_tokens, ["1", "2"]);
    }
}
