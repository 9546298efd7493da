//! Tokens from a model, as they arrive. `cargo run --release --example engine`, or under `mpirun -n 2`.

use launch::engine::{Engine, Event, ModelSpec, Request, RunConfig};

fn main() -> Result<(), launch::engine::Error> {
    let engine = Engine::load(ModelSpec::path("examples/tiny/model.json"), RunConfig::default())?;
    if engine.info().rank > 0 {
        return engine.serve();
    }
    let request = Request::text("In the beginning God created the heaven and the earth.", 32);
    for event in engine.submit(request)? {
        match event {
            Event::Token(token) => print!("{}", token.text),
            Event::End(end) => println!("{} ({})", end.text, end.reason.name()),
        }
    }
    engine.shutdown(std::time::Duration::MAX)
}
