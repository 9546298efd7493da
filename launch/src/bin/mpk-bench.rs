//! Benchmarks: decode, prefill, the allreduce and tasks inside the running kernel, graph building, memory; and model.json files of real
//! shapes for `mpk-run`.

use clap::{CommandFactory, Parser, Subcommand};
use launch::cli::bench::{allreduce, budget, decode, graphs, memory, prefill, program, tasks};
use launch::cli::choices::{Allreduce, Placement};
use launch::cli::console::{print_line, tell};
use launch::cli::process_limits::Allocator;
use launch::engine::graphs::{allreduce as lowering, placement};
use launch::model::app_error::AppError;
use launch::model::shapes;
use serde_json::json;
use std::path::PathBuf;
use taskgraph::{Target, target};

const NOTES: &str = "\
Each prints one JSON object a line. Figures of a run are printed only if its results are right: all ranks computed the same bits, every
repetition the same tokens or outputs, and those of a reference where there is one. Otherwise the exit status is 4.

Examples:
  mpirun -n 2 mpk-bench decode --model qwen3-0.6b --context 512 --batch 8
  mpk-bench decode --model examples/tiny/model.json --context 64 --budget
  mpirun -n 4 mpk-bench allreduce --bytes 131072 --allreduce one-shot

Shell completions: mpk-bench completions bash|elvish|fish|powershell|zsh
Manual page: mpk-bench man, mpk-bench man decode";

/// Benchmarks: whole models, and the parts that their time is made of.
#[derive(Parser)]
#[command(name = "mpk-bench", version, max_term_width = 110, after_help = NOTES)]
struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Time to build and verify all ranks' graphs.
    Graphs {
        /// Shapes; all by default.
        #[arg(long)]
        model: Vec<String>,
        /// Ranks.
        #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=65535))]
        ranks: u32,
        /// Rows of the decode graph.
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
        batch: u32,
        /// Row of the hardware table; `cpu` for the CPU target with 2 workers.
        #[arg(long, default_value = "h200")]
        device: String,
        /// How tasks get to workers.
        #[arg(long, value_enum, default_value = "static")]
        placement: Placement,
        /// How an allreduce is lowered.
        #[arg(long, value_enum, default_value = "auto")]
        allreduce: Allreduce,
        /// The best of this many is reported.
        #[arg(long, default_value_t = 3)]
        repeats: u32,
    },
    /// Memory read rate on huge pages, the best of several patterns: the floor of decode on the CPU.
    Memory {
        /// Threads.
        #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=4096))]
        threads: u32,
        /// Buffer size, MiB.
        #[arg(long, default_value_t = 1200, value_parser = clap::value_parser!(u32).range(1..))]
        mebibytes: u32,
    },
    /// Milliseconds of a decode step at a context length: `mpirun -n N mpk-bench decode --model qwen3-8b --context 512 --batch 8`.
    ///
    /// Every request has a prompt of CONTEXT tokens and yields STEPS tokens after its first. Requests whose prompt is done first end
    /// first, so a few of the last steps have fewer rows than the batch.
    Decode(Box<decode::Case>),
    /// Milliseconds from prompts to their first new tokens: `mpirun -n N mpk-bench prefill --model qwen3-8b --prompt 2048`.
    Prefill(Box<prefill::Case>),
    /// Microseconds of an allreduce inside the running kernel, from the last value of a part to the first reader of the sum:
    /// `mpirun -n N mpk-bench allreduce --bytes 8192`.
    Allreduce(Box<allreduce::Case>),
    /// Microseconds of a task that does next to nothing: in a chain of dependent tasks, and from one task to many and back to one.
    Tasks(Box<tasks::Case>),
    /// Sums up a timeline that mpk-run wrote (`--trace`): where the microseconds of an iteration go.
    Budget {
        /// The timeline; of decoding, with two iterations in a row at least.
        trace: PathBuf,
        /// Iterations that hold prompt tokens instead of those that decode.
        #[arg(long)]
        prefill: bool,
    },
    /// Prints a model.json of a real shape with random weights.
    Model {
        /// Shape.
        name: String,
        /// Slots.
        #[arg(long, default_value_t = 1)]
        max_batch: u32,
        /// Prompt and new tokens of a request.
        #[arg(long, default_value_t = 1024)]
        max_seq_len: u32,
        /// Rows of a prefill iteration.
        #[arg(long, default_value_t = 512)]
        prefill_chunk: u32,
    },
}

fn run(args: Args) -> Result<(), AppError> {
    match args.what {
        What::Graphs { model, ranks, batch, device, placement: p, allreduce: a, repeats } => {
            let target = match target::device(&device) {
                Some(device) => Target::cuda(device),
                None if device == "cpu" => Target::cpu(2),
                None => return Err(AppError::input(format!("--device {device}: not in the hardware table"))),
            };
            let names: Vec<String> =
                if model.is_empty() { shapes::NAMES.map(String::from).to_vec() } else { model };
            for name in names {
                let timing = graphs::measure(
                    &name,
                    ranks,
                    batch,
                    &target,
                    placement(p.into()),
                    lowering(a.into()),
                    repeats,
                )?;
                print_line(&json!(timing).to_string())?;
            }
            Ok(())
        }
        What::Memory { threads, mebibytes } => {
            let rates = memory::read_rates(threads as usize, (mebibytes as usize) << 20, 5)?;
            let best = rates.first().map_or(0.0, |rate| rate.bytes_per_second);
            let object = json!({"threads": threads, "read_bytes_per_second": best, "patterns": rates});
            print_line(&object.to_string())
        }
        What::Decode(case) => launch::cli::program::exit(decode::run(&case)),
        What::Prefill(case) => launch::cli::program::exit(prefill::run(&case)),
        What::Allreduce(case) => launch::cli::program::exit(allreduce::run(&case)),
        What::Tasks(case) => launch::cli::program::exit(tasks::run(&case)),
        What::Budget { trace, prefill } => {
            let phase = if prefill { budget::Phase::Prefill } else { budget::Phase::Decode };
            let budget = budget::of_file(&trace, phase)?;
            tell(budget.table().trim_end());
            print_line(&json!(budget).to_string())
        }
        What::Model { name, max_batch, max_seq_len, prefill_chunk } => {
            let model = program::shape_model(&name, max_batch, max_seq_len, prefill_chunk)?;
            print_line(&serde_json::to_string_pretty(&model).unwrap_or_default())
        }
    }
}

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn main() {
    ALLOCATOR.install();
    launch::model::files::report_size_limits();
    if let Some(status) = launch::cli::generated::serve(Args::command) {
        std::process::exit(status);
    }
    launch::cli::logging::init(false);
    if let Err(error) = run(Args::parse()) {
        tell(format_args!("mpk-bench: error: {error}"));
        std::process::exit(error.status);
    }
}
