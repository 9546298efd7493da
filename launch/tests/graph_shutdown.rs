//! The end of an engine that runs a user's graph, beside other engines of the process.

use launch::engine::config::BackendChoice;
use launch::engine::{Engine, ModelSpec, RunConfig};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn load() -> Engine {
    let graph = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/graph/mlp.json");
    let config = RunConfig { backend: BackendChoice::Cpu, tell: |_| {}, ..RunConfig::default() };
    Engine::load(ModelSpec::path(graph), config).unwrap()
}

#[test]
fn a_long_run_ends_soon_after_the_shutdown_timeout_and_other_engines_go_on() {
    let other = load();
    let engine = Arc::new(load());
    let runs = {
        let engine = Arc::clone(&engine);
        std::thread::spawn(move || engine.run_graph(u32::MAX))
    };
    std::thread::sleep(Duration::from_millis(300));
    let begin = Instant::now();
    let error = engine.shutdown(Duration::from_millis(100)).unwrap_err();
    assert!(error.message().contains("interrupted"), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", begin.elapsed());
    assert!(runs.join().unwrap().is_err());
    // One that was there, and a later one.
    for engine in [other, load()] {
        engine.run_graph(3).unwrap();
        engine.shutdown(Duration::from_secs(60)).unwrap();
    }
}
