//! Compiles the kernels of all candidates in parallel before any is timed. Compiled one after the other, they would take most of the
//! GPU's time.

use super::case::Case;
use super::child::Workload;
use crate::cli::bench::{decode, prefill};
use crate::engine::backend::cuda_target;
use crate::engine::cubin::compile_all;
use crate::engine::graphs::{ModelGraphs, build_one, build_options};
use crate::engine::tuning;
use crate::engine::{ModelSpec, RunConfig};
use crate::model::app_error::AppError;
use crate::model::model_source::ModelSource;
use clap::Parser;
use distributed::nodes::Nodes;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;
use taskgraph::target::Device;
use taskgraph::{Knob, TaskGraph, Tuning};

/// The command line of one measurement, parsed as its process will parse it.
#[derive(Parser)]
enum Run {
    Decode(Box<decode::Case>),
    Prefill(Box<prefill::Case>),
}

impl Run {
    fn parse(case: &Case, workload: Workload) -> Result<Run, AppError> {
        let words = ["mpk-bench".to_string()].into_iter().chain(workload.arguments(case));
        Run::try_parse_from(words.chain(case.options.iter().cloned()))
            .map_err(|error| AppError::input(error.to_string().trim_end().to_string()))
    }

    fn spec(&self) -> Result<(ModelSpec, RunConfig), AppError> {
        match self {
            Run::Decode(case) => Ok((case.spec()?, case.runtime.run_config())),
            Run::Prefill(case) => Ok((case.spec()?, case.runtime.run_config())),
        }
    }
}

/// The defaults, and the defaults with each candidate of each knob.
fn choices(knobs: &[&'static Knob]) -> Vec<Tuning> {
    let with = |knob: &Knob, value: u64| {
        let mut tuning = Tuning::default();
        tuning.set(knob.name, value);
        tuning
    };
    let one = knobs.iter().flat_map(|knob| {
        knob.candidates.iter().filter(|&&value| value != knob.default).map(|&value| with(knob, value))
    });
    std::iter::once(Tuning::default()).chain(one).collect()
}

/// Compiles the kernels that the candidates need on `row`, as many at once as there are cores, until the time is over. Returns how
/// many kernels are in the cache now, and the errors of the others. Their own measurements will report these errors too.
///
/// # Errors
/// The options of the measurements are invalid.
pub fn compile(
    case: &Case,
    workloads: &[Workload],
    row: &Device,
    knobs: &[&'static Knob],
    until: Instant,
) -> Result<(usize, Vec<String>), AppError> {
    let mut jobs = Vec::new();
    for &workload in workloads {
        let (spec, config) = Run::parse(case, workload)?.spec()?;
        jobs.extend(choices(knobs).into_iter().map(|tuning| (spec.clone(), config.clone(), tuning)));
    }
    let (next, found) = (AtomicUsize::new(0), Mutex::new((0, Vec::new())));
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(jobs.len());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((spec, config, tuning)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if Instant::now() >= until {
                        return;
                    }
                    let compiled = one(spec, config, tuning, row, case.tp);
                    let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
                    match compiled {
                        Ok(()) => found.0 += 1,
                        Err(error) => found.1.push(format!("{tuning}: {error}")),
                    }
                }
            });
        }
    });
    Ok(found.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// The kernel of one measurement.
fn one(
    spec: &ModelSpec,
    config: &RunConfig,
    tuning: &Tuning,
    row: &Device,
    ranks: u32,
) -> Result<(), AppError> {
    let mut model = spec.open()?;
    let ModelSource::Model(source) = ModelSource::open(&model)? else { return Ok(()) };
    let mut target = cuda_target(row, &model)?;
    tuning::use_values(tuning.clone(), &mut model, &mut target);
    let ops = ModelGraphs::new(&model, &source, ranks, &target)?.graphs;
    let build = build_options(config, &model, &Nodes::one(ranks, "localhost"), true, target)?;
    let registry = kernels_cu::registry::registry();
    let mut all: Vec<Vec<TaskGraph>> = ops.iter().map(|_| Vec::new()).collect();
    for rank in 0..ranks {
        let graphs = build_one(&ops, &registry, &build, rank)?;
        all.iter_mut().zip(graphs).for_each(|(of_all, graph)| of_all.push(graph));
    }
    compile_all(row, config.transport, false, tuning, &all).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::tuning::knobs;
    use taskgraph::Backend;

    #[test]
    fn every_candidate_that_is_no_default_is_a_choice_of_its_own() {
        let knobs = knobs(Backend::Cuda);
        let count: usize = knobs.iter().map(|knob| knob.candidates.len() - 1).sum();
        let choices = choices(&knobs);
        assert_eq!(choices.len(), 1 + count);
        assert!(choices[0].is_empty());
        assert!(choices[1..].iter().all(|choice| choice.iter().count() == 1));
    }
}
