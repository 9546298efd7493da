//! A user's own graph: built, verified and run. `cargo run --release --example own_graph`, or under `mpirun -n 2`.

use launch::engine::{Engine, ModelSpec, RunConfig};
use serde_json::json;
use std::io::{ErrorKind, Write};
use taskgraph::{Attrs, Capacity, DType, OpGraph, Split};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (rows, width, inner) = (2, 8, 12);
    let mut graph = OpGraph::new("mlp", Capacity { rows: rows as u32, samples: rows as u32, active: 1 });
    // Each rank holds some rows of `up` and the same columns of `down`, so the product of `down` is a partial sum.
    let split = Split::Even { unit: 1 };
    let x = graph.input("x", DType::F32, &[rows, width]);
    let norm = graph.weight("norm", DType::F32, &[width], None);
    let up = graph.weight("up", DType::F32, &[inner, width], Some((0, split)));
    let down = graph.weight("down", DType::F32, &[width, inner], Some((1, split)));
    let eps = Attrs::from_iter([("eps".to_string(), json!(1e-6))]);
    let normed = graph.op("normed", "rmsnorm", &[x, norm], eps);
    let hidden = graph.op("hidden", "linear", &[normed, up], Attrs::new());
    let branch = graph.op("branch", "linear", &[hidden, down], Attrs::new());
    let y = graph.op("y", "add", &[branch, x], Attrs::new());
    graph.output(y);

    let values = |n: u64| (0..n).map(|i| ((i * 7 % 11) as f32 - 5.0) / 8.0).collect::<Vec<f32>>();
    let given = [("x", rows * width), ("norm", width), ("up", inner * width), ("down", width * inner)];
    let spec = ModelSpec::graph(&graph, given.map(|(name, n)| (name, values(n))))?;
    let engine = Engine::load(spec, RunConfig::default())?;
    if engine.info().rank > 0 {
        return Ok(engine.serve()?);
    }
    let run = engine.run_graph(1)?;
    match writeln!(std::io::stdout(), "{:?}", run.outputs[0].values) {
        // The reader of a pipe has gone.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
        written => written?,
    }
    Ok(engine.shutdown(std::time::Duration::MAX)?)
}
