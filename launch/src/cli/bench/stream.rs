//! Where the time of a decode step goes: the real graph without a part of its work, compared with a plain read of the same
//! number of bytes.
//!
//! On a GPU each selection of parts is a separate kernel, and each launch runs one of them (`distributed::probe`). The
//! tokens of the ordinary kernel are checked first, and again at the end. The tokens of the other kernels mean nothing.
//! Those kernels count the bytes of weights that they stream instead; each step must stream what the task graph says.

use crate::cli::bench::decode;
use crate::cli::bench::floor::{Bytes, floor};
use crate::cli::bench::program::{finish, load};
use crate::cli::bench::samples::Samples;
use crate::cli::bench::verdict::Answers;
use crate::cli::choices::Placement;
use crate::cli::console::print_line;
use crate::cli::program::{Failure, tell_once};
use crate::engine::{Engine, RunConfig};
use crate::model::app_error::AppError;
use crate::model::hf_config::ModelConfig;
use clap::ValueEnum;
use distributed::probe::{LeftOut, Probe};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Largest batch whose products can be left out. Larger batches use other products.
const MOST_BATCH: u32 = 16;
/// The kernel ends this soon after its work, so that the next launch can run another kernel.
const IDLE_EXIT: Duration = Duration::from_millis(2);
/// The host must report the end of the kernel within this time.
const ENDED: Duration = Duration::from_secs(20);

/// A part of the work that can be left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Weights are streamed, but not multiplied.
    Products,
    /// Tasks begin at once, without waiting for others.
    Waits,
    /// No partial sums are sent or awaited.
    Allreduces,
}

impl Part {
    /// The bit in kernels-cu/src/gpu/config.cuh.
    fn bit(self) -> LeftOut {
        match self {
            Part::Products => 1,
            Part::Waits => 2,
            Part::Allreduces => 4,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Part::Products => "products",
            Part::Waits => "waits",
            Part::Allreduces => "allreduces",
        }
    }
}

/// Parts that are left out together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection(Vec<Part>);

impl Selection {
    /// Parses parts that are separated by `+`.
    fn parse(text: &str) -> Result<Selection, String> {
        let mut parts: Vec<Part> = Vec::new();
        for name in text.split('+') {
            let part = Part::from_str(name, false)
                .map_err(|_| format!("`{name}` is not one of products, waits and allreduces"))?;
            if parts.contains(&part) {
                return Err(format!("`{name}` is given twice"));
            }
            parts.push(part);
        }
        Ok(Selection(parts))
    }

    fn left_out(&self) -> LeftOut {
        self.0.iter().map(|part| part.bit()).sum()
    }

    /// The default selections.
    fn usual(ranks: u32) -> Vec<Selection> {
        use Part::{Allreduces, Products, Waits};
        let mut all = vec![vec![Products], vec![Waits], vec![Products, Waits]];
        if ranks > 1 {
            all.extend([vec![Allreduces], vec![Products, Waits, Allreduces]]);
        }
        all.into_iter().map(Selection).collect()
    }
}

/// What is timed.
#[derive(Clone, Debug, clap::Args)]
pub struct Case {
    /// GPU: work to leave out: `products`, `waits`, `allreduces`, or several such as `products+waits`. May be given
    /// several times. Default: products, waits, and both; with several ranks also allreduces, alone and with both.
    #[arg(long, value_name = "PARTS", value_parser = Selection::parse)]
    pub without: Vec<Selection>,
    #[command(flatten)]
    #[allow(missing_docs, reason = "would be shown as help")]
    pub decode: decode::Case,
}

impl Case {
    fn contradiction(&self) -> Option<String> {
        let decode = &self.decode;
        if decode.batch > MOST_BATCH {
            return Some(format!("--batch {}: expected at most {MOST_BATCH}", decode.batch));
        }
        if decode.budget {
            return Some(
                "--budget works with the ordinary kernel only; use `mpk-bench decode --budget`".into(),
            );
        }
        if decode.runtime.placement.is_some_and(|placement| placement != Placement::Static) {
            return Some(
                "--placement dynamic: schedulers cannot leave out waits; use --placement static".into(),
            );
        }
        decode.contradiction()
    }
}

/// Runs the benchmark and prints one JSON object, on rank 0. Returns the exit status.
pub fn run(case: &Case) -> i32 {
    let prepared = case.contradiction().map_or(Ok(()), |problem| Err(AppError::input(problem)));
    let mut spec = match prepared.and_then(|()| case.decode.spec()) {
        Ok(spec) => spec,
        Err(error) => return tell_once(&error),
    };
    spec.overrides.placement = Some(Placement::Static.into());
    let ranks = distributed::launcher::launched_ranks().unwrap_or(1);
    let selections = if case.without.is_empty() { Selection::usual(ranks) } else { case.without.clone() };
    let repeats = case.decode.repeats.max(2) as usize;
    let schedule = (0..=selections.len()).flat_map(|number| std::iter::repeat_n(number, repeats));
    let kernels = selections.iter().map(Selection::left_out).collect();
    let probe = Arc::new(Probe::new(case.decode.batch, kernels, schedule.collect()));
    let config = RunConfig {
        sampling: false,
        idle_exit: Some(IDLE_EXIT),
        probe: Some(probe.clone()),
        in_common: vec![("the options".into(), format!("{case:?}"))],
        ..case.decode.runtime.run_config()
    };
    let (engine, model) = match load(&case.decode.runtime, spec, config) {
        Ok(loaded) => loaded,
        Err(status) => return status,
    };
    if engine.info().rank > 0 {
        return engine.serve().map_or_else(|error| error.exit_status(), |()| 0);
    }
    let done = if engine.info().backend == "cuda" {
        measure(case, &engine, &selections, &probe)
    } else if case.without.is_empty() {
        measure_cpu(case, &engine, model.as_ref())
    } else {
        let what = "--without needs a GPU: the CPU target cannot leave out work. Without this option, the whole step and a plain read are measured";
        Err(AppError::input(what).into())
    };
    finish(&engine, done, |object| print_line(&object.to_string()))
}

/// Milliseconds per step in one repetition, and the number of its steps.
fn once(case: &Case, engine: &Engine, answers: &mut Answers) -> Result<(f64, u64), Failure> {
    let before = engine.stats();
    answers.take(engine, case.decode.requests(engine)?)?;
    let after = engine.stats();
    let steps = after.full_batch_steps - before.full_batch_steps;
    if steps == 0 {
        return Err(AppError::failed("no figures: no step had a full batch").into());
    }
    Ok((1e3 * (after.full_batch - before.full_batch).as_secs_f64() / steps as f64, steps))
}

/// The same in a separate launch, and the bytes that it streamed.
fn launch(
    case: &Case,
    engine: &Engine,
    probe: &Probe,
    answers: &mut Answers,
) -> Result<(f64, u64, Option<u64>), Failure> {
    let launches = probe.found().streamed.len();
    let (ms, steps) = once(case, engine, answers)?;
    let begin = Instant::now();
    loop {
        let streamed = probe.found().streamed;
        if streamed.len() > launches + 1 {
            return Err(
                AppError::failed("no figures: the kernel was launched twice for one repetition").into()
            );
        }
        if let Some(&streamed) = streamed.get(launches) {
            return Ok((ms, steps, streamed));
        }
        if begin.elapsed() > ENDED {
            return Err(AppError::failed("no figures: the kernel did not end after the last request").into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn measure(case: &Case, engine: &Engine, selections: &[Selection], probe: &Probe) -> Result<Value, Failure> {
    let repeats = case.decode.repeats.max(2);
    let mut right = Answers::default();
    let mut times = Vec::new();
    for _ in 0..repeats {
        times.push(launch(case, engine, probe, &mut right)?.0);
    }
    let ordinary = Samples::of(times);
    let mut without = Vec::new();
    for selection in selections {
        let mut times = Vec::new();
        for _ in 0..repeats {
            let (ms, steps, streamed) = launch(case, engine, probe, &mut Answers::default())?;
            check_bytes(selection, probe.found().step_bytes, steps, case.decode.batch, streamed)?;
            times.push(ms);
        }
        let parts: Vec<&str> = selection.0.iter().map(|part| part.name()).collect();
        without.push(json!({
            "without": parts,
            "ms": Samples::of(times),
            "tokens": "without a meaning",
            "streamed": "the graph's bytes in every step",
        }));
    }
    let again = launch(case, engine, probe, &mut right)?.0;
    let verdict = right.verdict(None)?;
    let found = probe.found();
    let read = Samples::of(found.read_s.iter().map(|s| 1e3 * s).collect());
    let rate = read.as_ref().map(|read| 1e3 * found.read_bytes as f64 / read.median);
    let info = engine.info();
    Ok(json!({
        "schema": "mpk-bench/1",
        "what": "stream",
        "model": info.model.name,
        "backend": info.backend,
        "tp": info.ranks,
        "batch": case.decode.batch,
        "context": case.decode.context,
        "allreduce": info.model.runtime.allreduce,
        // Rank 0's figures.
        "step_bytes": found.step_bytes,
        "read": {"bytes": found.read_bytes, "ms": read, "bytes_per_second": rate},
        "ordinary": {"ms": ordinary, "ms_at_the_end": again},
        "variants": without,
        "verdict": verdict,
    }))
}

/// Checks that the kernel streamed what the graph says in each step. While prompts enter, a step with a full batch may
/// still count as a prefill step. That happens at most once per prompt.
fn check_bytes(
    selection: &Selection,
    step: u64,
    steps: u64,
    batch: u32,
    streamed: Option<u64>,
) -> Result<(), AppError> {
    let streamed = streamed.unwrap_or(0);
    if step > 0
        && streamed.is_multiple_of(step)
        && (steps..=steps + u64::from(batch)).contains(&(streamed / step))
    {
        return Ok(());
    }
    let parts: Vec<&str> = selection.0.iter().map(|part| part.name()).collect();
    Err(AppError::failed(format!(
        "no figures: without {}, the kernel streamed {streamed} bytes in {steps} steps, but the graph has {step} bytes per step",
        parts.join(" and ")
    )))
}

/// Measures the whole step, and a plain read of its weights by as many threads.
fn measure_cpu(case: &Case, engine: &Engine, model: Option<&ModelConfig>) -> Result<Value, Failure> {
    let mut answers = Answers::default();
    let mut times = Vec::new();
    for _ in 0..case.decode.repeats.max(2) {
        times.push(once(case, engine, &mut answers)?.0);
    }
    let verdict = answers.verdict(None)?;
    let info = engine.info();
    let model = model.ok_or_else(|| AppError::input("a user graph has no decode step"))?;
    let bytes =
        Bytes { cache: 0, ..Bytes::of_step(model, info.ranks, case.decode.batch, case.decode.context) };
    let cores = distributed::World::single().cores().own.len().max(1) as u32;
    let workers = case.decode.runtime.workers.unwrap_or(cores / info.ranks).max(1);
    let threads = (workers * info.ranks).min(cores) as usize;
    let read = floor(bytes, info.backend, info.ranks, threads, case.decode.read_rate)?;
    Ok(json!({
        "schema": "mpk-bench/1",
        "what": "stream",
        "model": info.model.name,
        "backend": info.backend,
        "tp": info.ranks,
        "batch": case.decode.batch,
        "context": case.decode.context,
        "allreduce": info.model.runtime.allreduce,
        "step_bytes": bytes.weights,
        "read": read,
        "ordinary": {"ms": Samples::of(times)},
        "variants": [],
        "verdict": verdict,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selections_are_parts_that_are_named_once() {
        let selection = Selection::parse("products+waits").unwrap();
        assert_eq!((selection.0.len(), selection.left_out()), (2, 3));
        assert_eq!(Selection::parse("allreduces").unwrap().left_out(), 4);
        assert!(Selection::parse("products+products").unwrap_err().contains("twice"));
        assert!(Selection::parse("norms").unwrap_err().contains("norms"));
        assert_eq!(Selection::usual(1).len(), 3);
        assert_eq!(Selection::usual(2).last().unwrap().left_out(), 7);
    }

    #[test]
    fn bytes_must_be_whole_steps_of_the_graph() {
        let selection = Selection(vec![Part::Waits]);
        let check = |steps, streamed| check_bytes(&selection, 100, steps, 1, streamed);
        assert!(check(5, Some(500)).is_ok());
        assert!(check(5, Some(600)).is_ok(), "a step beside a prompt");
        for wrong in [Some(499), Some(400), Some(700), Some(0), None] {
            assert!(check(5, wrong).unwrap_err().to_string().contains("5 steps"));
        }
    }
}
