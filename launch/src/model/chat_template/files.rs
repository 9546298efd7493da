//! Finds a checkpoint's chat template.

use crate::model::error::InputError;
use crate::model::files;
use crate::model::json;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// A template and its file.
pub struct Found {
    /// The file that holds it.
    pub path: PathBuf,
    /// Its text.
    pub text: String,
    /// `bos_token` and the like.
    pub special_tokens: Map<String, Value>,
}

/// `chat_template.jinja`, otherwise `chat_template` of `chat_template.json` or `tokenizer_config.json`. transformers
/// uses the same order.
pub fn find(folder: &Path) -> Result<Option<Found>, InputError> {
    let config_path = folder.join("tokenizer_config.json");
    let config = json::object_if_there(&config_path)?.unwrap_or_default();
    let special_tokens = special_tokens(folder, &config)?;
    let found = |path: PathBuf, text| Ok(Some(Found { path, text, special_tokens }));
    let jinja = folder.join("chat_template.jinja");
    if let Some(bytes) = files::read_if_there(&jinja)? {
        let text = String::from_utf8(bytes)
            .map_err(|e| InputError::chat_template(&jinja, format!("is not UTF-8: {e}")))?;
        return found(jinja, text);
    }
    let processor_path = folder.join("chat_template.json");
    for (path, object) in
        [(processor_path.clone(), json::object_if_there(&processor_path)?), (config_path, Some(config))]
    {
        if let Some(value) = object.as_ref().and_then(|object| object.get("chat_template")) {
            let text = choose(&path, value)?;
            return found(path, text);
        }
    }
    Ok(None)
}

/// The template, or from a list of named templates the one named `default`.
fn choose(path: &Path, value: &Value) -> Result<String, InputError> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Array(list) if list.is_empty() => {
            Err(InputError::chat_template(path, "`chat_template` is an empty list".into()))
        }
        Value::Array(list) => {
            let named = |entry: &&Value| entry["name"].as_str() == Some("default");
            let default = list.iter().find(named).and_then(|entry| entry["template"].as_str());
            default.map(String::from).ok_or_else(|| {
                let names: Vec<&str> = list.iter().filter_map(|entry| entry["name"].as_str()).collect();
                let problem =
                    format!("`chat_template` has no template named \"default\", only {}", names.join(", "));
                InputError::chat_template(path, problem)
            })
        }
        other => {
            let problem = format!(
                "`chat_template` must be text or a list of named templates, found {}",
                json::kind(other)
            );
            Err(InputError::chat_template(path, problem))
        }
    }
}

/// The special tokens: each `NAME_token` of tokenizer_config.json, otherwise of special_tokens_map.json. A token is
/// text, or an object with `content`.
fn special_tokens(folder: &Path, config: &Map<String, Value>) -> Result<Map<String, Value>, InputError> {
    let map = json::object_if_there(&folder.join("special_tokens_map.json"))?.unwrap_or_default();
    let mut tokens = Map::new();
    for (name, value) in map.iter().chain(config) {
        if !name.ends_with("_token") {
            continue;
        }
        let text = value.as_str().or_else(|| value.get("content").and_then(Value::as_str));
        if let Some(text) = text {
            tokens.insert(name.clone(), Value::String(text.into()));
        }
    }
    Ok(tokens)
}
