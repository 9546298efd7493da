//! The cost of a task that does almost no work: in a chain of dependent tasks, and in a fan, where one task releases
//! many and these release one again.

use crate::cli::bench::own_graph::{all_equal, model, tensor, time};
use crate::cli::bench::program::finish;
use crate::cli::bench::samples::Samples;
use crate::cli::choices::Placement;
use crate::cli::console::print_line;
use crate::cli::program::{Failure, prepare, tell_once, with_console};
use crate::cli::runtime_args::RuntimeArgs;
use crate::engine::{Engine, ModelSpec, RunConfig};
use crate::model::app_error::AppError;
use crate::model::model_json;
use clap::ValueEnum;
use serde_json::{Value, json};

/// Number of dependent additions in a chain.
const ADDITIONS: u32 = 256;
/// Elements per addition.
const ELEMENTS: usize = 16;
/// Number of fans in the graph.
const FANS: u32 = 32;
/// Columns that the many tasks of a fan share.
const COLUMNS: usize = 2048;

/// How the tasks depend on each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Shape {
    /// Each task depends on the one before.
    Chain,
    /// Many tasks depend on one, then one depends on all of them.
    Fan,
}

/// What is timed.
#[derive(Clone, Debug, clap::Args)]
pub struct Case {
    /// How the tasks depend on each other. Default: both shapes are measured.
    #[arg(long, value_enum)]
    pub shape: Vec<Shape>,
    /// Number of repetitions. The median, minimum and maximum are reported.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeats: u32,
    #[command(flatten)]
    #[allow(missing_docs, reason = "would be shown as help")]
    pub runtime: RuntimeArgs,
}

impl Shape {
    /// The graph, and the value that all its outputs must have.
    fn graph(self) -> (String, f64) {
        match self {
            Shape::Chain => {
                let step = 0.25;
                let input = |name, value| tensor(name, "input", "f32", [1, ELEMENTS], move |_, _| value);
                let op = |number: u32| {
                    let from = if number == 0 { "x".into() } else { format!("y{}", number - 1) };
                    json!({"op": "add", "inputs": [from, "r"], "outputs": [format!("y{number}")]})
                };
                let last = format!("y{}", ADDITIONS - 1);
                let tensors = vec![input("x", 1.0), input("r", step)];
                (
                    model(1, tensors, (0..ADDITIONS).map(op).collect(), &last),
                    1.0 + f64::from(ADDITIONS) * step,
                )
            }
            Shape::Fan => {
                // Each of the many tasks copies one element. The last task adds up the copies and divides by their number.
                let share = ELEMENTS as f64 / COLUMNS as f64;
                let tensors = vec![
                    tensor("x", "input", "f32", [1, ELEMENTS], |_, _| 1.5),
                    tensor("out", "weight", "bf16", [COLUMNS, ELEMENTS], |r, c| f64::from(r % ELEMENTS == c)),
                    tensor("in", "weight", "bf16", [ELEMENTS, COLUMNS], |r, c| {
                        if c % ELEMENTS == r { share } else { 0.0 }
                    }),
                ];
                let linear = |from: String, weight: &str, to: String| {
                    json!({"op": "linear", "inputs": [from, weight], "outputs": [to],
                           "attrs": {"output_dtype": "f32"}})
                };
                let fan = |number: u32| {
                    let from = if number == 0 { "x".into() } else { format!("y{}", number - 1) };
                    let many = format!("h{number}");
                    [linear(from, "out", many.clone()), linear(many, "in", format!("y{number}"))]
                };
                (model(1, tensors, (0..FANS).flat_map(fan).collect(), &format!("y{}", FANS - 1)), 1.5)
            }
        }
    }

    fn steps(self) -> u32 {
        match self {
            Shape::Chain => ADDITIONS,
            Shape::Fan => FANS,
        }
    }
}

/// Runs all cases and prints one JSON object for each, on rank 0. Returns the exit status.
pub fn run(case: &Case) -> i32 {
    if let Some(problem) = case.runtime.contradiction() {
        return tell_once(&AppError::input(problem));
    }
    if let Err(error) = prepare(&case.runtime) {
        return tell_once(&error);
    }
    let shapes = if case.shape.is_empty() { vec![Shape::Chain, Shape::Fan] } else { case.shape.clone() };
    let placements = match case.runtime.placement {
        Some(one) => vec![one],
        None => vec![Placement::Static, Placement::Dynamic],
    };
    if distributed::launcher::launched_by_mpi() && shapes.len() * placements.len() > 1 {
        let what = "under mpirun a process can load only one engine; give one --shape and one --placement";
        return tell_once(&AppError::input(what));
    }
    for shape in shapes {
        for &placement in &placements {
            let status = one(case, shape, placement);
            if status != 0 {
                return status;
            }
        }
    }
    0
}

fn one(case: &Case, shape: Shape, placement: Placement) -> i32 {
    let (text, expected) = shape.graph();
    let mut spec = match ModelSpec::json(&text) {
        Ok(spec) => spec,
        Err(error) => return tell_once(&error),
    };
    spec.overrides = case.runtime.overrides();
    spec.overrides.placement = Some(placement.into());
    let in_common = vec![("the options".into(), format!("{case:?}"))];
    let config = RunConfig { in_common, ..case.runtime.run_config() };
    let engine = match Engine::load(spec, with_console(config)) {
        Ok(engine) => engine,
        // The engine has reported the error.
        Err(error) => return error.exit_status(),
    };
    if engine.info().rank > 0 {
        return engine.serve().map_or_else(|error| error.exit_status(), |()| 0);
    }
    let done = measure(case, &engine, shape, placement.into(), expected);
    finish(&engine, done, |object| print_line(&object.to_string()))
}

fn measure(
    case: &Case,
    engine: &Engine,
    shape: Shape,
    placement: model_json::Placement,
    expected: f64,
) -> Result<Value, Failure> {
    let timed = time(engine, case.repeats, |run| all_equal(run, expected))?;
    let each = |ns: &f64| ns / 1e3 / f64::from(shape.steps());
    let us = Samples::of(timed.ns.samples.iter().map(each).collect());
    let info = engine.info();
    Ok(json!({
        "schema": "mpk-bench/1",
        "what": "tasks",
        "shape": match shape { Shape::Chain => "chain", Shape::Fan => "fan" },
        "placement": placement,
        "backend": info.backend,
        "tp": info.ranks,
        // Chain: from task to task. Fan: from one task to many and back to one.
        "us": us,
        "steps": shape.steps(),
        "iterations": timed.iterations,
        "verdict": {"right": true, "outputs": format!("all {expected}"), "ranks": "the same bits"},
    }))
}
