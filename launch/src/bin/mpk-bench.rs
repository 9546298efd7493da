//! Benchmarks: decode, prefill, the allreduce and tasks inside the running kernel, graph building, memory. Also prints
//! model.json files with real shapes for `mpk-run`.

use clap::{CommandFactory, Parser, Subcommand};
use launch::cli::bench::{
    allreduce, budget, decode, graphs, memory, online, prefill, program, stream, tasks, tune,
};
use launch::cli::choices::{Allreduce, Placement};
use launch::cli::console::{print_line, tell};
use launch::cli::devices;
use launch::cli::process_limits::Allocator;
use launch::engine::ModelSpec;
use launch::engine::graphs::{allreduce as lowering, placement};
use launch::model::app_error::AppError;
use launch::model::shapes;
use serde_json::json;
use std::path::PathBuf;
use taskgraph::Target;

const NOTES: &str = "\
Each command prints one JSON object per line. It prints figures only if the results are right: all ranks \
computed the same bits, and every repetition gave the same tokens or outputs, equal to the reference if there is \
one. Otherwise the exit status is 4. Only `online` prints figures of requests whose tokens differ, and says where.

Shapes (real models' sizes with random weights): qwen3-0.6b, qwen3-1.7b, qwen3-8b, qwen3-32b, llama3-70b

Examples:
  mpirun -n 2 mpk-bench decode --model qwen3-0.6b --context 512 --batch 8
  mpk-bench decode --model examples/tiny/model.json --context 64 --budget
  mpirun -n 4 mpk-bench allreduce --bytes 131072 --allreduce one-shot

Other commands:
  mpk-bench completions SHELL   Print completions for bash, elvish, fish, powershell or zsh
  mpk-bench man [COMMAND]       Print the manual page";

/// Benchmarks of whole models and of their parts.
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
        /// Name of a shape, a model.json, a Hugging Face folder, or a hub name. May be given several times. Default: all
        /// shapes.
        #[arg(long)]
        model: Vec<String>,
        /// Number of ranks.
        #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=65535))]
        ranks: u32,
        /// Batch size of the decode graph.
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
        batch: u32,
        #[arg(long, default_value = "h200", help = format!("Device to build graphs for ({}), or `cpu` for the CPU target with 2 workers", devices::names()))]
        device: String,
        /// How tasks are assigned to workers.
        #[arg(long, value_enum, default_value = "static")]
        placement: Placement,
        /// How an allreduce is carried out.
        #[arg(long, value_enum, default_value = "auto")]
        allreduce: Allreduce,
        /// Number of repetitions. The fastest one is reported.
        #[arg(long, default_value_t = 3)]
        repeats: u32,
    },
    /// Memory read rate, the best of several patterns. It sets the floor of decode on the CPU.
    Memory {
        /// Number of threads.
        #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=4096))]
        threads: u32,
        /// Size of the buffer in MiB. It should be many times larger than the caches.
        #[arg(long, default_value_t = 1200, value_parser = clap::value_parser!(u32).range(1..))]
        mebibytes: u32,
    },
    /// Milliseconds per decode step at a context length: `mpirun -n N mpk-bench decode --model qwen3-8b --batch 8`.
    ///
    /// Every request holds CONTEXT tokens before the first step that counts. All requests decode together in STEPS
    /// steps, and only these steps count.
    Decode(Box<decode::Case>),
    /// Milliseconds per decode step of a full batch whose requests arrive while the kernel runs, against the same requests
    /// as a fixed batch: `mpk-bench online --model qwen3-8b --batch 8`.
    ///
    /// In `fixed` all requests begin together. In `arriving` each arrives after the one before. In `changing` other
    /// requests hold the slots before and after these. The tokens must be the same.
    Online(Box<online::Case>),
    /// Where the time of a decode step goes: milliseconds of the step without products, without waits or without
    /// allreduces, and of a plain read of as many bytes: `mpk-bench stream --model qwen3-8b --context 512`.
    Stream(Box<stream::Case>),
    /// Milliseconds from prompts to first new tokens: `mpirun -n N mpk-bench prefill --model qwen3-8b --prompt 2048`.
    Prefill(Box<prefill::Case>),
    /// Microseconds per allreduce inside the running kernel, from the last task that writes a partial sum to the first
    /// task that reads the sum: `mpirun -n N mpk-bench allreduce --bytes 8192`.
    Allreduce(Box<allreduce::Case>),
    /// Microseconds per task that does almost no work: in a chain of dependent tasks, and from one task to many and back
    /// to one.
    Tasks(Box<tasks::Case>),
    /// Find the fastest tuning values for a model on this machine, and save them for later runs: `mpk-bench tune qwen3-8b
    /// --tp 2`.
    Tune(Box<tune::Case>),
    /// Where the time of an iteration goes, from a timeline that `mpk-run --trace` wrote.
    Budget {
        /// Timeline. For decoding, it must hold at least two consecutive decode iterations.
        trace: PathBuf,
        /// Report iterations with prompt tokens instead of decode iterations.
        #[arg(long)]
        prefill: bool,
    },
    /// Print a model.json with the shape of a real model and random weights.
    Model {
        /// Name of the shape, such as qwen3-8b.
        name: String,
        /// Maximum number of requests that run at once.
        #[arg(long, default_value_t = 1)]
        max_batch: u32,
        /// Maximum number of tokens of a request, prompt and answer together.
        #[arg(long, default_value_t = 1024)]
        max_seq_len: u32,
        /// Maximum number of prompt tokens in one prefill iteration. Default: none is written, so a run takes the default
        /// of its device.
        #[arg(long)]
        prefill_chunk: Option<u32>,
    },
}

fn run(args: Args) -> Result<(), AppError> {
    match args.what {
        What::Graphs { model, ranks, batch, device, placement: p, allreduce: a, repeats } => {
            let target = match device.as_str() {
                "cpu" => Target::cpu(2),
                name => Target::cuda(
                    devices::named("--device", name)
                        .map_err(|error| error.with_help("`cpu` is the CPU target"))?,
                ),
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
            let object = memory::figures(threads as usize, (mebibytes as usize) << 20, 5)?;
            print_line(&object.to_string())
        }
        What::Decode(case) => launch::cli::program::exit(decode::run(&case)),
        What::Online(case) => launch::cli::program::exit(online::run(&case)),
        What::Stream(case) => launch::cli::program::exit(stream::run(&case)),
        What::Prefill(case) => launch::cli::program::exit(prefill::run(&case)),
        What::Allreduce(case) => launch::cli::program::exit(allreduce::run(&case)),
        What::Tasks(case) => launch::cli::program::exit(tasks::run(&case)),
        What::Tune(case) => launch::cli::program::exit(tune::run(&case)),
        What::Budget { trace, prefill } => {
            let phase = if prefill { budget::Phase::Prefill } else { budget::Phase::Decode };
            let budget = budget::of_file(&trace, phase)?;
            tell(budget.table().trim_end());
            print_line(&json!(budget).to_string())
        }
        What::Model { name, max_batch, max_seq_len, prefill_chunk } => {
            let model = program::shape_model(&name, max_batch, max_seq_len, prefill_chunk)?;
            // A model.json that mpk-run would refuse is not printed.
            ModelSpec::json(&model.to_string())?.open()?;
            print_line(&serde_json::to_string_pretty(&model).unwrap_or_default())
        }
    }
}

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn main() {
    ALLOCATOR.install();
    // SAFETY: the first thread is still the only one.
    unsafe { distributed::affinity::yield_in_mpi() };
    launch::model::files::report_size_limits();
    if let Some(status) = launch::cli::generated::serve(Args::command) {
        std::process::exit(status);
    }
    launch::cli::program::handle_signals();
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => std::process::exit(launch::cli::program::tell_usage(&error)),
    };
    launch::cli::logging::init(false);
    if let Err(error) = run(args) {
        tell(format_args!("mpk-bench: error: {error}"));
        std::process::exit(error.status);
    }
}
