//! Time per decode step at a context length, on any backend and number of ranks. A step counts only if every request
//! decodes one token in it (`full_batch`).

use crate::cli::bench::budget::Phase;
use crate::cli::bench::floor::{Bytes, floor};
use crate::cli::bench::full_batch;
use crate::cli::bench::program::{Benchmark, figures, request, run_benchmark};
use crate::cli::bench::samples::Samples;
use crate::cli::bench::verdict::{Answers, Reference};
use crate::cli::program::Failure;
use crate::cli::runtime_args::RuntimeArgs;
use crate::engine::{Engine, ModelSpec, Request};
use crate::model::app_error::AppError;
use crate::model::model_json::Overrides;
use serde_json::{Value, json};
use std::path::PathBuf;
use taskgraph::words::counted;

/// Iterations on the timeline of a budget. The last one only ends the step before it.
const BUDGET_ITERATIONS: u32 = 9;

/// What is timed.
#[derive(Clone, Debug, clap::Args)]
pub struct Case {
    /// A model.json (`mpk-bench model` prints one), a Hugging Face folder, a hub name, or the name of a shape such as
    /// qwen3-8b.
    #[arg(long)]
    pub model: PathBuf,
    /// Number of tokens that each request holds before the first step that counts.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..1 << 24))]
    pub context: u32,
    /// Number of requests that run at once.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub batch: u32,
    /// Number of decode steps per repetition.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..1 << 24))]
    pub steps: u32,
    /// Number of repetitions. The median, minimum and maximum are reported.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeats: u32,
    /// Memory read rate of a rank in bytes per second, for the floor. On the CPU the default is a measurement.
    #[arg(long, value_name = "BYTES")]
    pub read_rate: Option<f64>,
    /// Expected tokens: output of `mpk-run --json`, or of this command with `--tokens`, for the same requests.
    #[arg(long, value_name = "FILE")]
    pub reference: Option<PathBuf>,
    /// Add the tokens to the JSON object.
    #[arg(long)]
    pub tokens: bool,
    /// Trace the end of the last repetition and report where its time goes, in a table on standard error and in the JSON
    /// object.
    #[arg(long)]
    pub budget: bool,
    #[command(flatten)]
    #[allow(missing_docs, reason = "would be shown as help")]
    pub runtime: RuntimeArgs,
}

impl Case {
    /// The model to run, with its sizes.
    ///
    /// # Errors
    /// The name is no shape.
    pub fn spec(&self) -> Result<ModelSpec, AppError> {
        let mut spec = crate::cli::bench::program::model(&self.model)?;
        spec.overrides = Overrides {
            max_batch: Some(self.batch),
            max_seq_len: Some(self.context + self.steps + 1),
            ..self.runtime.overrides_of_benchmark()
        };
        Ok(spec)
    }

    /// Requests that all decode in the same `steps` iterations, each with `context` tokens before the first of them.
    pub(super) fn requests(&self, engine: &Engine) -> Result<Vec<Request>, AppError> {
        let (chunk, beside) = engine.info().prefill_rows.unwrap_or((self.context, self.context));
        let early = full_batch::early_tokens(self.batch, self.context, chunk, beside).ok_or_else(|| {
            AppError::input(format!(
                "the first of {} of {} would have {} before the last one is complete; use a longer --context or a larger runtime.prefill_chunk",
                counted(self.batch, "prompt"),
                counted(self.context, "token"),
                counted(self.context, "new token")
            ))
        })?;
        let of = |(number, early): (u32, &u32)| request(number, self.context - early, early + self.steps + 1);
        Ok((0..).zip(&early).map(of).collect())
    }

    pub(super) fn contradiction(&self) -> Option<String> {
        match self.read_rate {
            Some(rate) if !rate.is_finite() || rate <= 0.0 => {
                Some(format!("--read-rate {rate}: expected a positive number of bytes per second"))
            }
            _ => self.runtime.contradiction(),
        }
    }
}

/// Runs the benchmark and prints one JSON object, on rank 0. Returns the exit status.
pub fn run(case: &Case) -> i32 {
    let benchmark = Benchmark {
        runtime: &case.runtime,
        options: format!("{case:?}"),
        reference: case.reference.as_deref(),
        budget: case.budget,
        phase: Phase::Decode,
        trace_iterations: BUDGET_ITERATIONS,
    };
    run_benchmark(
        &benchmark,
        case.contradiction(),
        || case.spec(),
        |engine, reference, model| {
            measure(case, engine, reference, |engine| {
                let info = engine.info();
                let Some(config) = model else { return Ok(Value::Null) };
                let bytes = Bytes::of_step(config, info.ranks, case.batch, case.context + case.steps / 2);
                let workers = case.runtime.workers.unwrap_or_else(|| cores() / info.ranks).max(1);
                let threads = (workers * info.ranks).min(cores()) as usize;
                Ok(json!(floor(bytes, info.backend, info.ranks, threads, case.read_rate)?))
            })
        },
    )
}

fn cores() -> u32 {
    distributed::World::single().cores().own.len().max(1) as u32
}

/// Measures all repetitions, then the floor. A wrong token is an error, and no figures are returned.
fn measure(
    case: &Case,
    engine: &Engine,
    reference: Option<&Reference>,
    floor: impl Fn(&Engine) -> Result<Value, AppError>,
) -> Result<Value, Failure> {
    let (mut times, mut prefills, mut steps) = (Vec::new(), Vec::new(), 0);
    let mut answers = Answers::default();
    for _ in 0..case.repeats {
        let before = engine.stats();
        answers.take(engine, case.requests(engine)?)?;
        let after = engine.stats();
        steps = after.full_batch_steps - before.full_batch_steps;
        if steps == 0 || steps * 2 < u64::from(case.steps) {
            return Err(AppError::failed(format!(
                "no figures: {} decoded together in only {steps} of {}; the KV cache may be too small for them",
                counted(case.batch, "request"),
                counted(case.steps, "step")
            ))
            .into());
        }
        times.push(1e3 * (after.full_batch - before.full_batch).as_secs_f64() / steps as f64);
        prefills.push(1e3 * (after.prefill - before.prefill).as_secs_f64());
    }
    let verdict = answers.verdict(reference)?;
    let (ms, info) = (Samples::of(times), engine.info());
    let median = ms.as_ref().map_or(0.0, |ms| ms.median);
    let floor = floor(engine)?;
    let share = floor["ms"].as_f64().map(|floor| floor / median);
    let mut object = figures(
        engine,
        "decode",
        json!({
            "batch": case.batch,
            "context": case.context,
            "placement": info.model.runtime.placements(),
            "allreduce": info.model.runtime.allreduce,
            "steps": steps,
            "ms_per_step": median,
            "ms": ms,
            "tokens_per_s": 1e3 * f64::from(case.batch) / median,
            "prefill_s": Samples::of(prefills).map(|ms| ms.median / 1e3),
            "floor": floor,
            "share_of_floor": share,
            "verdict": verdict,
        }),
    );
    if case.tokens {
        object["requests"] = answers.requests();
    }
    Ok(object)
}
