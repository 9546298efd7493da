//! Builds the task graphs of a run and proves them safe before anything is launched.

use crate::engine::agreement::together;
use crate::engine::backend::cuda_target;
use crate::engine::config::RunConfig;
use crate::engine::error::Error;
use crate::engine::proofs::{Proofs, WORTHWHILE_TASKS};
use crate::engine::user_places::Places;
use crate::model::app_error::AppError;
use crate::model::families::{self, GraphOptions};
use crate::model::model_json::{self, ModelJson, Sizes};
use crate::model::model_source::Model;
use distributed::World;
use distributed::nodes::Nodes;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;
use taskgraph::builder::{BuildError, BuildOptions, Builder, Spares};
use taskgraph::digest::digest;
use taskgraph::target::Device;
use taskgraph::verify::{Class, Proven, may_follow, verify_succession};
use taskgraph::words::counted;
use taskgraph::{
    Allreduce, Backend, DType, OpGraph, Placement, Registry, Target, TaskGraph, TensorId, parallel,
};

/// All ranks' graphs of one op graph.
pub type RankGraphs = Vec<TaskGraph>;

/// Converts a placement to taskgraph's type.
pub fn placement(placement: model_json::Placement) -> Placement {
    match placement {
        model_json::Placement::Static => Placement::Static,
        model_json::Placement::Dynamic => Placement::Dynamic,
    }
}

/// Converts a lowering to taskgraph's type.
pub fn allreduce(allreduce: model_json::Allreduce) -> Allreduce {
    match allreduce {
        model_json::Allreduce::Auto => Allreduce::Auto,
        model_json::Allreduce::CopyReduce => Allreduce::CopyReduce,
        model_json::Allreduce::OneShot => Allreduce::OneShot,
        model_json::Allreduce::TwoShot => Allreduce::TwoShot,
        model_json::Allreduce::Hierarchical => Allreduce::Hierarchical,
    }
}

/// How the graphs of a run are built. They differ only in their placement, which is a property of each graph.
#[derive(Clone, Debug)]
pub struct GraphBuild {
    /// Options for graphs in which every row is sampled.
    pub decode: BuildOptions,
    /// Placement of graphs with rows for prompts.
    pub prefill: Placement,
    /// For a user graph: where its parts are in model.json.
    pub places: Option<Places>,
}

impl GraphBuild {
    /// Uses model.json's placements; `options.placement` is ignored.
    pub fn new(options: BuildOptions, placements: model_json::Placements) -> GraphBuild {
        let decode = BuildOptions { placement: placement(placements.decode), ..options };
        GraphBuild { decode, prefill: placement(placements.prefill), places: None }
    }

    /// The builder's error for people.
    fn error(&self, error: BuildError) -> AppError {
        match &self.places {
            Some(places) => places.error(error),
            None => error.into(),
        }
    }

    /// The options for one graph.
    fn of(&self, ops: &OpGraph) -> BuildOptions {
        let mut options = self.decode.clone();
        // Rows that are not sampled belong to prompts.
        if ops.capacity.rows > ops.capacity.samples {
            options.placement = self.prefill;
        }
        options
    }
}

/// How the graphs of a run are built. `nodes` says on which node each rank is; `runtime.nodes` may replace it. `reach`: all ranks
/// are on one node and reach each other's memory, as far as the machine decides that.
///
/// # Errors
/// `runtime.nodes` does not fit the number of ranks.
pub fn build_options(
    config: &RunConfig,
    model: &ModelJson,
    nodes: &Nodes,
    reach: bool,
    target: Target,
) -> Result<GraphBuild, AppError> {
    let ranks = nodes.of_ranks().len() as u32;
    let of_ranks = match &model.runtime.nodes {
        Some(given) => given_nodes(given, ranks)?,
        None => nodes.of_ranks().to_vec(),
    };
    let is_gpu = target.backend == Backend::Cuda;
    let by_hosts = is_gpu && config.transport.puts_through_host(ranks);
    let by_nvshmem = is_gpu && config.transport.puts_through_nvshmem(ranks, reach);
    let allreduce = match allreduce(model.runtime.allreduce) {
        // The hosts' transport sends whole rows in one frame; flagged words would arrive a few at a time.
        Allreduce::Auto if by_hosts => Allreduce::CopyReduce,
        lowering => lowering,
    };
    let options = BuildOptions {
        nodes: of_ranks,
        protected: !config.unprotected,
        within_reach: reach && !by_hosts && !by_nvshmem && nodes.count() == 1,
        allreduce,
        ..BuildOptions::new(ranks, target)
    };
    Ok(GraphBuild::new(options, model.runtime.placements()))
}

/// Reads `runtime.nodes`. Nodes are numbered in the order of their first ranks.
fn given_nodes(given: &[u32], ranks: u32) -> Result<Vec<u32>, AppError> {
    if given.len() != ranks as usize {
        return Err(AppError::input(format!(
            "runtime.nodes has {}, but the job has {}; give one node for each rank, such as [0, 0, 1, 1], or leave it out",
            counted(given.len(), "entry"),
            counted(ranks, "rank")
        )));
    }
    let mut seen: Vec<u32> = Vec::new();
    let count = |node: &u32| {
        let known = seen.iter().position(|other| other == node);
        known.unwrap_or_else(|| {
            seen.push(*node);
            seen.len() - 1
        }) as u32
    };
    Ok(given.iter().map(count).collect())
}

/// The number of ranks must divide the query heads.
pub fn check_ranks(model: &Model, ranks: u32) -> Result<(), AppError> {
    if !model.config.num_heads.is_multiple_of(ranks) {
        let possible: Vec<String> =
            families::possible_ranks(&model.config).iter().map(u32::to_string).collect();
        return Err(AppError::input(format!(
            "{ranks} ranks do not divide the model's {}; possible numbers of ranks: {}",
            counted(model.config.num_heads, "query head"),
            possible.join(", ")
        )));
    }
    Ok(())
}

/// The target without a job: a GPU of the hardware table, otherwise the CPU target with `runtime.workers` workers, or with
/// `workers` if model.json has none.
///
/// # Errors
/// Those of [`cuda_target`].
pub fn target_of(model: &ModelJson, row: Option<&Device>, workers: u32) -> Result<Target, AppError> {
    match row {
        None => Ok(Target::cpu(model.runtime.workers.unwrap_or(workers))),
        Some(row) => cuda_target(row, model),
    }
}

/// The op graphs of a model.
pub struct ModelGraphs {
    /// One for each graph class.
    pub graphs: Vec<OpGraph>,
    /// Name of the decode graph of max_batch.
    pub main: String,
    /// The sizes that they are made for.
    pub sizes: Sizes,
}

impl ModelGraphs {
    /// The op graphs of `source` for `ranks` ranks of `target`, greedy and without log-probabilities.
    ///
    /// # Errors
    /// The ranks do not divide the model, or its sizes overflow.
    pub fn new(
        model: &ModelJson,
        source: &Model,
        ranks: u32,
        target: &Target,
    ) -> Result<ModelGraphs, AppError> {
        ModelGraphs::with(model, source, ranks, target, 0, false)
    }

    /// [`ModelGraphs::new`] with `top_k` log-probabilities per token, and with or without sampling.
    ///
    /// # Errors
    /// Those of [`ModelGraphs::new`].
    pub fn with(
        model: &ModelJson,
        source: &Model,
        ranks: u32,
        target: &Target,
        top_k: u32,
        sampling: bool,
    ) -> Result<ModelGraphs, AppError> {
        check_ranks(source, ranks)?;
        let sizes = model.sizes_on(&source.config, target)?;
        let options =
            GraphOptions::new(&source.config, &model.runtime, top_k, ranks, target).with_sampling(sampling);
        let graphs = families::op_graphs(&source.config, &sizes, &options);
        Ok(ModelGraphs { graphs, main: families::main_graph_name(&sizes), sizes })
    }
}

/// What the log says about a run's graphs.
#[derive(Default)]
struct Remarks {
    /// Deviations from the options, each of the form "operator: what".
    notes: BTreeSet<String>,
    /// The element types in which ranks send the summands of allreduces, each with its graphs.
    summands: Vec<(DType, Vec<String>)>,
}

/// The element type of the summands of a graph's allreduces. Those of the embedding are always f32, so the shortest type counts.
fn summands(graph: &OpGraph) -> Option<DType> {
    let reduced = graph.ops.iter().filter(|op| op.op_type == "allreduce");
    let types = reduced.filter_map(|op| Some(graph.tensor(TensorId(*op.inputs.first()?)).dtype));
    types.min_by_key(|dtype| dtype.size())
}

impl Remarks {
    fn add(&mut self, graph: &str, notes: Vec<String>, summands: Option<DType>) {
        self.notes.extend(notes);
        let Some(dtype) = summands else { return };
        match self.summands.iter_mut().find(|(other, _)| *other == dtype) {
            Some((_, graphs)) => graphs.push(graph.to_string()),
            None => self.summands.push((dtype, vec![graph.to_string()])),
        }
    }

    /// Logs notes with one line for each distinct "what", and the types of summands in one line.
    fn log(&self) {
        let mut by_text: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for note in &self.notes {
            let (op, text) = note.split_once(": ").unwrap_or(("", note));
            by_text.entry(text).or_default().push(op);
        }
        for (text, ops) in by_text {
            match &ops[..] {
                [op] => tracing::info!("{op}: {text}"),
                _ => tracing::info!("{} and {} more: {text}", ops[0], ops.len() - 1),
            }
        }
        let summands: Vec<String> =
            self.summands.iter().map(|(dtype, graphs)| format!("{dtype} in {}", graphs.join(", "))).collect();
        if !summands.is_empty() {
            tracing::info!("summands of allreduces: {}", summands.join("; "));
        }
    }
}

/// The graphs that `make` builds from every op graph.
fn build<T: Send>(
    ops: &[OpGraph],
    registry: &Registry,
    options: &GraphBuild,
    make: impl Fn(&Builder) -> Result<T, BuildError> + Sync,
) -> Result<(Vec<T>, Remarks), AppError> {
    build_then(ops, registry, options, make, |graphs| graphs)
}

/// The same with what `then` makes of the graphs, once their builder is dropped.
fn build_then<T, U: Send>(
    ops: &[OpGraph],
    registry: &Registry,
    options: &GraphBuild,
    make: impl Fn(&Builder) -> Result<T, BuildError> + Sync,
    then: impl Fn(T) -> U + Sync,
) -> Result<(Vec<U>, Remarks), AppError> {
    let rows = |number: usize| ops[number].capacity.rows as usize;
    let built = parallel::map_largest_first(ops.len(), rows, |number| {
        let builder = Builder::new(&ops[number], registry, &options.of(&ops[number]))?;
        let graphs = make(&builder)?;
        let sent = (options.decode.world > 1).then(|| summands(builder.op_graph())).flatten();
        let notes = builder.notes().to_vec();
        drop(builder);
        Ok::<_, BuildError>((then(graphs), notes, sent))
    });
    let mut remarks = Remarks::default();
    let mut all = Vec::with_capacity(ops.len());
    for (ops, built) in ops.iter().zip(built) {
        let (graphs, notes, sent) = built.map_err(|error| options.error(error))?;
        remarks.add(&ops.name, notes, sent);
        all.push(graphs);
    }
    Ok((all, remarks))
}

/// The graphs of one rank.
pub fn build_one(
    ops: &[OpGraph],
    registry: &Registry,
    options: &GraphBuild,
    rank: u32,
) -> Result<Vec<TaskGraph>, AppError> {
    Ok(build(ops, registry, options, |builder| builder.rank(rank))?.0)
}

/// Builds the graphs of all ranks, and verifies each graph and the successions of graphs. Deviations from the options are
/// logged once for all graphs.
pub fn build_verified(
    ops: &[OpGraph],
    registry: &Registry,
    options: &GraphBuild,
) -> Result<Vec<RankGraphs>, AppError> {
    let (all, remarks) = build(ops, registry, options, Builder::all)?;
    remarks.log();
    verify_all(&all, options)?;
    Ok(all)
}

/// Builds one class of graphs per op graph, and verifies each graph and the successions of graphs. Ranks that are alike are
/// built one at a time, compared with rank 0's graph, and dropped; a class is dropped when `look` has seen it and it is proven.
/// Deviations from the options are logged once for all graphs. Returns the results of `look`.
pub fn check_classes<T: Send>(
    ops: &[OpGraph],
    registry: &Registry,
    options: &GraphBuild,
    look: impl Fn(&Class) -> T + Sync,
) -> Result<Vec<T>, AppError> {
    let spares = Spares::default();
    let make = |builder: &Builder| builder.class(&spares);
    let (checked, remarks) = build_then(ops, registry, options, make, |class| {
        let seen = look(&class);
        (seen, options.decode.protected.then(|| proven(class, &spares)))
    })?;
    remarks.log();
    let (seen, proofs): (Vec<T>, Vec<_>) = checked.into_iter().unzip();
    verify_proven(proofs.into_iter().flatten().collect(), ops, registry, options)?;
    // Freeing hundreds of thousands of tasks one by one would take time, and the program ends soon.
    std::mem::forget(spares);
    Ok(seen)
}

/// A class that is proven by itself, or nothing if it is refused.
fn proven(class: Class, spares: &Spares) -> Option<Proven> {
    Proven::new(class, |graph| spares.put(graph)).ok()
}

/// Verifies the successions of graphs. What their summaries do not show is shown by all ranks' graphs, which are built again. An
/// error in one of several ranks that are alike concerns all of them, so it is reported for all, too.
fn verify_proven(
    proofs: Vec<Option<Proven>>,
    ops: &[OpGraph],
    registry: &Registry,
    options: &GraphBuild,
) -> Result<(), AppError> {
    if !options.decode.protected {
        return verify_all(&[], options);
    }
    let proofs: Option<Vec<Proven>> = proofs.into_iter().collect();
    match proofs {
        Some(proofs) if may_follow(&proofs) => Ok(()),
        _ => verify_all(&build(ops, registry, options, Builder::all)?.0, options),
    }
}

fn verify_all(all: &[RankGraphs], options: &GraphBuild) -> Result<(), AppError> {
    if !options.decode.protected {
        tracing::warn!("RunConfig::unprotected: the graphs are not verified");
        return Ok(());
    }
    verify_succession(all).map(drop).map_err(|v| violations("task graphs", &v))
}

/// Collective: each rank builds its own graphs. Where they were not proven before, rank 0 builds and verifies those of
/// all ranks, and the digests are compared. Returns this rank's graphs with their digests.
pub fn build_together(
    world: &World,
    ops: &[OpGraph],
    options: &GraphBuild,
) -> Result<(Vec<TaskGraph>, Vec<u64>), Error> {
    let registry = kernels_cu::registry::registry();
    let rank = world.rank();
    let (own, remarks) = together(world, build(ops, &registry, options, |builder| builder.rank(rank)))?;
    remarks.log();
    let digests = digests(&own);
    let found = world.gather(digests.iter().flat_map(|d| d.to_le_bytes()).collect());
    let found: Vec<u64> =
        found.iter().flat_map(|bytes| bytes.as_chunks().0.iter().map(|d| u64::from_le_bytes(*d))).collect();
    let proven = if rank == 0 { prove(ops, &registry, options, &own, &found) } else { Ok(()) };
    together(world, proven)?;
    Ok((own, digests))
}

/// Proves the graphs with the digests `found`, rank by rank. `own` are those of rank 0.
fn prove(
    ops: &[OpGraph],
    registry: &Registry,
    options: &GraphBuild,
    own: &[TaskGraph],
    found: &[u64],
) -> Result<(), AppError> {
    let tasks = own.iter().map(|graph| graph.tasks.len()).sum::<usize>() * options.decode.world as usize;
    let proofs = Proofs::from_environment().filter(|_| tasks >= WORTHWHILE_TASKS && options.decode.protected);
    if proofs.as_ref().is_some_and(|proofs| proofs.has(found)) {
        tracing::info!("{tasks} tasks of all ranks: already verified in an earlier run");
        return Ok(());
    }
    let begin = Instant::now();
    let spares = Spares::default();
    let make = |builder: &Builder| builder.class_seen(&spares, digest);
    let (built, _) = build_then(ops, registry, options, make, |(class, digests)| {
        (digests, options.decode.protected.then(|| proven(class, &spares)))
    })?;
    let (digests, proofs_of): (Vec<Vec<u64>>, Vec<_>) = built.into_iter().unzip();
    for rank in 0..options.decode.world as usize {
        for (number, (graph, digests)) in own.iter().zip(&digests).enumerate() {
            let (found, expected) = (found[rank * own.len() + number], digests[rank]);
            if found != expected {
                let graph = graph.name.clone();
                return Err(distributed::Error::Digest { rank: rank as u32, graph, found, expected }.into());
            }
        }
    }
    verify_proven(proofs_of.into_iter().flatten().collect(), ops, registry, options)?;
    if let Some(proofs) = proofs {
        tracing::info!("{tasks} tasks of all ranks verified: {:.2} s", begin.elapsed().as_secs_f64());
        proofs.add(found);
    }
    Ok(())
}

/// An error that lists the violations that the verifier found.
pub fn violations(what: &str, violations: &[impl std::fmt::Display]) -> AppError {
    const SHOWN: usize = 10;
    let mut message = format!("{what}: the verifier found {}", counted(violations.len(), "violation"));
    for violation in violations.iter().take(SHOWN) {
        message.push_str(&format!("\n  {violation}"));
    }
    if violations.len() > SHOWN {
        message.push_str(&format!("\n  ... and {} more", violations.len() - SHOWN));
    }
    AppError::input(message)
}

/// The digests of the graphs, in order.
pub fn digests(graphs: &[TaskGraph]) -> Vec<u64> {
    graphs.iter().map(digest).collect()
}

#[cfg(test)]
#[path = "graphs_test.rs"]
mod tests;
