//! Time of a decode step at a context length, on any backend and number of ranks.

use crate::cli::console::print_line;
use crate::cli::program::{Failure, prepare, tell_once, with_console};
use crate::cli::run::finish;
use crate::cli::runtime_args::RuntimeArgs;
use crate::engine::{Engine, ModelSpec, Request, RunConfig};
use crate::model::app_error::AppError;
use crate::model::model_json::Overrides;
use serde_json::json;
use std::path::PathBuf;

/// What is timed.
#[derive(Clone, Debug)]
pub struct Case {
    /// model.json, or whatever else names a model.
    pub model: PathBuf,
    /// Tokens before the first step.
    pub context: u32,
    /// Requests at a time.
    pub batch: u32,
    /// Steps.
    pub steps: u32,
    /// Where and how it is run.
    pub runtime: RuntimeArgs,
}

impl Case {
    fn spec(&self) -> ModelSpec {
        let mut spec = ModelSpec::path(&self.model);
        spec.overrides = Overrides {
            max_batch: Some(self.batch),
            max_seq_len: Some(self.context + self.steps + 1),
            ..self.runtime.overrides()
        };
        spec
    }

    fn requests(&self) -> Vec<Request> {
        // Any ids that every vocabulary has, not the same for all.
        let prompt = |request| (0..self.context).map(|i| (i * 7 + request) % 31).collect::<Vec<u32>>();
        let request =
            |number| Request { ignore_eos: true, ..Request::tokens(prompt(number), self.steps + 1) };
        (0..self.batch).map(request).collect()
    }
}

/// Runs it and prints one JSON object, on rank 0; gives the exit status.
pub fn run(case: &Case) -> i32 {
    if let Some(problem) = case.runtime.contradiction() {
        return tell_once(&AppError::input(problem));
    }
    if let Err(error) = prepare(&case.runtime) {
        return tell_once(&error);
    }
    let config = RunConfig { sampling: false, ..with_console(case.runtime.run_config()) };
    let engine = match Engine::load(case.spec(), config) {
        Ok(engine) => engine,
        // It has been told.
        Err(error) => return error.exit_status(),
    };
    if engine.info().rank > 0 {
        return engine.serve().map_or_else(|error| error.exit_status(), |()| 0);
    }
    let done = measure(case, &engine);
    finish(&engine, done)
}

fn measure(case: &Case, engine: &Engine) -> Result<(), Failure> {
    for handle in engine.submit_all(case.requests())? {
        if let Some(error) = handle.wait().error {
            return Err(error.into());
        }
    }
    engine.wait_idle();
    let (stats, info) = (engine.stats(), engine.info());
    if stats.decode_steps == 0 {
        return Err(AppError::failed("no decode step was made").into());
    }
    let ms = 1000.0 * stats.decode.as_secs_f64() / stats.decode_steps as f64;
    let object = json!({
        "schema": "mpk-bench/1",
        "what": "decode",
        "model": case.model,
        "backend": info.backend,
        "tp": info.ranks,
        "batch": case.batch,
        "context": case.context,
        "steps": stats.decode_steps,
        "ms_per_step": ms,
        "tokens_per_s": 1000.0 * f64::from(case.batch) / ms,
        "prefill_s": stats.prefill.as_secs_f64(),
        "load_s": info.start.load.as_secs_f64(),
    });
    Ok(print_line(&object.to_string())?)
}
