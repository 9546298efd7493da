//! What a task costs that does next to nothing: chains of dependent tasks, and one task that releases many which release one.

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

/// Dependent additions of a chain.
const ADDITIONS: u32 = 256;
/// Elements of each.
const ELEMENTS: usize = 16;
/// One task, many, one again: so often.
const FANS: u32 = 32;
/// Columns that the many share.
const COLUMNS: usize = 2048;

/// How the tasks depend on each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Shape {
    /// Each on the one before.
    Chain,
    /// Many on one, then one on all of them.
    Fan,
}

/// What is timed.
#[derive(Clone, Debug, clap::Args)]
pub struct Case {
    /// How the tasks depend on each other; by default both shapes are measured.
    #[arg(long, value_enum)]
    pub shape: Vec<Shape>,
    /// Number of repetitions; the median, minimum and maximum are reported.
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
                // Each of the many copies one of the elements; the one adds its copies up and divides by their number.
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

/// Runs all cases and prints one JSON object each, on rank 0; gives the exit status.
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
        let what =
            "under a launcher a process has one engine in its life; give one --shape and one --placement";
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
        // It has been told.
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
        // Of a chain: from task to task. Of a fan: from one task to many and back to one.
        "us": us,
        "steps": shape.steps(),
        "iterations": timed.iterations,
        "verdict": {"right": true, "outputs": format!("all {expected}"), "ranks": "the same bits"},
    }))
}
