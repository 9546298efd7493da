//! The options of `mpk-bench tune`.

use std::path::PathBuf;

/// What is measured.
#[derive(Clone, Debug, clap::Args)]
pub struct Case {
    /// A model.json, a Hugging Face folder, a hub name, or the name of a shape.
    #[arg(required_unless_present = "list", default_value = "")]
    pub model: PathBuf,
    /// Number of ranks. The measurements are jobs of --launcher, so this program runs without it.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65535))]
    pub tp: u32,
    /// Batch sizes whose decode steps are timed.
    #[arg(long, value_delimiter = ',', default_value = "1,8")]
    pub batch: Vec<u32>,
    /// Number of tokens of each request before the first step that counts.
    #[arg(long, default_value_t = 512)]
    pub context: u32,
    /// Lengths of prompts that are timed too.
    #[arg(long, value_delimiter = ',')]
    pub prompt: Vec<u32>,
    /// Number of decode steps in each repetition.
    #[arg(long, default_value_t = 64)]
    pub steps: u32,
    /// Number of repetitions of each measurement; the median counts.
    #[arg(long, default_value_t = 3)]
    pub repeats: u32,
    /// Names of knobs, or beginnings of names; by default all that the machine has.
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    pub only: Vec<String>,
    /// How much faster a candidate must be, percent of the time.
    #[arg(long, default_value_t = 1.0, value_name = "PERCENT")]
    pub gain: f64,
    /// Seconds for everything; then the best values so far are kept.
    #[arg(long, default_value_t = 3600, value_name = "SECONDS")]
    pub limit: u32,
    /// Seconds for one measurement, compiling included.
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    pub run_limit: u32,
    /// How several ranks are started.
    #[arg(long, default_value = "mpirun -n {N} --bind-to none")]
    pub launcher: String,
    /// Print what would be kept, and keep nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Print the knobs, their defaults and candidates, and measure nothing.
    #[arg(long)]
    pub list: bool,
    /// Options of every measurement, as `mpk-bench decode` has them, after `--`.
    #[arg(last = true)]
    pub options: Vec<String>,
}
