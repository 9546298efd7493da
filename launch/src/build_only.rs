//! `--check`, `--emit-graph` and `--compile-only`: graphs of all ranks without MPI and without a GPU.

use crate::app_error::AppError;
use crate::cli::Args;
use crate::families::{self, GraphOptions};
use crate::graphs::{RankGraphs, build_verified};
use crate::model_source::ModelSource;
use crate::session::{build_options, check_ranks, open, print_line};
use crate::user_graph;
use distributed::World;
use distributed::affinity::cores_of_rank;
use std::io::Write;
use std::path::Path;
use taskgraph::json::write_json;
use taskgraph::stats::stats;
use taskgraph::{Target, TaskGraph, target};

/// Builds and verifies what `args` name; prints or writes what they ask for.
pub fn run(args: &Args) -> Result<(), AppError> {
    if let Some(contradiction) = args.contradiction() {
        return Err(AppError::input(contradiction));
    }
    let (model, source) = open(args)?;
    let ranks = args.ranks.unwrap_or(1);
    let target = match &args.device {
        None => {
            let cores = cores_of_rank(&World::single()).own.len() as u32;
            Target::cpu(model.runtime.workers.unwrap_or((cores / ranks).max(1)))
        }
        Some(name) => {
            let device = target::device(name).ok_or_else(|| {
                let known: Vec<&str> = target::DEVICES.iter().map(|d| d.name).collect();
                AppError::input(format!(
                    "--device {name}: not in the hardware table; it has {}",
                    known.join(", ")
                ))
            })?;
            let mut target = Target::cuda(device);
            if let Some(workers) = model.runtime.workers {
                target.workers = workers;
            }
            target
        }
    };
    let (ops, main) = match &source {
        ModelSource::Model(source) => {
            check_ranks(source, ranks)?;
            let sizes = model.sizes(&source.config)?;
            let top_k = args.logprobs.min(source.config.vocab_size);
            let options = GraphOptions::new(&source.config, model.runtime.embedding, top_k, ranks, &target);
            (families::op_graphs(&source.config, &sizes, &options), families::main_graph_name(&sizes))
        }
        ModelSource::Graph { graph, .. } => {
            let parsed = user_graph::parse(&model, graph)?;
            let name = parsed.graph.name.clone();
            (vec![parsed.graph], name)
        }
    };
    if args.compile_only {
        return Err(AppError::environment(
            "--compile-only: this version has no CUDA backend, so there is nothing to compile",
        ));
    }
    let all = build_verified(&ops, &kernels_cu::registry::registry(), &build_options(&model, ranks, target))?;
    if let Some(folder) = &args.emit_graph {
        emit(folder, &all, &main)?;
    }
    if args.check {
        for graphs in &all {
            print_line(&format!("{}: verified\n{}", graphs[0].name, stats(graphs)))?;
        }
    }
    Ok(())
}

/// Writes all ranks' graphs; a file appears whole or not at all.
fn emit(folder: &Path, all: &[RankGraphs], main: &str) -> Result<(), AppError> {
    let failed =
        |path: &Path, e: std::io::Error| AppError::input(format!("cannot write {}: {e}", path.display()));
    std::fs::create_dir_all(folder).map_err(|e| failed(folder, e))?;
    for graph in all.iter().flatten() {
        let path = folder.join(file_name(graph, main));
        let mut part = path.clone().into_os_string();
        part.push(".part");
        let part = std::path::PathBuf::from(part);
        let write = || -> std::io::Result<()> {
            let mut file = std::io::BufWriter::new(std::fs::File::create(&part)?);
            write_json(graph, &mut file)?;
            file.flush()?;
            std::fs::rename(&part, &path)
        };
        write().map_err(|e| {
            // Nothing half-written stays; the first error is the one to tell.
            let _ = std::fs::remove_file(&part);
            failed(&path, e)
        })?;
    }
    Ok(())
}

fn file_name(graph: &TaskGraph, main: &str) -> String {
    if graph.name == main {
        format!("rank-{}.task_graph.json", graph.rank)
    } else {
        format!("rank-{}.{}.task_graph.json", graph.rank, graph.name)
    }
}
