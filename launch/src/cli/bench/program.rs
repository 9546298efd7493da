//! Shared parts of the benchmarks of models: finding the model, loading it, ending.

use crate::cli::bench::budget::{self, Budget, Phase};
use crate::cli::bench::verdict::Reference;
use crate::cli::console::{print_line, tell};
use crate::cli::program::{Failure, prepare, tell_once, with_console};
use crate::cli::run;
use crate::cli::runtime_args::RuntimeArgs;
use crate::engine::{Engine, ModelSpec, Request, RunConfig};
use crate::model::app_error::AppError;
use crate::model::hf_config::ModelConfig;
use crate::model::model_path;
use crate::model::shapes;
use serde_json::{Value, json};
use std::fs::DirBuilder;
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// The JSON object of a benchmark of a loaded model: what was run and where, then `own`, an object with the benchmark's own fields.
pub fn figures(engine: &Engine, what: &str, own: Value) -> Value {
    let info = engine.info();
    let mut object = json!({
        "schema": "mpk-bench/1",
        "what": what,
        "model": info.model.name,
        "backend": info.backend,
        "place": info.place,
        "tuning": info.tuning,
        "graphs_digest": format!("{:016x}", info.graphs_digest),
        "tp": info.ranks,
        "load_s": info.start.load.as_secs_f64(),
    });
    if let (Value::Object(object), Value::Object(own)) = (&mut object, own) {
        object.extend(own);
    }
    object
}

/// The model.json of a shape with random weights. Without `prefill_chunk`, a run takes the default of its device.
///
/// # Errors
/// The name is no shape.
pub fn shape_model(
    name: &str,
    max_batch: u32,
    max_seq_len: u32,
    prefill_chunk: Option<u32>,
) -> Result<Value, AppError> {
    let config = shapes::config(name).ok_or_else(|| {
        AppError::input(format!("unknown shape {name}; the shapes are {}", shapes::NAMES.join(", ")))
    })?;
    let runtime = prefill_chunk.map_or_else(|| json!({}), |rows| json!({"prefill_chunk": rows}));
    Ok(json!({
        "schema": "mpk-model/1",
        "name": name,
        "config": config,
        "weights": {"random": {"seed": 1}},
        "max_batch": max_batch,
        "max_seq_len": max_seq_len,
        "runtime": runtime,
        "generate": {"prompt_tokens": [[1, 2, 3]], "max_new_tokens": 16, "ignore_eos": true}
    }))
}

/// What `--model` names: a file, a folder or a hub name, or a shape with random weights.
///
/// # Errors
/// There is neither a file nor a shape of this name; or the shape cannot be written as JSON.
pub fn model(named: &Path) -> Result<ModelSpec, AppError> {
    let shape = named.to_str().filter(|name| shapes::NAMES.contains(name) && !named.exists());
    match shape {
        Some(name) => ModelSpec::json(&shape_model(name, 1, 1024, None)?.to_string()),
        None if model_path::is_word(named) && !named.exists() => Err(AppError::input(format!(
            "{}: no such file or folder, and no shape of this name; the shapes are {}",
            named.display(),
            shapes::NAMES.join(", ")
        ))),
        None => Ok(ModelSpec::path(named)),
    }
}

/// `count` requests of `length` tokens each. They use low token ids, which every vocabulary has, and differ from each other.
pub fn requests(count: u32, length: u32, new_tokens: u32) -> Vec<Request> {
    (0..count).map(|number| request(number, length, new_tokens)).collect()
}

/// One of these requests.
pub fn request(number: u32, length: u32, new_tokens: u32) -> Request {
    let prompt: Vec<u32> = (0..length).map(|i| (i * 7 + number) % 31).collect();
    Request { ignore_eos: true, ..Request::tokens(prompt, new_tokens) }
}

/// Loads the engine on all ranks. Returns it with the model's configuration, if it has one. On an error, which has been reported, returns
/// the exit status.
///
/// # Errors
/// The exit status.
pub fn load(
    runtime: &RuntimeArgs,
    spec: ModelSpec,
    config: RunConfig,
) -> Result<(Engine, Option<ModelConfig>), i32> {
    prepare(runtime).map_err(|error| tell_once(&error))?;
    let seen: Arc<Mutex<Option<ModelConfig>>> = Arc::default();
    let of_engine = seen.clone();
    let engine = Engine::load_with(spec, with_console(config), move |opened| {
        *of_engine.lock().unwrap_or_else(PoisonError::into_inner) = Some(opened.source.config.clone());
        Ok(())
    });
    // The engine has reported the error.
    let engine = engine.map_err(|error| error.exit_status())?;
    let config = seen.lock().unwrap_or_else(PoisonError::into_inner).take();
    Ok((engine, config))
}

/// Ends the engine on all ranks, then calls `print` with the results. Returns the exit status. A timeline is complete only after the
/// engine has ended.
pub fn finish(
    engine: &Engine,
    done: Result<Value, Failure>,
    print: impl FnOnce(Value) -> Result<(), AppError>,
) -> i32 {
    let (object, done) = match done {
        Ok(object) => (Some(object), Ok(())),
        Err(failure) => (None, Err(failure)),
    };
    match (run::finish(engine, done), object) {
        (0, Some(object)) => print(object).map_or_else(|error| tell_once(&error), |()| 0),
        (status, _) => status,
    }
}

/// What distinguishes a benchmark of a loaded model from another, besides what it measures.
pub struct Benchmark<'a> {
    /// Options on where and how the model is run.
    pub runtime: &'a RuntimeArgs,
    /// All options, which must be the same on all ranks.
    pub options: String,
    /// The file with the expected tokens, if there is one.
    pub reference: Option<&'a Path>,
    /// Report where the time of the last iterations goes.
    pub budget: bool,
    /// Which iterations the report is about.
    pub phase: Phase,
    /// Number of iterations in the timeline that the report is made from.
    pub trace_iterations: u32,
}

/// Loads the model, calls `measure` on rank 0 with the model's configuration, if it has one, and prints one JSON object. Returns the exit
/// status. `contradiction` is what is wrong with the options.
pub fn run_benchmark(
    benchmark: &Benchmark<'_>,
    contradiction: Option<String>,
    spec: impl FnOnce() -> Result<ModelSpec, AppError>,
    measure: impl FnOnce(&Engine, Option<&Reference>, Option<&ModelConfig>) -> Result<Value, Failure>,
) -> i32 {
    let prepared = contradiction.map_or(Ok(()), |problem| Err(AppError::input(problem)));
    let prepared = prepared.and_then(|()| {
        let reference = benchmark.reference.map(Reference::read).transpose()?;
        let scratch = if benchmark.budget { Some(Scratch::new()?) } else { None };
        Ok((spec()?, reference, scratch))
    });
    let (spec, reference, scratch) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => return tell_once(&error),
    };
    let timeline = scratch.as_ref().map(|scratch| scratch.path("timeline.json"));
    let config = RunConfig {
        sampling: false,
        trace: timeline.clone(),
        trace_iterations: Some(benchmark.trace_iterations),
        // Each process has its own path for the timeline, so the configurations differ.
        in_common: vec![("the options".into(), benchmark.options.clone())],
        ..benchmark.runtime.run_config()
    };
    let (engine, model) = match load(benchmark.runtime, spec, config) {
        Ok(loaded) => loaded,
        Err(status) => return status,
    };
    if engine.info().rank > 0 {
        return engine.serve().map_or_else(|error| error.exit_status(), |()| 0);
    }
    let done = measure(&engine, reference.as_ref(), model.as_ref());
    finish(&engine, done, |mut object| {
        if let Some(timeline) = &timeline {
            let budget: Budget = budget::of_file(timeline, benchmark.phase)?;
            tell(budget.table().trim_end());
            object["budget"] = json!(budget);
        }
        print_line(&object.to_string())
    })
}

/// How many names are tried for a temporary folder.
const MOST_SCRATCH: u32 = 1000;

/// A temporary folder of this process, removed with its files on drop.
pub struct Scratch(PathBuf);

impl Scratch {
    /// Creates it in the folder for temporary files. Only this user can read it.
    ///
    /// # Errors
    /// The folder cannot be created.
    pub fn new() -> Result<Scratch, AppError> {
        Scratch::new_in(&std::env::temp_dir())
    }

    fn new_in(parent: &Path) -> Result<Scratch, AppError> {
        let mut number = 0;
        loop {
            let folder = parent.join(format!("mpk-bench-{}-{number}", std::process::id()));
            match DirBuilder::new().mode(0o700).create(&folder) {
                Ok(()) => return Ok(Scratch(folder)),
                // A folder that is already there may be another user's.
                Err(error) if error.kind() == ErrorKind::AlreadyExists && number < MOST_SCRATCH => {
                    number += 1
                }
                Err(error) => {
                    return Err(AppError::environment(format!("{}: {error}", folder.display()))
                        .with_help("set TMPDIR to another folder"));
                }
            }
        }
    }

    /// The path of a file in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A leftover folder only costs disk space.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_neither_file_nor_shape_is_refused_with_the_shapes() {
        let error = model(Path::new("qwen9")).unwrap_err();
        assert!(error.status == 2 && error.message.contains("qwen3-8b"), "{error}");
        for known in ["qwen3-8b", "no/such-model", "no-such-model.json"] {
            assert!(model(Path::new(known)).is_ok(), "{known} is opened later");
        }
    }

    /// Another user may have made it, to read or replace the files in it.
    #[test]
    fn a_temporary_folder_that_is_already_there_is_not_used() {
        use std::os::unix::fs::PermissionsExt;
        let parent = tempfile::tempdir().unwrap();
        let first = parent.path().join(format!("mpk-bench-{}-0", std::process::id()));
        std::fs::create_dir(&first).unwrap();
        let scratch = Scratch::new_in(parent.path()).unwrap();
        assert_ne!(scratch.0, first);
        assert_eq!(scratch.0.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        let path = scratch.0.clone();
        drop(scratch);
        assert!(!path.exists() && first.exists());
        let missing = Scratch::new_in(&parent.path().join("none")).map(drop).unwrap_err();
        assert_eq!(missing.status, 3);
    }
}
