//! Checks and simulates graphs without MPI: verifies task graphs that `mpk-run --emit-graph` wrote, shows an op graph
//! after each pass, and simulates decoding on a described cluster.

use clap::{CommandFactory, Parser, Subcommand};
use launch::cli::console::{print_line, tell};
use launch::cli::devices;
use launch::cli::passes::{Wanted, passes};
use launch::cli::process_limits::Allocator;
use launch::cli::simulate::{self, SimulateArgs};
use launch::model::app_error::AppError;
use launch::model::files;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use taskgraph::TaskGraph;
use taskgraph::json::from_json;
use taskgraph::stats::stats;
use taskgraph::verify::verify_succession;

const EXAMPLES: &str = "\
Examples:
  mpk-run model.json --ranks 4 --emit-graph graphs/ && mpk-graph check graphs/
  mpk-graph passes model.json --ranks 4 --device h200 --dump passes/
  mpk-graph schema model

Other commands:
  mpk-graph completions SHELL   Print completions for bash, elvish, fish, powershell or zsh
  mpk-graph man [COMMAND]       Print the manual page";

/// Verify, show and simulate graphs, without MPI.
#[derive(Parser)]
#[command(name = "mpk-graph", version, max_term_width = 110, after_help = EXAMPLES)]
struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Verify all task graphs of a folder, over all ranks and in succession, and print their statistics.
    Check {
        /// Folder with `rank-R.task_graph.json` files.
        folder: PathBuf,
    },
    /// Run the passes on a model's op graph and print its size after each pass.
    Passes {
        /// A model.json, a Hugging Face folder, or a hub name.
        model: PathBuf,
        /// Write the op graph after each pass to DIR, as NN-PASS.json and NN-PASS.dot (for Graphviz).
        #[arg(long, value_name = "DIR")]
        dump: Option<PathBuf>,
        /// Number of ranks.
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65535), allow_negative_numbers = true)]
        ranks: u32,
        #[arg(long, help = format!("Device to build for ({}). Default: the CPU target", devices::names()))]
        device: Option<String>,
        /// Number of workers of the CPU target. Default: runtime.workers of model.json, otherwise 1.
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65535), allow_negative_numbers = true)]
        workers: Option<u32>,
        /// Graph class, such as decode-1. Default: the decode graph of max_batch.
        #[arg(long)]
        graph: Option<String>,
    },
    /// Simulate decoding on a described cluster, with the verified task graphs that would run on it.
    Simulate(SimulateArgs),
    /// Print the JSON schema of a file format.
    Schema {
        /// File format.
        #[arg(value_enum)]
        format: Format,
    },
}

/// A file format.
#[derive(Clone, Copy, clap::ValueEnum)]
enum Format {
    /// model.json.
    Model,
    /// task_graph.json.
    TaskGraph,
    /// The `graph` field of a model.json.
    OpGraph,
    /// The cluster description for `simulate --cluster`.
    Cluster,
}

/// Prints a schema exactly as the repository's file has it.
fn print_schema(schema: &impl serde::Serialize) -> Result<(), AppError> {
    print_line(&serde_json::to_string_pretty(schema).map_err(|error| AppError::failed(error.to_string()))?)
}

fn check(folder: &Path) -> Result<(), AppError> {
    let failed = |path: &Path, e: &dyn std::fmt::Display| AppError::input(format!("{}: {e}", path.display()));
    let mut classes: BTreeMap<String, Vec<TaskGraph>> = BTreeMap::new();
    let entries = std::fs::read_dir(folder).map_err(|e| {
        failed(
            folder,
            &format!("{e}; name a folder that `mpk-run MODEL --ranks N --emit-graph DIR` has written"),
        )
    })?;
    for entry in entries {
        let path = entry.map_err(|e| failed(folder, &e))?.path();
        if !path.to_string_lossy().ends_with(".task_graph.json") {
            continue;
        }
        let file = files::open(&path)?;
        let graph = from_json(std::io::BufReader::new(file)).map_err(|e| failed(&path, &e))?;
        classes.entry(graph.name.clone()).or_default().push(graph);
    }
    if classes.is_empty() {
        return Err(failed(
            folder,
            &"no *.task_graph.json files in this folder; `mpk-run MODEL --ranks N --emit-graph DIR` writes them",
        ));
    }
    for (name, graphs) in &classes {
        let files = |rank| graphs.iter().filter(|graph| graph.rank == rank).count();
        if let Some(rank) = (0..graphs[0].world).find(|&rank| files(rank) != 1) {
            let found = if files(rank) == 0 { "no file" } else { "several files" };
            return Err(failed(
                folder,
                &format!("graph '{name}' has {found} of rank {rank}; emit the graphs again"),
            ));
        }
    }
    let mut all: Vec<Vec<TaskGraph>> = classes.into_values().collect();
    all.iter_mut().for_each(|graphs| graphs.sort_by_key(|g| g.rank));
    verify_succession(&all).map_err(|v| launch::engine::graphs::violations("task graphs", &v))?;
    for graphs in &all {
        print_line(&format!("{}: verified\n{}", graphs[0].name, stats(graphs)))?;
    }
    Ok(())
}

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn main() {
    ALLOCATOR.install();
    files::report_size_limits();
    if let Some(status) = launch::cli::generated::serve(Args::command) {
        std::process::exit(status);
    }
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => std::process::exit(launch::cli::program::tell_usage(&error)),
    };
    let result = match args.what {
        What::Check { folder } => check(&folder),
        What::Passes { model, dump, ranks, device, workers, graph } => {
            let wanted = Wanted { model, dump, ranks, device, workers, graph };
            passes(&wanted).and_then(|lines| lines.iter().try_for_each(|line| print_line(line)))
        }
        What::Simulate(args) => simulate::run(&args).and_then(|text| print_line(&text)),
        What::Schema { format: Format::Cluster } => print_schema(&::simulate::Cluster::json_schema()),
        What::Schema { format: Format::Model } => {
            print_line(include_str!("../../schema/model.schema.json").trim_end())
        }
        What::Schema { format: Format::TaskGraph } => print_schema(&taskgraph::json::task_graph_schema()),
        What::Schema { format: Format::OpGraph } => print_schema(&taskgraph::json::op_graph_schema()),
    };
    if let Err(error) = result {
        tell(format_args!("mpk-graph: error: {error}"));
        std::process::exit(error.status);
    }
}
