//! `mpk-graph simulate`: the time per token on a described cluster, from the graphs that would run on it.

use crate::cli::bench::budget::{self, Budget};
use crate::cli::choices;
use crate::cli::devices;
use crate::cli::passes::pick;
use crate::engine::backend::cuda_target;
use crate::engine::config::RunConfig;
use crate::engine::graphs::{ModelGraphs, build_options, build_verified};
use crate::engine::user_places::Places;
use crate::engine::{ModelSpec, user_graph};
use crate::model::app_error::AppError;
use crate::model::files;
use crate::model::model_json::ModelJson;
use crate::model::model_source::ModelSource;
use clap::Args;
use distributed::nodes::Nodes;
use serde::Serialize;
use simulate::{Cluster, Load, SimulateError, check_network, simulate, timeline};
use std::path::{Path, PathBuf};
use taskgraph::words::counted;
use taskgraph::{OpGraph, Target, TaskGraph};

/// What to simulate.
#[derive(Args, Clone, Debug)]
pub struct SimulateArgs {
    /// A model.json, a Hugging Face folder, or a hub name.
    model: PathBuf,
    /// Description of the cluster in JSON; `mpk-graph schema cluster` prints its schema.
    #[arg(long, value_name = "FILE")]
    cluster: PathBuf,
    /// Number of ranks.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096), allow_negative_numbers = true)]
    ranks: u32,
    /// Graph class, such as decode-1. Default: the decode graph of max_batch.
    #[arg(long)]
    graph: Option<String>,
    /// Number of active requests. Default: as many as the graph has room for.
    #[arg(long, allow_negative_numbers = true)]
    batch: Option<u32>,
    /// Number of tokens in each request's KV cache.
    #[arg(long, default_value_t = 512, allow_negative_numbers = true)]
    context: u32,
    /// How tasks are assigned to workers. Default: as in model.json.
    #[arg(long, value_enum)]
    placement: Option<choices::Placement>,
    /// How an allreduce is carried out. Default: as in model.json.
    #[arg(long, value_enum)]
    allreduce: Option<choices::Allreduce>,
    /// Write the simulated timeline of all ranks to FILE, in the format of `mpk-run --trace`.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    schema: &'static str,
    model: String,
    cluster: String,
    graph: String,
    ranks: u32,
    nodes: u32,
    placement: taskgraph::Placement,
    allreduce: taskgraph::Allreduce,
    batch: u32,
    context: u32,
    ms_per_token: f64,
    iteration_us: f64,
    between_us: f64,
    /// Time to read the bytes of the rank that reads most, at the memory's rate.
    floor_ms: f64,
    bytes_read: u64,
    tasks: usize,
    budget: Budget,
}

fn read_cluster(path: &Path) -> Result<Cluster, AppError> {
    let bytes = files::read(path)?;
    let failed = |e: &dyn std::fmt::Display| AppError::input(format!("{}: {e}", path.display()));
    let text = std::str::from_utf8(&bytes).map_err(|e| failed(&e))?;
    Cluster::parse(text).map_err(|e| failed(&e))
}

fn target_of(cluster: &Cluster, model: &ModelJson) -> Result<Target, AppError> {
    match &cluster.device {
        None => Ok(Target::cpu(cluster.workers.unwrap_or(1))),
        Some(name) => cuda_target(devices::named(&format!("cluster `{}`", cluster.name), name)?, model),
    }
}

/// The graph. If it is the user's, also where its parts are in model.json.
fn op_graph(
    args: &SimulateArgs,
    model: &ModelJson,
    target: &Target,
) -> Result<(OpGraph, Option<Places>), AppError> {
    let (graphs, main, places) = match ModelSource::open(model)? {
        ModelSource::Model(source) => {
            let made = ModelGraphs::new(model, &source, args.ranks, target)?;
            if args.context > made.sizes.max_seq_len {
                return Err(AppError::input(format!(
                    "--context {}: more than the model's max_seq_len, {}",
                    args.context, made.sizes.max_seq_len
                )));
            }
            (made.graphs, made.main, None)
        }
        ModelSource::Graph { graph, .. } => {
            let graph = user_graph::parse(model, &graph)?.graph;
            let (name, places) = (graph.name.clone(), Places::new(model, &graph));
            (vec![graph], name, Some(places))
        }
    };
    Ok((pick(graphs, args.graph.as_ref().unwrap_or(&main))?, places))
}

/// The ranks' verified graphs.
fn graphs_of(
    args: &SimulateArgs,
    model: &ModelJson,
    cluster: &Cluster,
    (op_graph, places): (OpGraph, Option<Places>),
    target: Target,
) -> Result<(Vec<TaskGraph>, taskgraph::Allreduce), AppError> {
    let run = RunConfig::default();
    let mut build = build_options(&run, model, &Nodes::one(args.ranks, "simulated"), true, target)?;
    // The cluster description assigns ranks to nodes.
    build.decode.nodes = cluster.nodes(args.ranks);
    build.places = places;
    let all = build_verified(&[op_graph], &kernels_cu::registry::registry(), &build)?;
    let graphs = all.into_iter().next().unwrap_or_default();
    Ok((graphs, build.decode.allreduce))
}

/// Simulates and prints.
///
/// # Errors
/// The model, the cluster description or a file is invalid.
pub fn run(args: &SimulateArgs) -> Result<String, AppError> {
    let cluster = read_cluster(&args.cluster)?;
    let mut model = ModelSpec::path(&args.model).open()?;
    if let Some(placement) = args.placement {
        model.runtime.placement = Some(crate::model::model_json::Placement::from(placement).into());
    }
    if let Some(allreduce) = args.allreduce {
        model.runtime.allreduce = allreduce.into();
    }
    let target = target_of(&cluster, &model)?;
    let (op_graph, places) = op_graph(args, &model, &target)?;
    let active = op_graph.capacity.active;
    let batch = args.batch.unwrap_or(active);
    if batch == 0 || batch > active {
        return Err(AppError::input(format!(
            "--batch {batch}: graph {} has room for 1 to {active} requests",
            op_graph.name
        )));
    }
    let failed = |e: SimulateError| match e {
        SimulateError::NoNetwork { .. } => AppError::input(format!("{}: {e}", args.cluster.display())),
        SimulateError::Stuck { .. } => AppError::failed(e.to_string()),
    };
    check_network(&cluster, args.ranks).map_err(failed)?;
    let (graphs, allreduce) = graphs_of(args, &model, &cluster, (op_graph, places), target)?;
    let load = Load { active: batch, context: args.context };
    let registry = kernels_cu::registry::registry();
    let outcome = simulate(&graphs, &registry, &cluster, load).map_err(failed)?;
    if let Some(path) = &args.trace {
        files::write(path, |out| timeline::write(&outcome, &graphs, graphs.len(), out))
            .map_err(|e| files::failed(path.display(), &e))?;
    }
    let mut text = Vec::new();
    timeline::write(&outcome, &graphs, 1, &mut text).map_err(|e| AppError::failed(e.to_string()))?;
    let budget =
        budget::of_text(&text).map_err(|problem| AppError::failed(format!("timeline: {problem}")))?;
    let bytes_read = outcome.bytes_read.iter().copied().max().unwrap_or(0);
    let sharers = match cluster.memory.shared_by {
        simulate::cluster::SharedBy::Rank => 1,
        simulate::cluster::SharedBy::Node => args.ranks.min(cluster.ranks_per_node),
    };
    let report = Report {
        schema: "mpk-simulate/1",
        model: model.shown_name().unwrap_or_else(|| graphs[0].name.clone()),
        cluster: cluster.name.clone(),
        graph: graphs[0].name.clone(),
        ranks: args.ranks,
        nodes: args.ranks.div_ceil(cluster.ranks_per_node),
        placement: graphs[0].placement,
        allreduce,
        batch,
        context: args.context,
        ms_per_token: outcome.ms_per_token(),
        iteration_us: outcome.iteration as f64 / 1e6,
        between_us: outcome.between as f64 / 1e6,
        floor_ms: bytes_read as f64 * f64::from(sharers) / cluster.memory.gb_per_s / 1e6,
        bytes_read,
        tasks: graphs.iter().map(|g| g.tasks.len()).sum(),
        budget,
    };
    if args.json {
        return serde_json::to_string(&report).map_err(|e| AppError::failed(e.to_string()));
    }
    Ok(format!(
        "{} on {}, {} on {}, batch {}, context {}: {:.3} ms per token (simulated; reading memory alone takes {:.3})\n{}",
        report.model,
        report.cluster,
        counted(report.ranks, "rank"),
        counted(report.nodes, "node"),
        report.batch,
        report.context,
        report.ms_per_token,
        report.floor_ms,
        report.budget.table().trim_end()
    ))
}
