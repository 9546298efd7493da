//! The time to build and verify all ranks' graphs of a model.

use crate::cli::bench::program;
use crate::model::app_error::AppError;
use crate::model::families::{self, GraphOptions};
use crate::model::model_json::{Runtime, Sizes};
use crate::model::model_source::ModelSource;
use serde::Serialize;
use std::path::Path;
use std::time::Instant;
use taskgraph::builder::{BuildOptions, build_all};
use taskgraph::verify::verify;
use taskgraph::words::counted;
use taskgraph::{Allreduce, Capacity, Placement, Target};

/// One measurement.
#[derive(Clone, Debug, Serialize)]
pub struct GraphTiming {
    /// Shape or model.
    pub model: String,
    /// Ranks.
    pub ranks: u32,
    /// Workers per rank.
    pub workers: u32,
    /// Tasks of all ranks.
    pub tasks: usize,
    /// Events of all ranks.
    pub events: usize,
    /// Seconds from op graph to task graphs.
    pub build_s: f64,
    /// Seconds for the proof over all ranks.
    pub verify_s: f64,
    /// Build and proof together, per task.
    pub microseconds_per_task: f64,
}

/// Builds and verifies the decode graph of batch size `batch` for `ranks` ranks. Returns the fastest of `repeats`
/// repetitions.
pub fn measure(
    model: &str,
    ranks: u32,
    batch: u32,
    target: &Target,
    placement: Placement,
    allreduce: Allreduce,
    repeats: u32,
) -> Result<GraphTiming, AppError> {
    let source = ModelSource::open(&program::model(Path::new(model))?.open()?)?;
    let ModelSource::Model(source) = source else {
        return Err(AppError::input(format!("--model {model}: a graph of your own has no decode graph")));
    };
    let config = source.config;
    let pages_per_slot = 4096 / 64;
    let sizes = Sizes {
        max_batch: batch,
        max_seq_len: 4096,
        page_size: 64,
        pages_per_slot,
        num_pages: pages_per_slot * batch,
        prefill_chunk: 256,
    };
    let options = GraphOptions::new(&config, &Runtime::default(), 0, ranks, target);
    let capacity = Capacity { rows: batch, samples: batch, active: batch };
    let registry = kernels_cu::registry::registry();
    let build = BuildOptions { placement, allreduce, ..BuildOptions::new(ranks, target.clone()) };
    let mut best: Option<GraphTiming> = None;
    for _ in 0..repeats.max(1) {
        let begin = Instant::now();
        let ops = families::op_graph(&config, &sizes, &options, "decode", capacity);
        let graphs = build_all(&ops, &registry, &build)?;
        let build_s = begin.elapsed().as_secs_f64();
        verify(&graphs)
            .map_err(|v| AppError::failed(format!("{}: {}", counted(v.len(), "violation"), v[0])))?;
        let verify_s = begin.elapsed().as_secs_f64() - build_s;
        let tasks = graphs.iter().map(|g| g.tasks.len()).sum();
        let timing = GraphTiming {
            model: model.to_string(),
            ranks,
            workers: target.workers,
            tasks,
            events: graphs.iter().map(|g| g.events.len()).sum(),
            build_s,
            verify_s,
            microseconds_per_task: 1e6 * (build_s + verify_s) / tasks as f64,
        };
        if best.as_ref().is_none_or(|b| build_s + verify_s < b.build_s + b.verify_s) {
            best = Some(timing);
        }
    }
    best.ok_or_else(|| AppError::failed("nothing was measured"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_measured_as_shapes_are() {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/qwen3");
        let target = Target::cpu(1);
        let measured =
            |model: &str| measure(model, 1, 1, &target, Placement::Static, Allreduce::CopyReduce, 1);
        for model in [fixture.clone(), fixture.join("model.json")] {
            let model = model.display().to_string();
            assert!(measured(&model).is_ok_and(|timing| timing.tasks > 10 && timing.model == model));
        }
        let error = measured("qwen9").unwrap_err();
        assert!(error.status == 2 && error.message.contains("qwen3-8b"), "{error}");
    }
}
