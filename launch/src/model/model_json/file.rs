//! The file: its fields, and how they are read and checked.

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::overrides::Overrides;
use super::runtime::{AllreduceDtype, Embedding, Kv, PrefixCache, Runtime};
use crate::model::sampling::SamplingOptions;
use crate::model::{error::InputError, files, json};

/// The schema that this program reads.
pub const SCHEMA: &str = "mpk-model/1";
/// The default of `generate.max_new_tokens`.
pub const DEFAULT_MAX_NEW_TOKENS: u32 = 64;
/// The default of `max_batch`.
pub const DEFAULT_MAX_BATCH: u32 = 8;
/// The largest accepted `max_batch`.
pub const LARGEST_MAX_BATCH: u32 = 4096;
/// The largest accepted `runtime.workers`.
pub const LARGEST_WORKERS: u32 = 4096;
/// Maximum number of stop strings per request.
pub const MOST_STOPS: usize = 32;
/// Maximum length of a stop string in bytes.
pub const LONGEST_STOP: usize = 1024;
/// The default of `page_size`.
pub const DEFAULT_PAGE_SIZE: u32 = 64;
/// The default of `max_seq_len`, unless the model's own limit is smaller.
pub const DEFAULT_MAX_SEQ_LEN: u32 = 4096;
/// The default of `runtime.prefill_chunk`, if that is more than `max_batch`.
pub const DEFAULT_PREFILL_CHUNK: u32 = 256;
/// The default on a GPU whose tensor cores use wide tiles (Hopper): enough rows for whole waves.
pub const DEFAULT_WIDE_PREFILL_CHUNK: u32 = 2048;

/// A model.json file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "mpk-model/1")]
pub struct ModelJson {
    /// Always "mpk-model/1".
    #[schemars(extend("const" = "mpk-model/1"))]
    pub schema: String,
    /// A name for logs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// A folder with a Hugging Face checkpoint. A relative path starts at the folder of model.json.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<PathBuf>,
    /// Instead of `checkpoint`: a Hugging Face config.json.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<Map<String, Value>>,
    /// The weights for `config` or `graph`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights: Option<Weights>,
    /// Instead of `checkpoint` and `config`: an op graph of your own. Beside it, `name`, `weights`, `runtime.placement`,
    /// `runtime.allreduce`, `runtime.workers`, `runtime.nodes` and `generate.prompt_tokens` have an effect; others are refused.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "taskgraph::json::distinct_keys"
    )]
    pub graph: Option<Value>,
    /// Maximum number of requests that run at once. Default: 8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 4096))]
    pub max_batch: Option<u32>,
    /// Maximum number of tokens of one request, prompt and answer together. Default: 4096, or the model's own limit if
    /// that is smaller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub max_seq_len: Option<u32>,
    /// Number of positions in one page of the KV cache, a power of two. With at least 8, prompts are faster on Hopper. Default: 64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub page_size: Option<u32>,
    /// How to run.
    #[serde(default)]
    pub runtime: Runtime,
    /// What to generate.
    #[serde(default)]
    pub generate: Generate,
    /// The path of this file, for messages and relative paths.
    #[serde(skip)]
    #[schemars(skip)]
    pub path: PathBuf,
}

/// The source of the weights if there is no checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Weights {
    /// Random weights, the same for every number of ranks and every backend.
    pub random: RandomSeed,
}

/// The seed of random weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RandomSeed {
    /// Any 64-bit number.
    pub seed: u64,
}

/// What to generate.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Generate {
    /// Prompts as text. They come before `prompt_tokens`.
    pub prompts: Vec<String>,
    /// Prompts as lists of token ids. In a run of an op graph, several lists are the rows of several sequences.
    pub prompt_tokens: Vec<Vec<u32>>,
    /// Maximum number of new tokens of a request. Default: 64.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub max_new_tokens: Option<u32>,
    /// Continue after an end-of-sequence token.
    pub ignore_eos: bool,
    /// An answer ends before the first of these texts. At most 32 texts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub stop: Vec<String>,
    /// Always take the highest logit. Ignores the sampling values of the checkpoint's generation_config.json.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub greedy: bool,
    /// Divides the logits. 0 takes the highest logit. Default: the value of generation_config.json.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 100))]
    pub temperature: Option<f64>,
    /// Sample from the k highest logits only. 0 means all. At most 1024 together with `top_p`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<u32>,
    /// Sample from the smallest set of most likely tokens whose probabilities add up to this.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 1))]
    pub top_p: Option<f64>,
    /// Sample only tokens that have at least this share of the highest probability.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1))]
    pub min_p: Option<f64>,
    /// For each token that is already in the prompt or the answer, divides a positive logit and multiplies a negative one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.01, max = 100))]
    pub repetition_penalty: Option<f64>,
    /// Subtracted from the logit of every token that is already in the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = -2, max = 2))]
    pub presence_penalty: Option<f64>,
    /// Subtracted from a token's logit for each time that the token is already in the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = -2, max = 2))]
    pub frequency_penalty: Option<f64>,
    /// Seed of the random numbers. The same seed gives the same tokens on any number of ranks. By default each run uses
    /// another seed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
}

impl Generate {
    /// The sampling values.
    pub fn sampling(&self) -> SamplingOptions {
        SamplingOptions {
            greedy: self.greedy,
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: self.seed,
        }
    }
}

impl ModelJson {
    /// Reads and checks `path`.
    ///
    /// # Errors
    /// The file is missing, unreadable or not JSON (the error names line and column); or a field is unknown, missing, of
    /// the wrong type or out of range (the error names its path).
    pub fn read(path: &Path) -> Result<Self, InputError> {
        Self::parse(path, &files::read(path)?)
    }

    /// Like [`ModelJson::read`], but without the check that fields are consistent, because some may be replaced.
    /// [`ModelJson::with`] makes that check.
    ///
    /// # Errors
    /// Those of [`ModelJson::read`].
    pub fn read_unchecked(path: &Path) -> Result<Self, InputError> {
        Self::parse_unchecked(path, &files::read(path)?)
    }

    /// The model in a Hugging Face folder, with the defaults of all other fields.
    pub fn of_checkpoint(folder: &Path) -> Self {
        ModelJson {
            schema: SCHEMA.into(),
            name: folder.file_name().map(|name| name.to_string_lossy().into_owned()),
            // Absolute, because a relative path would start at that folder.
            checkpoint: Some(std::path::absolute(folder).unwrap_or_else(|_| folder.into())),
            config: None,
            weights: None,
            graph: None,
            max_batch: None,
            max_seq_len: None,
            page_size: None,
            runtime: Runtime::default(),
            generate: Generate::default(),
            path: folder.into(),
        }
    }

    /// Checks the text of a model.json. `path` is used in messages and for relative paths.
    ///
    /// # Errors
    /// Those of [`ModelJson::read`].
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self, InputError> {
        Self::parse_unchecked(path, bytes)?.with(&Overrides::default())
    }

    /// Like [`ModelJson::parse`], but without the check that fields are consistent. [`ModelJson::with`] makes that check.
    ///
    /// # Errors
    /// Those of [`ModelJson::parse`].
    pub fn parse_unchecked(path: &Path, bytes: &[u8]) -> Result<Self, InputError> {
        let file = path.display().to_string();
        let object = json::parse_object(&file, bytes)?;
        match object.get("schema") {
            Some(Value::String(schema)) if schema == SCHEMA => {}
            Some(other) => {
                let problem = format!("expected \"{SCHEMA}\", found {}", json::kind(other));
                return Err(InputError::field(&file, "schema", problem));
            }
            None if object.contains_key("architectures") => {
                let problem = "this is a Hugging Face config.json, not a model.json; give its folder instead";
                return Err(InputError::field(&file, ".", problem));
            }
            None => {
                let problem = format!("missing; write \"schema\": \"{SCHEMA}\"");
                return Err(InputError::field(&file, "schema", problem));
            }
        }
        // serde would take a list of a struct's fields in order.
        for name in ["weights", "runtime", "generate"] {
            if object.get(name).is_some_and(Value::is_array) {
                return Err(InputError::field(&file, name, "invalid type: list, expected an object"));
            }
        }
        let mut deserializer = serde_json::Deserializer::from_slice(bytes);
        let mut model: Self = serde_path_to_error::deserialize(&mut deserializer).map_err(|e| {
            let place = taskgraph::json::clean(&e.path().to_string());
            let inner = e.into_inner();
            let words = taskgraph::json::plain(&json::without_position(&inner));
            let problem = format!("{words} (line {}, column {})", inner.line(), inner.column());
            InputError::field(&file, place, problem)
        })?;
        model.path = path.to_path_buf();
        Ok(model)
    }

    /// Replaces values by `overrides`, and checks the result as a whole.
    ///
    /// # Errors
    /// Fields are out of range or inconsistent.
    pub fn with(mut self, overrides: &Overrides) -> Result<ModelJson, InputError> {
        // Before the overrides: a program knows best how to name its own options without effect.
        if let (Some(field), None, None) = (self.without_effect(), &self.checkpoint, &self.config) {
            let problem = "has no effect on a graph of your own, which has its own sizes and no tokens to generate; leave it out";
            return Err(InputError::field(&self.file(), field, problem));
        }
        let put = |field: &mut Option<u32>, value: Option<u32>| *field = value.or(*field);
        put(&mut self.max_batch, overrides.max_batch);
        put(&mut self.max_seq_len, overrides.max_seq_len);
        put(&mut self.runtime.workers, overrides.workers);
        put(&mut self.runtime.prefill_chunk, overrides.prefill_chunk);
        put(&mut self.generate.max_new_tokens, overrides.max_new_tokens);
        self.runtime.placement = overrides.placement.map(Into::into).or(self.runtime.placement);
        self.runtime.prefill_share = overrides.prefill_share.or(self.runtime.prefill_share);
        self.runtime.kv = overrides.kv.unwrap_or(self.runtime.kv);
        self.runtime.prefix_cache = overrides.prefix_cache.unwrap_or(self.runtime.prefix_cache);
        self.runtime.allreduce = overrides.allreduce.unwrap_or(self.runtime.allreduce);
        self.runtime.allreduce_dtype = overrides.allreduce_dtype.unwrap_or(self.runtime.allreduce_dtype);
        self.generate.ignore_eos |= overrides.ignore_eos;
        if let Some(stop) = &overrides.stop {
            self.generate.stop.clone_from(stop);
        }
        self.check(overrides)?;
        Ok(self)
    }

    /// The first field beside `graph` that has no effect on it. The value of a field that has a default says nothing.
    fn without_effect(&self) -> Option<&'static str> {
        self.graph.as_ref()?;
        // In full, so that a new field is decided on here.
        let Runtime {
            placement: _,
            allreduce: _,
            allreduce_dtype,
            embedding,
            prefill_chunk,
            prefill_share,
            kv,
            prefix_cache,
            kv_pages,
            workers: _,
            nodes: _,
        } = &self.runtime;
        let Generate {
            prompts,
            // The rows of an embedding, or of several sequences.
            prompt_tokens: _,
            max_new_tokens,
            ignore_eos,
            stop,
            greedy,
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            seed,
        } = &self.generate;
        let given = [
            ("max_batch", self.max_batch.is_some()),
            ("max_seq_len", self.max_seq_len.is_some()),
            ("page_size", self.page_size.is_some()),
            ("runtime.allreduce_dtype", *allreduce_dtype != AllreduceDtype::default()),
            ("runtime.embedding", *embedding != Embedding::default()),
            ("runtime.prefill_chunk", prefill_chunk.is_some()),
            ("runtime.prefill_share", prefill_share.is_some()),
            ("runtime.kv", *kv != Kv::default()),
            ("runtime.prefix_cache", *prefix_cache != PrefixCache::default()),
            ("runtime.kv_pages", kv_pages.is_some()),
            ("generate.prompts", !prompts.is_empty()),
            ("generate.max_new_tokens", max_new_tokens.is_some()),
            ("generate.ignore_eos", *ignore_eos),
            ("generate.stop", !stop.is_empty()),
            ("generate.greedy", *greedy),
            ("generate.temperature", temperature.is_some()),
            ("generate.top_k", top_k.is_some()),
            ("generate.top_p", top_p.is_some()),
            ("generate.min_p", min_p.is_some()),
            ("generate.repetition_penalty", repetition_penalty.is_some()),
            ("generate.presence_penalty", presence_penalty.is_some()),
            ("generate.frequency_penalty", frequency_penalty.is_some()),
            ("generate.seed", seed.is_some()),
        ];
        given.into_iter().find_map(|(field, given)| given.then_some(field))
    }

    /// Checks the ranges and the consistency of the fields. Messages name the value of `overrides` that replaced a field.
    fn check(&self, overrides: &Overrides) -> Result<(), InputError> {
        let file = self.file();
        let error = |place: &str, problem: String| {
            Err(match overrides.name(place) {
                Some(name) => InputError::Option { place: format!("{name} ({place})"), problem },
                None => InputError::field(&file, place, problem),
            })
        };
        let sources: Vec<&str> = [
            ("checkpoint", self.checkpoint.is_some()),
            ("config", self.config.is_some()),
            ("graph", self.graph.is_some()),
        ]
        .into_iter()
        .filter_map(|(name, given)| given.then_some(name))
        .collect();
        if let Some(share) = self.runtime.prefill_share
            && !(share > 0.0 && share <= 1.0)
        {
            return error("runtime.prefill_share", format!("must be above 0 and at most 1, found {share}"));
        }
        match sources[..] {
            [] => {
                return error(
                    ".",
                    "no model: add \"checkpoint\" (a folder), \"config\" with \"weights\", or \"graph\""
                        .into(),
                );
            }
            [_] => {}
            _ => {
                let problem = format!("{} exclude each other; keep one", sources.join(" and "));
                return error(sources[1], problem);
            }
        }
        if self.checkpoint.as_ref().is_some_and(|folder| folder.as_os_str().is_empty()) {
            return error("checkpoint", "is empty; name a folder with a checkpoint".into());
        }
        if self.config.is_some() && self.weights.is_none() {
            return error(
                "weights",
                "missing; \"config\" needs \"weights\": {\"random\": {\"seed\": 1}}".into(),
            );
        }
        if self.checkpoint.is_some() && self.weights.is_some() {
            return error("weights", "a checkpoint has its own weights; remove this field".into());
        }
        if self.graph.is_some() && self.runtime.placements().of_all().is_none() {
            let problem = "a graph of your own is one graph; use \"static\" or \"dynamic\"";
            return error("runtime.placement", problem.into());
        }
        for (place, value) in [
            ("max_batch", self.max_batch),
            ("max_seq_len", self.max_seq_len),
            ("page_size", self.page_size),
            ("runtime.prefill_chunk", self.runtime.prefill_chunk),
            ("runtime.kv_pages", self.runtime.kv_pages),
            ("runtime.workers", self.runtime.workers),
            ("generate.max_new_tokens", self.generate.max_new_tokens),
        ] {
            if value == Some(0) {
                return error(place, "must be at least 1, found 0".into());
            }
        }
        for (place, value, largest) in [
            ("max_batch", self.max_batch, LARGEST_MAX_BATCH),
            ("runtime.workers", self.runtime.workers, LARGEST_WORKERS),
            // Dimensions of tensors.
            ("runtime.prefill_chunk", self.runtime.prefill_chunk, i32::MAX as u32),
            ("runtime.kv_pages", self.runtime.kv_pages, i32::MAX as u32),
        ] {
            if let Some(value) = value.filter(|&value| value > largest) {
                return error(place, format!("must be at most {largest}, found {value}"));
            }
        }
        let stops = &self.generate.stop;
        if stops.len() > MOST_STOPS {
            let problem = format!("at most {MOST_STOPS} texts are possible, found {}", stops.len());
            return error("generate.stop", problem);
        }
        if let Some(stop) = stops.iter().find(|stop| stop.is_empty() || stop.len() > LONGEST_STOP) {
            let problem = format!("a text must have 1 to {LONGEST_STOP} bytes, found {}", stop.len());
            return error("generate.stop", problem);
        }
        if let Some(page_size) = self.page_size.filter(|v| !v.is_power_of_two()) {
            return error("page_size", format!("must be a power of two, found {page_size}"));
        }
        if let Some(chunk) = self.runtime.prefill_chunk
            && chunk < self.max_batch()
        {
            let slots = self.max_batch();
            let problem = format!(
                "{chunk} is less than max_batch = {slots}; set it to at least {slots}, or leave it out"
            );
            return error("runtime.prefill_chunk", problem);
        }
        Ok(())
    }

    /// The path of this file, as shown in messages.
    pub fn file(&self) -> String {
        self.path.display().to_string()
    }

    /// `name`, otherwise the name of the checkpoint's folder.
    pub fn shown_name(&self) -> Option<String> {
        let folder = || Some(self.checkpoint_folder()?.file_name()?.to_string_lossy().into_owned());
        self.name.clone().or_else(folder)
    }

    /// The checkpoint's folder, resolved against the folder of model.json.
    pub fn checkpoint_folder(&self) -> Option<PathBuf> {
        let folder = self.checkpoint.as_ref()?;
        // Without the "." of `"checkpoint": "."`, which messages would show.
        Some(self.path.parent().unwrap_or(Path::new("")).join(folder).components().collect())
    }

    /// `max_batch` or its default.
    pub fn max_batch(&self) -> u32 {
        self.max_batch.unwrap_or(DEFAULT_MAX_BATCH)
    }

    /// `generate.max_new_tokens` or its default.
    pub fn max_new_tokens(&self) -> u32 {
        self.generate.max_new_tokens.unwrap_or(DEFAULT_MAX_NEW_TOKENS)
    }

    /// The JSON schema of model.json, as published in `launch/schema/model.schema.json`.
    pub fn json_schema() -> Value {
        schemars::schema_for!(ModelJson).to_value()
    }
}
