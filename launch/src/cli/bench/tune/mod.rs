//! Measures what no table can tell: the best sizes of tasks, lengths of rings and lowerings for one model on one machine. Each
//! candidate of each knob is timed inside the running kernel. The winners are saved, and later runs of the model use them.
//!
//! Knobs are tried one after the other, each starting from the best values so far. A candidate must win twice, so that a moment
//! in which the machine happens to be quiet does not decide.

mod ahead;
mod case;
mod child;

pub use case::Case;

use crate::cli::console::{print_line, tell};
use crate::cli::devices;
use crate::cli::program::tell_once;
use crate::engine::tuning::{Place, Table, Tables, knobs};
use crate::model::app_error::AppError;
use child::{Measured, Workload, run as run_child};
use kernels_cu::gpu;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use taskgraph::words::counted;
use taskgraph::{Backend, Knob, Tuning};

/// A candidate that was tried.
#[derive(Clone, Debug, Default, Serialize)]
struct Trial {
    knob: &'static str,
    value: u64,
    /// Milliseconds per workload.
    ms: BTreeMap<String, f64>,
    /// Its time divided by the time of the best values before it, averaged over the workloads.
    ratio: Option<f64>,
    kept: bool,
    /// True if the tokens equal those of the defaults.
    same_tokens: bool,
    /// True if the graphs equal those of the best values before it.
    same_graphs: bool,
    /// The reason if there is no figure.
    failed: Option<String>,
}

/// Times per workload.
#[derive(Clone, Debug, Default)]
struct Times {
    ms: BTreeMap<String, f64>,
    /// Hashes of the tokens.
    tokens: Vec<Value>,
    /// Digests of the graphs.
    graphs: Vec<Value>,
}

impl Times {
    fn add(&mut self, workload: Workload, measured: &Measured) {
        self.ms.insert(workload.name(), measured.ms);
        self.tokens.push(measured.object["verdict"]["tokens_hash"].clone());
        self.graphs.push(measured.object["graphs_digest"].clone());
    }

    /// The mean ratio of these times to the others.
    fn beside(&self, other: &Times) -> f64 {
        let ratios: Vec<f64> = self.ms.iter().map(|(name, ms)| ms / other.ms[name]).collect();
        ratios.iter().sum::<f64>() / ratios.len().max(1) as f64
    }
}

/// Runs the search and prints one JSON object. Returns the exit status.
pub fn run(case: &Case) -> i32 {
    if case.list {
        return list().map_or_else(|error| tell_once(&error), |()| 0);
    }
    let measure = |workloads: Vec<Workload>| {
        if case.compile_only { compile_only(case, &workloads) } else { tune(case, &workloads) }
    };
    match checked(case).and_then(measure) {
        Ok(object) => print_line(&object.to_string()).map_or_else(|error| tell_once(&error), |()| 0),
        Err(error) => tell_once(&error),
    }
}

fn list() -> Result<(), AppError> {
    for knob in knobs(Backend::Cuda) {
        print_line(&json!({
            "name": knob.name, "default": knob.default, "candidates": knob.candidates, "about": knob.about,
        }).to_string())?;
    }
    Ok(())
}

fn checked(case: &Case) -> Result<Vec<Workload>, AppError> {
    if distributed::launcher::launched_ranks().is_some() {
        return Err(AppError::input("tune starts the ranks itself; run it without mpirun and use --tp N"));
    }
    if !(0.0..100.0).contains(&case.gain) {
        return Err(AppError::input(format!("--gain {}: expected a percentage from 0 to 100", case.gain)));
    }
    let decode = case.batch.iter().map(|&batch| Workload::Decode(batch));
    let workloads: Vec<Workload> = decode.chain(case.prompt.iter().map(|&n| Workload::Prefill(n))).collect();
    if workloads.is_empty() {
        return Err(AppError::input("nothing to time; give --batch or --prompt"));
    }
    Ok(workloads)
}

fn compile_only(case: &Case, workloads: &[Workload]) -> Result<Value, AppError> {
    let row = devices::named("--device", &case.device)?;
    let until = Instant::now() + Duration::from_secs(u64::from(case.limit));
    let (compiled, failed) = ahead::compile(case, workloads, row, &choose(case, Backend::Cuda)?, until)?;
    Ok(
        json!({"schema": "mpk-bench/1", "what": "tune", "device": row.name, "compiled": compiled, "failed": failed}),
    )
}

fn tune(case: &Case, workloads: &[Workload]) -> Result<Value, AppError> {
    let until = Instant::now() + Duration::from_secs(u64::from(case.limit));
    let tables = if case.dry_run { None } else { Some(Tables::from_environment()?) };
    let (base, place, backend) = base(case, workloads, until)?;
    let mut search = Search { case, workloads, until, times: base.clone(), base, best: Tuning::default() };
    let mut trials = Vec::new();
    let chosen = choose(case, backend)?;
    if backend == Backend::Cuda {
        let begin = Instant::now();
        let row = devices::named("this machine's GPU", &place.device)?;
        let (compiled, _) = ahead::compile(case, workloads, row, &chosen, until)?;
        tell(format_args!(
            "tune: compiled {} in {:.0} s",
            counted(compiled, "kernel"),
            begin.elapsed().as_secs_f64()
        ));
    }
    'knobs: for knob in chosen {
        let from = search.best.of(knob);
        for &value in knob.candidates.iter().filter(|&&value| value != from) {
            if Instant::now() >= until {
                tell(format_args!(
                    "tune: the time limit (--limit {}) is over; the best values so far are saved",
                    case.limit
                ));
                break 'knobs;
            }
            let trial = search.attempt(knob, value);
            tell(format_args!("tune: {}", line(&trial)));
            trials.push(trial);
        }
    }
    let Search { base, best, times, .. } = search;
    let measured = BTreeMap::from([
        ("defaults_ms".to_string(), json!(base.ms)),
        ("tuned_ms".to_string(), json!(times.ms)),
        ("context".to_string(), json!(case.context)),
    ]);
    let table = Table::new(place.clone(), best.clone(), measured);
    let kept = tables.map(|tables| tables.keep(&table)).transpose()?;
    Ok(json!({
        "schema": "mpk-bench/1",
        "what": "tune",
        "place": place,
        "defaults_ms": base.ms,
        "tuned_ms": times.ms,
        "values": best,
        "table": kept,
        "trials": trials,
    }))
}

/// The times with the defaults, and the place that they were measured in.
fn base(case: &Case, workloads: &[Workload], until: Instant) -> Result<(Times, Place, Backend), AppError> {
    let mut times = Times::default();
    let mut object = Value::Null;
    for &workload in workloads {
        let measured = run_child(case, workload, &Tuning::default(), until).map_err(|error| AppError {
            message: format!("{} with the defaults: {}", workload.name(), error.message),
            ..error
        })?;
        times.add(workload, &measured);
        object = measured.object;
    }
    let place = serde_json::from_value(object["place"].clone())
        .map_err(|_| AppError::input(format!("{}: a user graph has nothing to tune", case.model_name())))?;
    let backend = if object["backend"] == "cuda" { Backend::Cuda } else { Backend::Cpu };
    Ok((times, place, backend))
}

/// The knobs to try.
fn choose(case: &Case, backend: Backend) -> Result<Vec<&'static Knob>, AppError> {
    let all = knobs(backend);
    if let Some(wrong) =
        case.only.iter().find(|name| !all.iter().any(|knob| knob.name.starts_with(name.as_str())))
    {
        let names: Vec<&str> = all.iter().map(|knob| knob.name).collect();
        return Err(AppError::input(format!(
            "--only {wrong}: {} have no such knob; their knobs are {}",
            if backend == Backend::Cuda { "GPUs" } else { "CPUs" },
            names.join(", ")
        )));
    }
    let wanted = |knob: &&&Knob| {
        case.only.is_empty() || case.only.iter().any(|name| knob.name.starts_with(name.as_str()))
    };
    Ok(all.iter().filter(wanted).copied().collect())
}

/// The state of the search.
struct Search<'a> {
    case: &'a Case,
    workloads: &'a [Workload],
    until: Instant,
    /// Times with the defaults.
    base: Times,
    best: Tuning,
    /// Times with the best values, from their latest measurement.
    times: Times,
}

impl Search<'_> {
    fn measure(&self, values: &Tuning) -> Result<Times, AppError> {
        let mut times = Times::default();
        for &workload in self.workloads {
            let measured = run_child(self.case, workload, values, self.until)?;
            times.add(workload, &measured);
        }
        Ok(times)
    }

    /// Times a candidate. If it wins, the candidate and the best values are timed again, side by side. If it wins again, it becomes
    /// the best.
    fn attempt(&mut self, knob: &'static Knob, value: u64) -> Trial {
        let mut trial = Trial { knob: knob.name, value, ..Trial::default() };
        let mut values = self.best.clone();
        values.set(knob.name, value);
        let in_kernel = gpu::KNOBS.iter().any(|of_kernel| of_kernel.name == knob.name);
        match self.compare(&values, in_kernel) {
            Ok((found, rival, kept)) => {
                trial.ratio = Some(found.beside(&rival));
                trial.kept = kept;
                trial.same_tokens = found.tokens == self.base.tokens;
                trial.same_graphs = found.graphs == rival.graphs;
                trial.ms.clone_from(&found.ms);
                if kept {
                    (self.best, self.times) = (values, found);
                }
            }
            Err(error) => trial.failed = Some(error.message),
        }
        trial
    }

    /// Returns the candidate's times, the times that it is compared with, and whether it won. If the knob is not compiled into the
    /// kernel and the graphs stay the same, a difference is chance.
    fn compare(&mut self, values: &Tuning, in_kernel: bool) -> Result<(Times, Times, bool), AppError> {
        let enough = 1.0 - self.case.gain / 100.0;
        let first = self.measure(values)?;
        let changes = in_kernel || first.graphs != self.times.graphs;
        if !changes || first.beside(&self.times) > enough {
            return Ok((first, self.times.clone(), false));
        }
        let again = self.measure(values)?;
        self.times = self.measure(&self.best)?;
        let won = again.beside(&self.times) <= enough;
        Ok((again, self.times.clone(), won))
    }
}

/// One line of output for a trial.
fn line(trial: &Trial) -> String {
    let times: Vec<String> = trial.ms.iter().map(|(name, ms)| format!("{name} {ms:.4} ms")).collect();
    let verdict = match (&trial.failed, trial.kept) {
        (Some(problem), _) => format!("no figure: {problem}"),
        (None, true) => "kept".into(),
        (None, false) if trial.same_graphs => "not faster: the graphs are the same".into(),
        (None, false) => "not faster".into(),
    };
    format!("{} {}: {} {verdict}", trial.knob, trial.value, times.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(ms: &[(&str, f64)]) -> Times {
        Times { ms: ms.iter().map(|(name, ms)| (name.to_string(), *ms)).collect(), ..Times::default() }
    }

    #[test]
    fn every_workload_counts_the_same() {
        let (old, new) = (
            times(&[("decode-1", 4.0), ("prefill-512", 100.0)]),
            times(&[("decode-1", 2.0), ("prefill-512", 110.0)]),
        );
        assert!((new.beside(&old) - 0.8).abs() < 1e-9);
        assert!((old.beside(&old) - 1.0).abs() < 1e-9);
    }
}
