//! Time from prompts to their first new tokens, on any backend and number of ranks.

use crate::cli::bench::budget::Phase;
use crate::cli::bench::program::{Benchmark, figures, model, requests, run_benchmark};
use crate::cli::bench::samples::Samples;
use crate::cli::bench::verdict::{Answers, Reference};
use crate::cli::program::Failure;
use crate::cli::runtime_args::RuntimeArgs;
use crate::engine::{Engine, ModelSpec};
use crate::model::app_error::AppError;
use crate::model::hf_config::ModelConfig;
use crate::model::model_json::Overrides;
use serde_json::{Value, json};
use std::path::PathBuf;

/// What is timed.
#[derive(Clone, Debug, clap::Args)]
pub struct Case {
    /// A model.json (`mpk-bench model` prints one), a Hugging Face folder, a hub name, or the name of a shape such as
    /// qwen3-8b.
    #[arg(long)]
    pub model: PathBuf,
    /// Number of tokens in each prompt.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..1 << 24))]
    pub prompt: u32,
    /// Number of prompts that are processed at once.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub batch: u32,
    /// Maximum number of prompt tokens in one prefill iteration. Default: the model's prefill_chunk.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..1 << 20))]
    pub chunk: Option<u32>,
    /// Number of repetitions. The median, minimum and maximum are reported.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeats: u32,
    /// Expected tokens: output of `mpk-run --json`, or of this command with `--tokens`, for the same requests.
    #[arg(long, value_name = "FILE")]
    pub reference: Option<PathBuf>,
    /// Add the tokens to the JSON object.
    #[arg(long)]
    pub tokens: bool,
    /// Trace the last iteration and report where its time goes, in a table on standard error and in the JSON object.
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
        let mut spec = model(&self.model)?;
        spec.overrides = Overrides {
            max_batch: Some(self.batch),
            max_seq_len: Some(self.prompt + 2),
            prefill_chunk: self.chunk,
            ..self.runtime.overrides_of_benchmark()
        };
        Ok(spec)
    }
}

/// Runs the benchmark and prints one JSON object, on rank 0. Returns the exit status.
pub fn run(case: &Case) -> i32 {
    let benchmark = Benchmark {
        runtime: &case.runtime,
        options: format!("{case:?}"),
        reference: case.reference.as_deref(),
        budget: case.budget,
        phase: Phase::Prefill,
        trace_iterations: 1,
    };
    run_benchmark(
        &benchmark,
        case.runtime.contradiction(),
        || case.spec(),
        |engine, reference, model| measure(case, engine, reference, model),
    )
}

fn measure(
    case: &Case,
    engine: &Engine,
    reference: Option<&Reference>,
    config: Option<&ModelConfig>,
) -> Result<Value, Failure> {
    let mut times = Vec::new();
    let mut answers = Answers::default();
    for _ in 0..case.repeats {
        let before = engine.stats();
        answers.take(engine, requests(case.batch, case.prompt, 1))?;
        let after = engine.stats();
        times.push(1e3 * (after.prefill - before.prefill).as_secs_f64());
    }
    let verdict = answers.verdict(reference)?;
    let (ms, info) = (Samples::of(times), engine.info());
    let median = ms.as_ref().map_or(0.0, |ms| ms.median);
    let tokens = f64::from(case.batch) * f64::from(case.prompt);
    let mut object = figures(
        engine,
        "prefill",
        json!({
            "batch": case.batch,
            "prompt": case.prompt,
            "chunk": info.model.runtime.prefill_chunk,
            "allreduce_dtype": info.model.runtime.allreduce_dtype,
            "ms_median": median,
            "ms": ms,
            "tokens_per_s": 1e3 * tokens / median,
            "tflop_per_s": config.map(|config| operations(config, case.batch, case.prompt) / median / 1e9),
            "verdict": verdict,
        }),
    );
    if case.tokens {
        object["requests"] = answers.requests();
    }
    Ok(object)
}

/// Floating-point operations of all ranks: the products of every token, causal attention, and the output head for
/// each last token.
fn operations(config: &ModelConfig, batch: u32, prompt: u32) -> f64 {
    let [batch, prompt, hidden, layers, heads, kv_heads, size, inner, vocabulary] = [
        batch,
        prompt,
        config.hidden_size,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.intermediate_size,
        config.vocab_size,
    ]
    .map(f64::from);
    let layer = hidden * size * (2.0 * heads + 2.0 * kv_heads) + 3.0 * hidden * inner;
    // The causal mask leaves half of the products.
    let attention = 2.0 * prompt * prompt / 2.0 * heads * size;
    2.0 * batch * (layers * (prompt * layer + attention) + vocabulary * hidden)
}
