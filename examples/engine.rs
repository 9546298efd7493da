//! Tokens from a model, as they arrive. `cargo run --release --example engine [MODEL]`, or under `mpirun -n 2`.

use launch::engine::{Engine, Event, ModelSpec, Request, RunConfig};
use std::io::{ErrorKind, Write};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = std::env::args().nth(1).unwrap_or_else(|| "examples/tiny/model.json".into());
    let engine = Engine::load(ModelSpec::path(model), RunConfig::default())?;
    if engine.info().rank > 0 {
        return Ok(engine.serve()?);
    }
    let request = Request::text("In the beginning God created the heaven and the earth.", 32);
    let mut out = std::io::stdout();
    for event in engine.submit(request)? {
        let written = match event {
            Event::Token(token) => write!(out, "{}", token.text).and_then(|()| out.flush()),
            Event::End(end) => writeln!(out, "{} ({})", end.text, end.reason.name()),
        };
        match written {
            // The reader of a pipe has gone. Dropping the handle ends the request.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => break,
            written => written?,
        }
    }
    Ok(engine.shutdown(std::time::Duration::MAX)?)
}
