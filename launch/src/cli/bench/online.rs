//! Time per decode step of a full batch whose requests arrive while the kernel runs, against the same requests as a fixed batch. Both
//! run on one loaded model, in turns.
//!
//! The kernel counts the steps in which every slot generates, and their time. They have the same mean context in all kinds of runs:
//! - `fixed`: all requests have the same lengths and generate from their first token to their last.
//! - `arriving`: each request is `gap` tokens behind the one before. A full batch begins with the first token of the last request, and
//!   ends with the last token of the first. So it leaves out the lowest contexts of some requests and the highest of others.
//! - `changing`: every slot is always in use. Other requests hold the slots before and after these requests; their prompts are longer
//!   by half of the new tokens.
//!
//! Prompts are one token longer than whole pages, and an untimed round puts these pages into the prefix cache. So a prompt enters as
//! one row. No iteration has more rows than the batch, and `fixed` and `changing` use the same graph throughout.
//!
//! So the tokens of `changing` must be those of `fixed`. In `arriving`, only the last request runs in a full batch from its first token on,
//! until the first request ends: these tokens must be the same too. The other requests have begun in graphs of fewer rows, which may round
//! differently on a GPU. A near tie may then give another token, and other tokens after it. The results say where.

use crate::cli::bench::program::{figures, finish, load, request};
use crate::cli::bench::samples::Samples;
use crate::cli::bench::verdict::{differ, place_of_difference};
use crate::cli::console::print_line;
use crate::cli::program::{Failure, tell_once};
use crate::cli::runtime_args::RuntimeArgs;
use crate::engine::{Engine, Event, Handle, ModelSpec, Request, RunConfig, Stats};
use crate::model::app_error::AppError;
use crate::model::model_json::{DEFAULT_PAGE_SIZE, Overrides, PrefixCache};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Duration;
use taskgraph::words::counted;

/// What is timed.
#[derive(Clone, Debug, clap::Args)]
pub struct Case {
    /// A model.json (`mpk-bench model` prints one), a Hugging Face folder, a hub name, or the name of a shape such as
    /// qwen3-8b.
    #[arg(long)]
    pub model: PathBuf,
    /// Number of requests, and of slots.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(2..=4096))]
    pub batch: u32,
    /// Number of tokens that each request holds in the middle of its answer. Rounded to whole pages.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..1 << 24))]
    pub context: u32,
    /// Number of new tokens of each request.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(8..1 << 24))]
    pub new_tokens: u32,
    /// A request arrives when the one before it has this many tokens. Default: a quarter of the new tokens, divided by
    /// the batch.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..1 << 20))]
    pub gap: Option<u32>,
    /// Number of rounds. Each measures all kinds of runs, in the opposite order of the round before.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeats: u32,
    #[command(flatten)]
    #[allow(missing_docs, reason = "would be shown as help")]
    pub runtime: RuntimeArgs,
}

/// The kinds of runs, by name.
const KINDS: [(&str, Run); 3] = [("fixed", fixed), (ARRIVING, arriving), ("changing", changing)];
const ARRIVING: &str = "arriving";

/// Submits the requests of a load in one way, and returns their tokens.
type Run = fn(&Engine, &Load) -> Result<Vec<Vec<u32>>, Failure>;

impl Case {
    fn gap(&self) -> u32 {
        self.gap.unwrap_or(self.new_tokens / 4 / self.batch).max(1)
    }

    /// # Errors
    /// The name is no shape.
    fn spec(&self) -> Result<ModelSpec, AppError> {
        /// Room for prompts of whole pages, and for kept pages of the other requests.
        const SPARE: u32 = 512;
        let mut spec = crate::cli::bench::program::model(&self.model)?;
        spec.overrides = Overrides {
            max_batch: Some(self.batch),
            max_seq_len: Some(self.context + self.new_tokens + SPARE),
            prefix_cache: Some(PrefixCache::On),
            ..self.runtime.overrides()
        };
        Ok(spec)
    }

    fn contradiction(&self) -> Option<String> {
        // A full batch of arriving requests has at least half of the steps.
        if u64::from(self.gap()) * u64::from(self.batch - 1) * 2 > u64::from(self.new_tokens) {
            return Some(format!(
                "--gap {}: the last of {} would arrive when the first has more than half of its {}; use more --new-tokens",
                self.gap(),
                counted(self.batch, "request"),
                counted(self.new_tokens, "token")
            ));
        }
        self.runtime.contradiction()
    }
}

/// Runs the benchmark and prints one JSON object, on rank 0. Returns the exit status.
pub fn run(case: &Case) -> i32 {
    let prepared = case.contradiction().map_or(Ok(()), |problem| Err(AppError::input(problem)));
    let spec = match prepared.and_then(|()| case.spec()) {
        Ok(spec) => spec,
        Err(error) => return tell_once(&error),
    };
    let config = RunConfig {
        sampling: false,
        in_common: vec![("the options".into(), format!("{case:?}"))],
        ..case.runtime.run_config()
    };
    let engine = match load(&case.runtime, spec, config) {
        Ok((engine, _)) => engine,
        Err(status) => return status,
    };
    if engine.info().rank > 0 {
        return engine.serve().map_or_else(|error| error.exit_status(), |()| 0);
    }
    let done = measure(case, &engine);
    finish(&engine, done, |object| print_line(&object.to_string()))
}

/// The requests of every run.
struct Load {
    /// Number of tokens in each prompt.
    prompt: u32,
    requests: Vec<Request>,
    /// Those that hold the slots before, and those that follow.
    others: [Vec<Request>; 2],
    gap: u32,
}

impl Load {
    fn new(case: &Case, page: u32) -> Load {
        let pages = |tokens: u32| tokens.div_ceil(page) * page + 1;
        let half = case.new_tokens / 2;
        let (prompt, longer) = (pages(case.context.saturating_sub(half)), pages(case.context));
        // Of all other requests, only the number of new tokens differs.
        let other = |number: u32| request(case.batch, longer, case.gap() * number);
        Load {
            prompt,
            requests: (0..case.batch).map(|number| request(number, prompt, case.new_tokens)).collect(),
            others: [(1..=case.batch).map(other).collect(), (1..=case.batch).rev().map(other).collect()],
            gap: case.gap(),
        }
    }
}

/// All requests begin together.
fn fixed(engine: &Engine, load: &Load) -> Result<Vec<Vec<u32>>, Failure> {
    answers(engine.submit_all(load.requests.clone())?)
}

/// Each request begins when the one before has `gap` tokens.
fn arriving(engine: &Engine, load: &Load) -> Result<Vec<Vec<u32>>, Failure> {
    let (mut handles, mut firsts) = (Vec::new(), Vec::new());
    for request in &load.requests {
        let handle = engine.submit(request.clone())?;
        firsts.push(first_tokens(&handle, load.gap));
        handles.push(handle);
    }
    let rest = answers(handles)?;
    Ok(firsts.into_iter().zip(rest).map(|(first, rest)| [first, rest].concat()).collect())
}

/// Other requests hold all slots, and end one after the other. The requests take their slots. As these end, others follow.
fn changing(engine: &Engine, load: &Load) -> Result<Vec<Vec<u32>>, Failure> {
    let [before, after] = &load.others;
    let before = engine.submit_all(before.clone())?;
    // The kernel runs, and no slot is free.
    before.iter().for_each(|handle| drop(first_tokens(handle, 1)));
    let mut handles = Vec::new();
    for (request, before) in load.requests.iter().zip(before) {
        handles.push(engine.submit(request.clone())?);
        // Arrives while the earlier ones run.
        answers(vec![before])?;
    }
    let after = engine.submit_all(after.clone())?;
    let tokens = answers(handles)?;
    answers(after)?;
    Ok(tokens)
}

/// The first `count` tokens of a request; fewer if it has ended.
fn first_tokens(handle: &Handle, count: u32) -> Vec<u32> {
    let mut tokens = Vec::new();
    while tokens.len() < count as usize {
        let Some(Event::Token(token)) = handle.recv() else { break };
        tokens.push(token.id);
    }
    tokens
}

/// The tokens of requests that have not been read yet. Waits for their ends.
fn answers(handles: Vec<Handle>) -> Result<Vec<Vec<u32>>, Failure> {
    let tokens = |handle: Handle| {
        let answer = handle.wait();
        answer.error.map_or(Ok(answer.tokens), |error| Err(error.into()))
    };
    handles.into_iter().map(tokens).collect()
}

/// What has been measured of a kind of run, by round.
#[derive(Default)]
struct Measured {
    /// Milliseconds per step of a full batch.
    ms: Vec<f64>,
    /// Number of these steps.
    steps: Vec<u64>,
    /// Number of prompt tokens that were not in the prefix cache.
    prompt_tokens: Vec<u64>,
    /// For each request, the number of the first token that is not the fixed batch's.
    departs: Vec<Vec<Option<usize>>>,
}

fn measure(case: &Case, engine: &Engine) -> Result<Value, Failure> {
    let load = Load::new(case, engine.info().model.page_size.unwrap_or(DEFAULT_PAGE_SIZE));
    for (_, run) in KINDS {
        run(engine, &load)?;
    }
    // The prompts are in the prefix cache now, as in the runs that count.
    let expected = fixed(engine, &load)?;
    let mut all: [Measured; KINDS.len()] = Default::default();
    for round in 0..case.repeats {
        let mut order: Vec<usize> = (0..KINDS.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for kind in order {
            let (name, run) = KINDS[kind];
            let before = settled(engine);
            let tokens = run(engine, &load)?;
            let after = settled(engine);
            let steps = after.full_batch_steps - before.full_batch_steps;
            if steps * 4 < u64::from(case.new_tokens) {
                return Err(AppError::failed(format!(
                    "no figures: `{name}` had only {} of a full batch; the KV cache may be too small for {}",
                    counted(steps, "step"),
                    counted(case.batch, "request")
                ))
                .into());
            }
            let measured = &mut all[kind];
            measured.ms.push(1e3 * (after.full_batch - before.full_batch).as_secs_f64() / steps as f64);
            measured.steps.push(steps);
            let found = after.prefix_hits - before.prefix_hits;
            measured.prompt_tokens.push(after.prefix_queries - before.prefix_queries - found);
            let full = (name == ARRIVING).then_some(steps as usize);
            let of_run = format!("`fixed` (round {round} of `{name}`)");
            differ(&compared(&tokens, full), &compared(&expected, full), &of_run)?;
            let both = tokens.iter().zip(&expected);
            measured.departs.push(both.map(|(found, fixed)| place_of_difference(found, fixed)).collect());
        }
    }
    Ok(object(case, engine, &load, all))
}

/// The tokens that must be those of the fixed batch; 0 in place of the others. `full` is the number of the last request's tokens that a full
/// batch has computed, if the others have begun in smaller batches.
fn compared(tokens: &[Vec<u32>], full: Option<usize>) -> Vec<Vec<u32>> {
    let mut compared = tokens.to_vec();
    if let (Some(full), Some((last, others))) = (full, compared.split_last_mut()) {
        others.iter_mut().for_each(|tokens| tokens.fill(0));
        last.iter_mut().skip(full).for_each(|token| *token = 0);
    }
    compared
}

fn object(case: &Case, engine: &Engine, load: &Load, all: [Measured; KINDS.len()]) -> Value {
    let info = engine.info();
    let fixed = all[0].ms.clone();
    let mut object = figures(
        engine,
        "online",
        json!({
            "batch": case.batch,
            "prompt": load.prompt,
            "new_tokens": case.new_tokens,
            "gap": load.gap,
            "placement": info.model.runtime.placements(),
            "allreduce": info.model.runtime.allreduce,
            "verdict": {
                "right": true,
                "as_in_fixed": {
                    "fixed": "all tokens",
                    "changing": "all tokens",
                    "arriving": "the last request's tokens in steps of a full batch",
                },
            },
        }),
    );
    for ((name, _), measured) in KINDS.iter().zip(all) {
        let ratios = measured.ms.iter().zip(&fixed).map(|(ms, fixed)| ms / fixed).collect();
        object[name] = json!({
            "ms": Samples::of(measured.ms),
            "ratio": Samples::of(ratios),
            "steps": measured.steps,
            "prompt_tokens_computed": measured.prompt_tokens,
        });
        if *name == ARRIVING {
            object[name]["departs"] = json!(measured.departs);
        }
    }
    object
}

/// The statistics once nothing runs.
fn settled(engine: &Engine) -> Stats {
    engine.wait_idle();
    // The kernel publishes its figures after the last token, one word at a time.
    std::thread::sleep(Duration::from_millis(5));
    engine.stats()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_arriving_requests_tokens_in_a_full_batch_are_compared() {
        let fixed = vec![vec![1, 2, 3], vec![4, 5, 6]];
        let same = |tokens: [[u32; 3]; 2], full| {
            compared(&tokens.map(|tokens| tokens.to_vec()), full) == compared(&fixed, full)
        };
        assert!(same([[1, 9, 9], [4, 5, 9]], Some(2)));
        assert!(!same([[1, 9, 9], [4, 9, 6]], Some(2)));
        assert!(!same([[1, 9, 9], [4, 5, 6]], None));
        assert_ne!(
            compared(&[vec![1, 2], vec![4, 5, 6]], Some(2)),
            compared(&fixed, Some(2)),
            "one is shorter"
        );
    }
}
