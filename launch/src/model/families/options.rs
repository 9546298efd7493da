//! Everything besides the model that determines a graph, and names that graphs and host share.

use crate::model::hf_config::{ModelConfig, WeightDtype};
use crate::model::model_json::Embedding;
use kernels_cu::tasks::argmax_partial;
use taskgraph::{DType, Target};

/// Names of tensors that the host refers to.
pub mod names {
    /// Rope table, f32 `[max_seq_len, head_dim]`.
    pub const ROPE: &str = "rope";
}

/// Everything besides the model that determines a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphOptions {
    /// How the embedding table is split over the ranks.
    pub embedding: Embedding,
    /// Number of log-probabilities per token.
    pub top_k: u32,
    /// Number of ranks. The argmax exchange has a slice for each.
    pub ranks: u32,
    /// Number of column tiles of each rank's logits.
    pub argmax_tiles: u32,
    /// Requests may sample or use penalties. Otherwise the graphs are greedy, without any cost for sampling.
    pub sampling: bool,
    /// Number of workers per rank.
    pub workers: u32,
}

impl GraphOptions {
    /// Greedy options for `ranks` ranks of `target`.
    pub fn new(config: &ModelConfig, embedding: Embedding, top_k: u32, ranks: u32, target: &Target) -> Self {
        let argmax_tiles = argmax_partial::tiles(u64::from(config.vocab_size), ranks, target);
        GraphOptions { embedding, top_k, ranks, argmax_tiles, sampling: false, workers: target.workers }
    }

    /// The same options with or without sampling.
    pub fn with_sampling(self, sampling: bool) -> Self {
        GraphOptions { sampling, ..self }
    }
}

/// The element type of weights and of activations between tasks.
pub fn dtype(config: &ModelConfig) -> DType {
    match config.dtype {
        WeightDtype::F32 => DType::F32,
        WeightDtype::F16 => DType::F16,
        WeightDtype::Bf16 => DType::Bf16,
    }
}
