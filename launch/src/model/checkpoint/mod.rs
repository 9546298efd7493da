//! Checkpoints as Hugging Face publishes them: `model.safetensors`, or `model.safetensors.index.json` and shards.
//!
//! Files are memory-mapped and read by ranges, so a rank touches only the ranges that it asks for. All headers are checked
//! when the checkpoint is opened, and all tensors that a model needs are checked by [`Checkpoint::validate`]. Both happen
//! before anything is launched.

use std::{
    collections::{BTreeMap, HashMap},
    path::{Component, Path, PathBuf},
};
use taskgraph::words::counted;

use serde_json::Value;

use crate::model::{
    error::InputError,
    files,
    hf_config::{ModelConfig, WeightDtype},
    json,
};

mod shard;
mod tensor;
#[cfg(test)]
mod tests;

use shard::Shard;
pub(crate) use shard::header_problem;
pub use tensor::TensorView;
pub(crate) use tensor::matrix;

const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";
const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// An open checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    shards: Vec<Shard>,
    /// Maps tensor names to indices in `shards`.
    tensors: HashMap<String, usize>,
    /// The embedding is stored under the head's name only.
    embedding_is_head: bool,
}

impl Checkpoint {
    /// Maps the files of `folder` and checks their headers.
    ///
    /// # Errors
    /// The folder holds no checkpoint; or a shard is missing, outside the folder, truncated or inconsistent, or lacks a
    /// tensor that the index says it has.
    pub fn open(folder: &Path) -> Result<Self, InputError> {
        // Distinguishes a missing folder from a folder without a checkpoint.
        std::fs::read_dir(folder).map_err(|e| InputError::unreadable(folder, e))?;
        let single = folder.join(SINGLE_FILE);
        let index = folder.join(INDEX_FILE);
        if files::is_there(&single) || !files::is_there(&index) {
            return Self::open_single(folder, &single);
        }
        let by_shard = read_index(&index)?;
        let mut checkpoint = Self {
            folder: folder.into(),
            shards: Vec::new(),
            tensors: HashMap::new(),
            embedding_is_head: false,
        };
        for (name, tensors) in by_shard {
            let path = folder.join(&name);
            if !files::is_there(&path) {
                let problem = format!("is missing, although {INDEX_FILE} lists it");
                return Err(InputError::Checkpoint {
                    path,
                    problem,
                    fix: download(folder, "download the file"),
                });
            }
            let shard = Shard::open(&path)?;
            for tensor in tensors {
                if shard.info(&tensor).is_none() {
                    return Err(InputError::Tensor {
                        path: shard.path.clone(),
                        tensor,
                        problem: format!("is not in this file, although {INDEX_FILE} lists it there"),
                    });
                }
                checkpoint.tensors.insert(tensor, checkpoint.shards.len());
            }
            checkpoint.shards.push(shard);
        }
        Ok(checkpoint)
    }

    fn open_single(folder: &Path, path: &Path) -> Result<Self, InputError> {
        if !files::is_there(path) {
            return Err(InputError::Checkpoint {
                path: folder.into(),
                problem: format!("holds neither {SINGLE_FILE} nor {INDEX_FILE}"),
                fix: download(folder, "use a folder with a Hugging Face checkpoint in safetensors format"),
            });
        }
        let shard = Shard::open(path)?;
        let tensors = shard.names().map(|name| (name, 0)).collect();
        Ok(Self { folder: folder.into(), shards: vec![shard], tensors, embedding_is_head: false })
    }

    /// The folder that was opened.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The names of all tensors, in no particular order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The tensor `name`.
    ///
    /// # Errors
    /// The checkpoint has no such tensor, or its dtype is not f32, f16 or bf16.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>, InputError> {
        let stored = if self.embedding_is_head && name == EMBEDDING { HEAD } else { name };
        let shard = self.tensors.get(stored).and_then(|&i| self.shards.get(i));
        match shard {
            Some(shard) => TensorView::of(shard, stored),
            None => Err(InputError::Tensor {
                path: self.folder.clone(),
                tensor: name.into(),
                problem: "missing from the checkpoint".into(),
            }),
        }
    }

    /// If embeddings are tied, the embedding and the head are one matrix. A checkpoint may store it under the head's name only, which
    /// transformers reads, too. From now on, [`Checkpoint::tensor`] finds it under both names.
    pub fn tie_embeddings(&mut self, config: &ModelConfig) {
        let stored = |name: &str| self.tensors.contains_key(name);
        self.embedding_is_head = config.tie_word_embeddings && stored(HEAD) && !stored(EMBEDDING);
    }

    /// The most common dtype by bytes, among f32, f16 and bf16. Used if config.json names no dtype.
    ///
    /// # Errors
    /// The checkpoint has no tensor of these dtypes.
    pub fn main_dtype(&self) -> Result<WeightDtype, InputError> {
        let mut bytes = [0u64; 3];
        for name in self.names() {
            if let Ok(tensor) = self.tensor(name) {
                bytes[tensor.dtype as usize] += tensor.bytes().len() as u64;
            }
        }
        let dtypes = [WeightDtype::F32, WeightDtype::F16, WeightDtype::Bf16];
        let most = dtypes.into_iter().max_by_key(|&d| bytes[d as usize]);
        most.filter(|&d| bytes[d as usize] > 0).ok_or_else(|| InputError::Checkpoint {
            path: self.folder.clone(),
            problem: "holds no tensor of dtype f32, f16 or bf16".into(),
            fix: "use a checkpoint that is not quantised".into(),
        })
    }

    /// Checks that all tensors of `config`'s model exist with the right shape and a supported dtype. `expected` lists them
    /// with their shapes.
    ///
    /// Tensors that the model does not need are ignored. A warning names them. The `lm_head.weight` of a model with tied embeddings is
    /// ignored silently if it is the embedding.
    ///
    /// # Errors
    /// The first tensor that is missing or differs, with both shapes. A head that contradicts tied embeddings.
    pub fn validate(
        &self,
        config: &ModelConfig,
        expected: &[(String, Vec<usize>)],
    ) -> Result<(), InputError> {
        for (name, shape) in expected {
            let tensor = self.tensor(name).map_err(|error| match error {
                InputError::Tensor { path, tensor, problem } if tensor == HEAD => {
                    let problem =
                        format!("{problem}, and config.json does not say tie_word_embeddings: true");
                    InputError::Tensor { path, tensor, problem }
                }
                other => other,
            })?;
            if tensor.shape != *shape {
                return Err(InputError::Tensor {
                    path: tensor.path().into(),
                    tensor: name.clone(),
                    problem: format!("has shape {:?}, but config.json implies {shape:?}", tensor.shape),
                });
            }
        }
        if config.tie_word_embeddings && !self.embedding_is_head {
            self.check_spare_head()?;
        }
        let known: std::collections::HashSet<&str> = expected.iter().map(|(name, _)| name.as_str()).collect();
        let mut unused: Vec<&str> = self
            .names()
            .filter(|name| !known.contains(name) && !name.ends_with("rotary_emb.inv_freq"))
            .filter(|name| !(config.tie_word_embeddings && *name == HEAD))
            .collect();
        if !unused.is_empty() {
            unused.sort_unstable();
            tracing::warn!(
                "{}: ignoring {} that {} does not use: {}{}",
                self.folder.display(),
                counted(unused.len(), "tensor"),
                config.architecture(),
                unused[..unused.len().min(4)].join(", "),
                if unused.len() > 4 { ", ..." } else { "" }
            );
        }
        Ok(())
    }

    /// If embeddings are tied, the head is the embedding. A checkpoint may store it all the same, but not with other values: transformers
    /// would use these.
    fn check_spare_head(&self) -> Result<(), InputError> {
        let (Ok(head), Ok(table)) = (self.tensor(HEAD), self.tensor(EMBEDDING)) else { return Ok(()) };
        if head.shape == table.shape && head.dtype == table.dtype && head.bytes() == table.bytes() {
            return Ok(());
        }
        Err(InputError::Tensor {
            path: head.path().into(),
            tensor: HEAD.into(),
            problem: "differs from `model.embed_tokens.weight`, but config.json says tie_word_embeddings: true; to use both, \
                      set it to false, otherwise remove this tensor"
                .into(),
        })
    }
}

/// How to get the weights of `folder`, or `otherwise` if it is not in the Hugging Face cache.
fn download(folder: &Path, otherwise: &str) -> String {
    match hub_name(folder) {
        Some(name) => format!("download the weights with `hf download {name}`"),
        None => otherwise.into(),
    }
}

/// The hub's name of a model whose snapshot in the Hugging Face cache is `folder`: `CACHE/models--ORGANISATION--NAME/snapshots/REVISION`.
fn hub_name(folder: &Path) -> Option<String> {
    let snapshots = folder.parent().filter(|parent| parent.ends_with("snapshots"))?;
    let repository = snapshots.parent()?.file_name()?.to_str()?.strip_prefix("models--")?;
    Some(repository.replacen("--", "/", 1))
}

/// Tensor names by shard file name.
fn read_index(path: &Path) -> Result<BTreeMap<String, Vec<String>>, InputError> {
    let file = path.display().to_string();
    let index = json::parse_object(&file, &files::read(path)?)?;
    let map = match index.get("weight_map") {
        Some(Value::Object(map)) => map,
        Some(other) => {
            let problem = format!("expected an object, found {}", json::kind(other));
            return Err(InputError::field(&file, "weight_map", problem));
        }
        None => return Err(InputError::field(&file, "weight_map", "missing")),
    };
    let mut by_shard: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (tensor, shard) in map {
        let place = format!("weight_map.{tensor}");
        let Value::String(shard) = shard else {
            let problem = format!("expected a file name, found {}", json::kind(shard));
            return Err(InputError::field(&file, place, problem));
        };
        let inside = !shard.is_empty()
            && !shard.contains(['\0', '\\'])
            && Path::new(shard).components().all(|c| matches!(c, Component::Normal(_)));
        if !inside {
            let problem = format!("the shard {shard:?} is not a file inside the checkpoint's folder");
            return Err(InputError::field(&file, place, problem));
        }
        by_shard.entry(shard.clone()).or_default().push(tensor.clone());
    }
    Ok(by_shard)
}
