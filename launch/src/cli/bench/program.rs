//! Shared parts of the benchmarks of models: finding the model, loading it, ending.

use crate::cli::program::{Failure, prepare, tell_once, with_console};
use crate::cli::run;
use crate::cli::runtime_args::RuntimeArgs;
use crate::engine::{Engine, ModelSpec, Request, RunConfig};
use crate::model::app_error::AppError;
use crate::model::hf_config::ModelConfig;
use crate::model::shapes;
use serde_json::{Value, json};
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
    let is_single_word = named.components().count() == 1 && named.extension().is_none_or(|end| end != "json");
    match shape {
        Some(name) => ModelSpec::json(&shape_model(name, 1, 1024, None)?.to_string()),
        None if is_single_word && !named.exists() => Err(AppError::input(format!(
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

/// A temporary folder of this process, removed with its files on drop.
pub struct Scratch(PathBuf);

impl Scratch {
    /// Creates it in the folder for temporary files.
    ///
    /// # Errors
    /// The folder cannot be created.
    pub fn new() -> Result<Scratch, AppError> {
        let folder = std::env::temp_dir().join(format!("mpk-bench-{}", std::process::id()));
        std::fs::create_dir_all(&folder).map_err(|error| {
            AppError::environment(format!("{}: {error}", folder.display()))
                .with_help("set TMPDIR to another folder")
        })?;
        Ok(Scratch(folder))
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
}
