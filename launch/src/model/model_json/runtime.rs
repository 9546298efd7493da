//! `runtime` of model.json: how to run.

use super::placements::{self, Placements};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How an allreduce is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Allreduce {
    /// Copy-reduce with `--transport host`. Hierarchical if one of several nodes has several ranks. Otherwise by size: one-shot
    /// for few rows, copy-reduce for more, and two-shot on GPUs for many.
    #[default]
    Auto,
    /// Each rank copies its part to every peer with a signal, then reduces.
    CopyReduce,
    /// Each rank pushes flagged words to every peer. Fastest for few rows; prompts need much memory.
    OneShot,
    /// Reduce-scatter, then broadcast.
    TwoShot,
    /// For several nodes: reduce within each node, exchange between nodes, broadcast within each node.
    Hierarchical,
}

/// The type in which ranks send the summands of an allreduce. They are summed in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AllreduceDtype {
    /// On GPUs, the activations' type for prompts in graphs of 256 rows or more; otherwise f32.
    #[default]
    Auto,
    /// Always f32.
    F32,
    /// The activations' type in all graphs. Only f32 can be pushed, so another way replaces one-shot.
    Activation,
}

/// When a request gets pages of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Kv {
    /// When it starts, it gets all the pages that it may need.
    #[default]
    Reserved,
    /// It gets pages as it needs them. If none is left, the youngest request gives its pages back and continues later with the same
    /// tokens.
    OnDemand,
}

/// Whether the KV cache of prompts is kept for later prompts that begin with the same tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PrefixCache {
    /// Compute every prompt in full.
    Off,
    /// Do not compute again what an earlier prompt has in common, as long as there is room to keep it.
    #[default]
    On,
}

/// How the embedding table is split over the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Embedding {
    /// Each rank has a range of the vocabulary. An allreduce adds up the ranks' rows.
    #[default]
    VocabularyParallel,
    /// Each rank has the whole table.
    Replicated,
}

/// How to run.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Runtime {
    /// How tasks are assigned to workers: one placement for all graphs, or one per class of graphs, such as `{"decode": "static",
    /// "prefill": "dynamic"}`. Default: static, unless `mpk-bench tune` found otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<placements::Form>")]
    pub placement: Option<Placements>,
    /// How an allreduce is carried out.
    pub allreduce: Allreduce,
    /// The type in which ranks send the summands of the allreduces after attention and MLP. An op graph of your own says it itself, as
    /// the `output_dtype` of a row-parallel product.
    pub allreduce_dtype: AllreduceDtype,
    /// How the embedding table is split over the ranks.
    pub embedding: Embedding,
    /// Maximum number of rows (tokens) of an iteration with prompt tokens. At least `max_batch`. Default: 256, on Hopper up to 2,048.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub prefill_chunk: Option<u32>,
    /// Share of `prefill_chunk` that prompts may use in an iteration in which other requests generate. Default: all of it. With a small
    /// share, a long prompt delays the other requests less.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 1))]
    pub prefill_share: Option<f64>,
    /// When a request gets pages of the KV cache.
    pub kv: Kv,
    /// Whether the KV cache of prompts is kept for later prompts that begin with the same tokens.
    pub prefix_cache: PrefixCache,
    /// Number of pages of the KV cache. Default: enough for `max_batch` requests of `max_seq_len` tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub kv_pages: Option<u32>,
    /// Number of workers per rank. Default: the rank's share of the cores, or of the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 4096))]
    pub workers: Option<u32>,
    /// The node of each rank, counted from 0, for the allreduce over nodes. Default: the nodes on which the launcher started the ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<Vec<u32>>,
}

impl Runtime {
    /// The placements of the file, otherwise static. Used if nothing else decides.
    pub fn placements(&self) -> Placements {
        self.placement.unwrap_or_default()
    }
}
