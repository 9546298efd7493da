//! An op graph made in Rust, built, verified and run.
//!
//! ```no_run
//! use launch::engine::own_graph::run;
//! use taskgraph::{Attrs, Capacity, DType, OpGraph};
//!
//! let mut graph = OpGraph::new("sum", Capacity { rows: 2, samples: 2, active: 1 });
//! let a = graph.input("a", DType::F32, &[2, 3]);
//! let b = graph.input("b", DType::F32, &[2, 3]);
//! let y = graph.op("y", "add", &[a, b], Attrs::new());
//! graph.output(y);
//! let values = [("a", vec![1.0; 6]), ("b", vec![2.0; 6])];
//! let outputs = run(&graph, values)?.unwrap_or_default();
//! assert_eq!(outputs["y"], [3.0; 6]);
//! # Ok::<(), launch::model::app_error::AppError>(())
//! ```

use crate::engine::agreement::Exit;
use crate::engine::backend::Backend;
use crate::engine::config::RunConfig;
use crate::engine::user_graph;
use crate::model::app_error::AppError;
use crate::model::model_json::ModelJson;
use distributed::{WatchOptions, World};
use serde_json::json;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::time::Instant;
use taskgraph::OpGraph;
use taskgraph::json::{DataSource, DataSources, op_graph_to_value};

/// Builds `graph` for all ranks, verifies it and runs it once with these global values of its inputs, weights and
/// constants. Gives the wanted outputs on rank 0, `None` on the others. Under `mpirun` every rank calls it; without, there
/// is one rank. Once a process: MPI begins and ends inside.
///
/// # Errors
/// What of the graph or the values is wrong; a run that failed.
pub fn run<'a>(
    graph: &OpGraph,
    values: impl IntoIterator<Item = (&'a str, Vec<f32>)>,
) -> Result<Option<BTreeMap<String, Vec<f64>>>, AppError> {
    let sources: DataSources = values
        .into_iter()
        .map(|(name, values)| {
            let values = values.into_iter().map(f64::from).collect();
            (name.to_string(), DataSource::Values { values })
        })
        .collect();
    let graph = op_graph_to_value(graph, &sources).map_err(|e| AppError::input(e.to_string()))?;
    let model = json!({"schema": "mpk-model/1", "graph": graph});
    let model =
        ModelJson::parse(Path::new("own graph"), model.to_string().as_bytes()).map_err(AppError::from)?;
    let config = RunConfig::default();
    let world = World::init(watch_options(&config)).map_err(AppError::from)?;
    let mut found = None;
    let mut run = || -> Result<(), Exit> {
        let backend = Backend::choose(&world, &config, None)?;
        let begin = Instant::now();
        user_graph::run(
            &world,
            &config,
            1,
            &model,
            &graph,
            None,
            backend,
            begin,
            None,
            &mut |_, outputs, _, _| {
                found = Some(outputs.into_iter().map(|(name, _, _, values)| (name, values)).collect());
                Ok(())
            },
        )
    };
    let result = run();
    world.finalize();
    match result {
        Ok(()) => Ok(found),
        Err(Exit(status)) => {
            Err(AppError { status, message: "the run failed; the log on standard error says why".into() })
        }
    }
}

fn watch_options(config: &RunConfig) -> WatchOptions {
    WatchOptions {
        deadline: config.deadline,
        tell: |message| {
            let _ = std::io::stderr().write_all(format!("error: {message}\n").as_bytes());
        },
        fault: None,
    }
}
