//! The options of `mpk-bench tune`.

use crate::cli::devices;
use std::path::{Path, PathBuf};

/// What to tune.
#[derive(Clone, Debug, clap::Args)]
pub struct Case {
    /// A model.json, a Hugging Face folder, a hub name, or the name of a shape such as qwen3-8b.
    #[arg(required_unless_present = "list")]
    pub model: Option<PathBuf>,
    /// Number of ranks. This command starts its measurements with --launcher, so run it without mpirun.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65535))]
    pub tp: u32,
    /// Batch sizes whose decode steps are timed, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "1,8")]
    pub batch: Vec<u32>,
    /// Number of tokens that each request holds before the first step that counts.
    #[arg(long, default_value_t = 512)]
    pub context: u32,
    /// Lengths of prompts whose prefill is timed too, separated by commas.
    #[arg(long, value_delimiter = ',')]
    pub prompt: Vec<u32>,
    /// Number of decode steps per repetition.
    #[arg(long, default_value_t = 64)]
    pub steps: u32,
    /// Number of repetitions of each measurement. The median counts.
    #[arg(long, default_value_t = 3)]
    pub repeats: u32,
    /// Knobs to tune: names or beginnings of names, separated by commas. Default: all knobs of this machine.
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    pub only: Vec<String>,
    /// How much faster a candidate must be to win, in percent.
    #[arg(long, default_value_t = 1.0, value_name = "PERCENT")]
    pub gain: f64,
    /// Time limit of the search. When it is over, the best values so far are saved.
    #[arg(long, default_value_t = 3600, value_name = "SECONDS")]
    pub limit: u32,
    /// Time limit of one measurement, including compilation.
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    pub run_limit: u32,
    /// Command that starts several ranks; {N} stands for their number.
    #[arg(long, default_value = "mpirun -n {N} --bind-to none")]
    pub launcher: String,
    /// Only compile the kernels of all candidates, so that a later run of the same command starts faster. Needs no GPU.
    #[arg(long)]
    pub compile_only: bool,
    /// Device for --compile-only.
    #[arg(long, value_name = "NAME", default_value = "h200", help = format!("Device for --compile-only; the hardware table has {}", devices::names()))]
    pub device: String,
    /// Print the values that would be saved, but do not save them.
    #[arg(long)]
    pub dry_run: bool,
    /// Print the knobs with their defaults and candidates, and exit.
    #[arg(long)]
    pub list: bool,
    /// Options for every measurement, after `--`: those of `mpk-bench decode`.
    #[arg(last = true)]
    pub options: Vec<String>,
}

impl Case {
    /// The model's name. Empty only with `--list`, which needs no model.
    pub fn model_name(&self) -> String {
        self.model.as_deref().unwrap_or(Path::new("")).display().to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        case: Case,
    }

    #[test]
    fn only_the_list_of_knobs_needs_no_model() {
        let parse = |words: &[&str]| Program::try_parse_from([&["tune"][..], words].concat());
        assert!(parse(&["--list"]).is_ok_and(|program| program.case.list));
        assert_eq!(
            parse(&["qwen3-8b"]).ok().map(|program| program.case.model_name()).as_deref(),
            Some("qwen3-8b")
        );
        let error = parse(&[]).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains("MODEL") && error.contains("not provided"), "{error}");
    }
}
