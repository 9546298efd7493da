//! The model to run.

use crate::model::app_error::AppError;
use crate::model::model_json::{ModelJson, Overrides};
use crate::model::model_path;
use serde_json::json;
use std::path::{Path, PathBuf};
use taskgraph::json::{DataSource, DataSources, op_graph_to_value};
use taskgraph::op_graph::Role;
use taskgraph::{OpGraph, Sharding};

/// The model to run: a model or a user graph, with overrides of model.json's values.
#[derive(Clone, Debug)]
pub struct ModelSpec {
    source: Source,
    /// Override the values of model.json.
    pub overrides: Overrides,
}

#[derive(Clone, Debug)]
enum Source {
    Path(PathBuf),
    Json(Box<ModelJson>),
}

impl ModelSpec {
    /// A model.json, a Hugging Face folder, or a hub name such as `Qwen/Qwen3-8B` that is in the Hugging Face cache.
    /// [`Engine::load`](crate::engine::Engine::load) opens it.
    pub fn path(path: impl Into<PathBuf>) -> ModelSpec {
        ModelSpec { source: Source::Path(path.into()), overrides: Overrides::default() }
    }

    /// The text of a model.json. Relative paths in it start from the working directory.
    ///
    /// # Errors
    /// The text is no JSON, or has unknown fields or wrong types.
    pub fn json(text: &str) -> Result<ModelSpec, AppError> {
        let model = ModelJson::parse_unchecked(Path::new("model.json"), text.as_bytes())?;
        Ok(ModelSpec { source: Source::Json(Box::new(model)), overrides: Overrides::default() })
    }

    /// A user graph, with the global values of its inputs, weights and constants.
    ///
    /// # Errors
    /// The graph cannot be written as JSON.
    pub fn graph<'a>(
        graph: &OpGraph,
        values: impl IntoIterator<Item = (&'a str, Vec<f32>)>,
    ) -> Result<ModelSpec, AppError> {
        let sources: DataSources = values
            .into_iter()
            .map(|(name, values)| {
                let values = values.into_iter().map(f64::from).collect();
                (name.to_string(), DataSource::Values { values })
            })
            .collect();
        let mut graph = graph.clone();
        // Passes set the shardings of activations, and the file has none.
        for tensor in graph.tensors.iter_mut().filter(|tensor| tensor.role == Role::Activation) {
            tensor.sharding = Sharding::Replicated;
        }
        let graph = op_graph_to_value(&graph, &sources).map_err(|e| AppError::input(e.to_string()))?;
        let text = json!({"schema": "mpk-model/1", "graph": graph}).to_string();
        let model = ModelJson::parse_unchecked(Path::new("own graph"), text.as_bytes())?;
        Ok(ModelSpec { source: Source::Json(Box::new(model)), overrides: Overrides::default() })
    }

    /// The checked model.json after overrides.
    ///
    /// # Errors
    /// The file or an override is invalid.
    pub fn open(&self) -> Result<ModelJson, AppError> {
        Ok(self.unchecked()?.with(&self.overrides)?)
    }

    /// The same model with its model.json read, so that it is not read again.
    ///
    /// # Errors
    /// The file cannot be read, or is no JSON, or has unknown fields or wrong types.
    pub fn read(&self) -> Result<ModelSpec, AppError> {
        let source = Source::Json(Box::new(self.unchecked()?));
        Ok(ModelSpec { source, overrides: self.overrides.clone() })
    }

    /// The model.json before overrides. Whether its fields are consistent is not checked.
    fn unchecked(&self) -> Result<ModelJson, AppError> {
        Ok(match &self.source {
            Source::Path(path) => model_path::open(path)?,
            Source::Json(model) => (**model).clone(),
        })
    }
}
