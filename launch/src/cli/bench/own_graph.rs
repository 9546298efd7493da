//! Shared parts of the benchmarks that build their own graphs: the time of one iteration inside the running kernel.

use crate::cli::bench::samples::Samples;
use crate::cli::program::Failure;
use crate::engine::Engine;
use crate::engine::user_graph::GraphRun;
use crate::model::app_error::AppError;
use serde_json::{Value, json};

/// Minimum time of a launch with many iterations, roughly.
const LONG: f64 = 0.3;
/// Iterations of the short launch, and bounds for the long one.
const FEW: u32 = 20;
const MOST: u32 = 20_000;

/// Nanoseconds per iteration.
pub struct Timed {
    /// One sample per repetition.
    pub ns: Samples,
    /// Iterations of the long launch.
    pub iterations: u32,
}

/// Runs the graph in launches of few and of many iterations. The difference of the two times is the time of the additional iterations,
/// so the launch itself does not count. `check` gets each launch's outputs.
///
/// # Errors
/// A launch fails, or its outputs are wrong.
pub fn time(
    engine: &Engine,
    repeats: u32,
    check: impl Fn(&GraphRun) -> Result<(), AppError>,
) -> Result<Timed, Failure> {
    let run = |iterations: u32| -> Result<f64, Failure> {
        let run = engine.run_graph(iterations).map_err(Failure::told)?;
        if !run.same_on_all_ranks {
            return Err(AppError::failed("no figures: ranks computed different outputs").into());
        }
        check(&run)?;
        Ok(run.took.as_secs_f64())
    };
    run(FEW)?; // the first launch also maps memory
    let few = run(FEW)?;
    let more = run(6 * FEW)?;
    let one = ((more - few) / f64::from(5 * FEW)).max(1e-7);
    let iterations = ((LONG / one) as u32).clamp(6 * FEW, MOST);
    let mut ns = Vec::new();
    for _ in 0..repeats.max(1) {
        let (few, many) = (run(FEW)?, run(iterations)?);
        ns.push((many - few) / f64::from(iterations - FEW) * 1e9);
    }
    let ns = Samples::of(ns).ok_or_else(|| AppError::failed("nothing was measured"))?;
    Ok(Timed { ns, iterations })
}

/// Refuses outputs that are not `expected` everywhere. The inputs are chosen so that the sums are exact.
///
/// # Errors
/// An output differs.
pub fn all_equal(run: &GraphRun, expected: f64) -> Result<(), AppError> {
    let wrong = run.outputs.iter().flat_map(|output| output.values.iter().map(move |v| (&output.name, *v)));
    match wrong.into_iter().find(|&(_, value)| value != expected) {
        None if run.outputs.is_empty() => Err(AppError::failed("no figures: the graph gave no output")),
        None => Ok(()),
        Some((name, value)) => {
            Err(AppError::failed(format!("no figures: `{name}` holds {value}, expected {expected}")))
        }
    }
}

/// The model.json of a graph.
pub fn model(rows: u32, tensors: Vec<Value>, ops: Vec<Value>, output: &str) -> String {
    let graph =
        json!({"name": "benchmark", "rows": rows, "tensors": tensors, "ops": ops, "outputs": [output]});
    json!({"schema": "mpk-model/1", "graph": graph}).to_string()
}

/// A tensor with given values.
pub fn tensor(
    name: &str,
    kind: &str,
    dtype: &str,
    dims: [usize; 2],
    value: impl Fn(usize, usize) -> f64,
) -> Value {
    let values: Vec<f64> = (0..dims[0])
        .flat_map(|row| (0..dims[1]).map(move |column| (row, column)))
        .map(|(r, c)| value(r, c))
        .collect();
    json!({"name": name, "kind": kind, "dtype": dtype, "dims": dims, "data": {"values": values}})
}
