//! Builds the task graphs of a run and proves them safe before anything is launched.

use crate::app_error::AppError;
use crate::model_json;
use crate::proofs::{Proofs, WORTHWHILE_TASKS};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;
use taskgraph::builder::{BuildOptions, Builder, build_rank};
use taskgraph::digest::digest;
use taskgraph::verify::verify_succession;
use taskgraph::{Allreduce, OpGraph, Placement, Registry, TaskGraph};

/// All ranks' graphs of one op graph.
pub type RankGraphs = Vec<TaskGraph>;

/// taskgraph's name of a placement.
pub fn placement(placement: model_json::Placement) -> Placement {
    match placement {
        model_json::Placement::Static => Placement::Static,
        model_json::Placement::Dynamic => Placement::Dynamic,
    }
}

/// taskgraph's name of a lowering.
pub fn allreduce(allreduce: model_json::Allreduce) -> Allreduce {
    match allreduce {
        model_json::Allreduce::Auto => Allreduce::Auto,
        model_json::Allreduce::CopyReduce => Allreduce::CopyReduce,
        model_json::Allreduce::OneShot => Allreduce::OneShot,
        model_json::Allreduce::TwoShot => Allreduce::TwoShot,
    }
}

/// The graphs of one rank.
pub fn build_one(
    ops: &[OpGraph],
    registry: &Registry,
    options: &BuildOptions,
    rank: u32,
) -> Result<Vec<TaskGraph>, AppError> {
    ops.iter().map(|op_graph| Ok(build_rank(op_graph, registry, options, rank)?)).collect()
}

/// The graphs of all ranks, verified each by itself and in succession. What was done otherwise than asked is logged,
/// once for all graphs. What `proofs` know is not verified again.
pub fn build_verified(
    ops: &[OpGraph],
    registry: &Registry,
    options: &BuildOptions,
    proofs: Option<&Proofs>,
) -> Result<Vec<RankGraphs>, AppError> {
    let mut notes = BTreeSet::new();
    let all = ops
        .iter()
        .map(|op_graph| {
            let builder = Builder::new(op_graph, registry, options)?;
            notes.extend(builder.notes().iter().cloned());
            Ok(builder.all()?)
        })
        .collect::<Result<Vec<RankGraphs>, AppError>>()?;
    log_notes(&notes);
    if !options.protected {
        tracing::warn!("--debug-unprotected: the graphs are not verified");
        return Ok(all);
    }
    let tasks: usize = all.iter().flatten().map(|graph| graph.tasks.len()).sum();
    let proofs = proofs.filter(|_| tasks >= WORTHWHILE_TASKS);
    let digests: Vec<u64> = match proofs {
        Some(_) => all.iter().flat_map(|graphs| digests(graphs)).collect(),
        None => Vec::new(),
    };
    if proofs.is_some_and(|proofs| proofs.has(&digests)) {
        tracing::info!("{tasks} tasks: verified in an earlier run");
        return Ok(all);
    }
    let begin = Instant::now();
    verify_succession(&all).map_err(|v| violations("task graphs", &v))?;
    if let Some(proofs) = proofs {
        tracing::info!("{tasks} tasks verified: {:.2} s", begin.elapsed().as_secs_f64());
        proofs.add(&digests);
    }
    Ok(all)
}

/// Logs notes of the form "operator: what", one line for each distinct "what".
fn log_notes(notes: &BTreeSet<String>) {
    let mut by_text: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for note in notes {
        let (op, text) = note.split_once(": ").unwrap_or(("", note));
        by_text.entry(text).or_default().push(op);
    }
    for (text, ops) in by_text {
        match &ops[..] {
            [op] => tracing::info!("{op}: {text}"),
            _ => tracing::info!("{} and {} more: {text}", ops[0], ops.len() - 1),
        }
    }
}

/// A message that lists what the verifier found.
pub fn violations(what: &str, violations: &[impl std::fmt::Display]) -> AppError {
    const SHOWN: usize = 10;
    let mut message = format!("{what}: the verifier found {} violations", violations.len());
    for violation in violations.iter().take(SHOWN) {
        message.push_str(&format!("\n  {violation}"));
    }
    if violations.len() > SHOWN {
        message.push_str(&format!("\n  ... and {} more", violations.len() - SHOWN));
    }
    AppError::input(message)
}

/// Digests of graphs, in order.
pub fn digests(graphs: &[TaskGraph]) -> Vec<u64> {
    graphs.iter().map(digest).collect()
}
