//! `runtime` of model.json: how to run.

use super::placements::{self, Placements};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How an allreduce is lowered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Allreduce {
    /// By size: one-shot for few rows, otherwise two-shot (on GPUs) or copies.
    #[default]
    Auto,
    /// Copies with signal, then a reduce.
    CopyReduce,
    /// Flagged words pushed to all ranks: quickest for few rows. Prompts take much memory.
    OneShot,
    /// Reduce-scatter, then broadcast.
    TwoShot,
    /// Over nodes: a sum within each node, an exchange between nodes, the result spread within each node.
    Hierarchical,
}

/// When a request gets pages of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Kv {
    /// All that it can need, when it begins.
    #[default]
    Reserved,
    /// As it needs them. Where none is left, the youngest request gives its own back and goes on later, with the same tokens.
    OnDemand,
}

/// Whether full pages of prompts are kept for later prompts that begin with the same tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PrefixCache {
    /// Every prompt is computed.
    Off,
    /// What an earlier prompt has in common is not computed again, as long as there is room for it.
    #[default]
    On,
}

/// How the embedding table is shared out among ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Embedding {
    /// Each rank has a range of the vocabulary; an allreduce adds the ranks' rows.
    #[default]
    VocabularyParallel,
    /// Each rank has the whole table.
    Replicated,
}

/// How to run.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Runtime {
    /// How tasks get to workers: of all graphs, or of each class of them, such as `{"decode": "static", "prefill": "dynamic"}`; static if
    /// absent, unless `mpk-bench tune` found otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<placements::Form>")]
    pub placement: Option<Placements>,
    /// How an allreduce is lowered.
    pub allreduce: Allreduce,
    /// How the embedding table is shared out among ranks.
    pub embedding: Embedding,
    /// Most rows (tokens) of one iteration that holds prompt tokens; at least `max_batch`; if absent 256, on Hopper up to 2,048.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub prefill_chunk: Option<u32>,
    /// Share of `prefill_chunk` that prompts may take of an iteration in which other requests generate; all of it if absent. A small
    /// share keeps a long prompt from holding up the others.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 1))]
    pub prefill_share: Option<f64>,
    /// When a request gets pages of the KV cache.
    pub kv: Kv,
    /// Whether full pages of prompts are kept for later prompts that begin with the same tokens.
    pub prefix_cache: PrefixCache,
    /// Pages of the KV cache; enough for `max_batch` requests of `max_seq_len` if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub kv_pages: Option<u32>,
    /// Workers of a rank; the rank's share of the cores, or of the device, if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 4096))]
    pub workers: Option<u32>,
    /// Each rank's node, counted from 0, for the allreduce over nodes; if absent, where the launcher has put the ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<Vec<u32>>,
}

impl Runtime {
    /// Where tasks are placed if nothing else decides: as the file says, or static.
    pub fn placements(&self) -> Placements {
        self.placement.unwrap_or_default()
    }
}
