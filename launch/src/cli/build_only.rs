//! `--check`, `--emit-graph` and `--compile-only`: the graphs of all ranks, without MPI and without a GPU.

use crate::cli::args::Args;
use crate::cli::console::print_line;
use crate::cli::devices;
use crate::engine::cubin::compile_all;
use crate::engine::graphs::{
    ModelGraphs, RankGraphs, build_options, build_verified, check_classes, target_of,
};
use crate::engine::tuning::{self, Place};
use crate::engine::user_graph::{Prepared, Wanted};
use crate::model::app_error::AppError;
use crate::model::files;
use crate::model::model_source::ModelSource;
use distributed::World;
use distributed::cuda::{Found, Gpu, check_limits, driver};
use distributed::launcher::launched_ranks;
use distributed::nodes::Nodes;
use std::path::Path;
use taskgraph::json::write_json;
use taskgraph::stats::{Stats, class_stats, stats};
use taskgraph::target::Device;
use taskgraph::words::counted;
use taskgraph::{TaskGraph, target};

/// Builds and verifies the graphs that `args` name, then prints or writes what `args` ask for.
pub fn run(args: &Args) -> Result<(), AppError> {
    let mut model = args.model_spec().open()?;
    let source = ModelSource::open(&model)?;
    let ranks = args.ranks.or_else(launched_ranks).unwrap_or(1);
    let row = device_row(args)?;
    let cores = World::single().cores().own.len() as u32;
    let mut target = target_of(&model, row.as_ref(), (cores / ranks).max(1))?;
    let config = args.run_config();
    match &source {
        ModelSource::Model(source) => {
            let place = Place::new(&source.config, row.as_ref().map(|row| row.name), target.workers, ranks);
            tuning::use_values(tuning::resolve(&config, &place, target.backend)?, &mut model, &mut target);
        }
        ModelSource::Graph { .. } => target.tuning = tuning::of_user_graph(&config, target.backend)?,
    }
    let tuned = target.tuning.clone();
    let mut options = build_options(&config, &model, &Nodes::one(ranks, "localhost"), true, target.clone())?;
    let (ops, main) = match &source {
        ModelSource::Model(source) => {
            let top_k = args.logprobs.min(source.config.vocab_size);
            let sampling = !args.sampling.in_force(&model, source)?.sampling.is_greedy();
            let made = ModelGraphs::with(&model, source, ranks, &target, top_k, sampling)?;
            (made.graphs, made.main)
        }
        ModelSource::Graph { graph, weights } => {
            args.check_for_user_graph()?;
            let random = weights.as_ref();
            let prepared = Prepared::new(&model, graph, random, 0, &options.decode, Wanted::ToBuild)?;
            let name = prepared.graph.name.clone();
            options.places = Some(prepared.places);
            (vec![prepared.graph], name)
        }
    };
    let registry = kernels_cu::registry::registry();
    if args.check && args.emit_graph.is_none() && !args.compile_only {
        let classes = check_classes(&ops, &registry, &options, |class| {
            let limits = if row.is_some() { check_limits(class.graphs()) } else { Ok(()) };
            (limits, class.graphs()[0].name.clone(), class_stats(class))
        })?;
        let mut told = Vec::with_capacity(classes.len());
        for (limits, graph, stats) in classes {
            limits?;
            told.push((graph, stats));
        }
        return told.iter().try_for_each(|(graph, stats)| verdict(args, graph, stats));
    }
    let all = build_verified(&ops, &registry, &options)?;
    if row.is_some() {
        all.iter().try_for_each(|graphs| check_limits(graphs))?;
    }
    if let Some(folder) = &args.emit_graph {
        emit(folder, &all, &main)?;
    }
    if let (true, Some(row)) = (args.compile_only, &row) {
        let compiled = compile_all(row, args.runtime.transport.into(), args.trace.is_some(), &tuned, &all)?;
        print_line(&format!(
            "{}: {} for {}, {}, {:.2} s ({})",
            compiled.cubin.path.display(),
            counted(compiled.variants, "kernel variant"),
            counted(ranks, "rank"),
            row.architecture,
            compiled.cubin.took.as_secs_f64(),
            if compiled.cubin.from_cache { "it was cached" } else { "compiled" }
        ))?;
    }
    if args.check {
        for graphs in &all {
            verdict(args, &graphs[0].name, &stats(graphs))?;
        }
    }
    Ok(())
}

fn verdict(args: &Args, graph: &str, stats: &Stats) -> Result<(), AppError> {
    let verdict = if args.runtime.unprotected() { "not verified" } else { "verified" };
    print_line(&format!("{graph}: {verdict}\n{stats}"))
}

/// The device that graphs are built for: `--device`, or for `--compile-only` this machine's GPU, otherwise an H200.
/// Without either option, `None`: the CPU target.
fn device_row(args: &Args) -> Result<Option<Device>, AppError> {
    if let Some(name) = &args.device {
        return devices::named("--device", name).map(|row| Some(*row));
    }
    if !args.compile_only {
        return Ok(None);
    }
    if let Ok(Found::Driver(driver)) = driver::find() {
        return Ok(Some(Gpu::open(driver, 0)?.row()?));
    }
    let row = target::device("h200").copied();
    tracing::info!("no GPU here: compiling for {}", row.as_ref().map_or("", |row| row.name));
    Ok(row)
}

/// Writes all ranks' graphs, or none.
fn emit(folder: &Path, all: &[RankGraphs], main: &str) -> Result<(), AppError> {
    let graphs: Vec<&TaskGraph> = all.iter().flatten().collect();
    files::write_folder(
        folder,
        &graphs,
        |graph| file_name(graph, main),
        |graph, out| write_json(graph, out),
    )?;
    let written: Vec<String> = all.iter().flatten().map(|graph| file_name(graph, main)).collect();
    let left = task_graphs(folder).into_iter().filter(|name| !written.contains(name)).collect::<Vec<_>>();
    if let Some(first) = left.first() {
        tracing::warn!(
            "{} also holds {} that this build did not write, such as {first}; `mpk-graph check` reads all of them",
            folder.display(),
            counted(left.len(), "task graph")
        );
    }
    Ok(())
}

/// The sorted names of all task graphs in a folder.
fn task_graphs(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> = names.filter(|name| name.ends_with(".task_graph.json")).collect();
    names.sort_unstable();
    names
}

fn file_name(graph: &TaskGraph, main: &str) -> String {
    if graph.name == main {
        format!("rank-{}.task_graph.json", graph.rank)
    } else {
        format!("rank-{}.{}.task_graph.json", graph.rank, graph.name)
    }
}
