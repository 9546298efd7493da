//! Benchmarks: graph building, memory, and model.json files of real shapes for `mpk-run`.

use clap::{Parser, Subcommand};
use launch::cli::bench::{decode, graphs, memory};
use launch::cli::choices::{Allreduce, Placement};
use launch::cli::console::{print_line, tell};
use launch::cli::process_limits::Allocator;
use launch::cli::runtime_args::RuntimeArgs;
use launch::engine::graphs::{allreduce, placement};
use launch::model::app_error::AppError;
use launch::model::shapes;
use serde_json::json;
use std::path::PathBuf;
use taskgraph::{Target, target};

/// Benchmarks of mpk-run's parts. Each prints one JSON object a line.
#[derive(Parser)]
#[command(name = "mpk-bench", version)]
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
    /// Memory read rate on huge pages: the floor of decode on the CPU.
    Memory {
        /// Threads.
        #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=4096))]
        threads: u32,
        /// Buffer size, MiB.
        #[arg(long, default_value_t = 1200, value_parser = clap::value_parser!(u32).range(1..))]
        mebibytes: u32,
    },
    /// Times decode at a context length: `mpirun -n N mpk-bench decode --model model.json --context 512 --batch 8`.
    ///
    /// Every request has a prompt of CONTEXT tokens and yields STEPS tokens after its first. Requests whose prompt is
    /// done first end first, so a few of the last steps have fewer rows than the batch.
    Decode {
        /// A model.json, such as `mpk-bench model` prints, a Hugging Face folder or a hub name.
        #[arg(long)]
        model: PathBuf,
        /// Tokens before the first step.
        #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..1 << 24))]
        context: u32,
        /// Requests at a time.
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
        batch: u32,
        /// Steps.
        #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..1 << 24))]
        steps: u32,
        #[command(flatten)]
        runtime: Box<RuntimeArgs>,
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
                    allreduce(a.into()),
                    repeats,
                )?;
                print_line(&json!(timing).to_string())?;
            }
            Ok(())
        }
        What::Memory { threads, mebibytes } => {
            let rate = memory::read_rate(threads as usize, (mebibytes as usize) << 20, 5)?;
            print_line(&json!({"threads": threads, "read_bytes_per_second": rate}).to_string())
        }
        What::Decode { model, context, batch, steps, runtime } => {
            let case = decode::Case { model, context, batch, steps, runtime: *runtime };
            launch::cli::program::exit(decode::run(&case))
        }
        What::Model { name, max_batch, max_seq_len, prefill_chunk } => {
            let config = shapes::config(&name).ok_or_else(|| {
                AppError::input(format!("no shape {name}; there are {}", shapes::NAMES.join(", ")))
            })?;
            let model = json!({
                "schema": "mpk-model/1",
                "name": name,
                "config": config,
                "weights": {"random": {"seed": 1}},
                "max_batch": max_batch,
                "max_seq_len": max_seq_len,
                "runtime": {"prefill_chunk": prefill_chunk},
                "generate": {"prompt_tokens": [[1, 2, 3]], "max_new_tokens": 16, "ignore_eos": true}
            });
            print_line(&serde_json::to_string_pretty(&model).unwrap_or_default())
        }
    }
}

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn main() {
    ALLOCATOR.install();
    launch::model::files::report_size_limits();
    launch::cli::logging::init(false);
    if let Err(error) = run(Args::parse()) {
        tell(format_args!("mpk-bench: error: {error}"));
        std::process::exit(error.status);
    }
}
