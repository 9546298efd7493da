//! What decides a graph besides the model, and names that graphs and host share.

use crate::model::hf_config::{ModelConfig, WeightDtype};
use crate::model::model_json::Embedding;
use kernels_cu::tasks::argmax_partial;
use taskgraph::{DType, Target};

/// Names of tensors that the host knows.
pub mod names {
    /// Rope table, f32 `[max_seq_len, head_dim]`.
    pub const ROPE: &str = "rope";
}

/// What decides a graph besides the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphOptions {
    /// How the embedding table is dealt to the ranks.
    pub embedding: Embedding,
    /// Log-probabilities wanted for each token.
    pub top_k: u32,
    /// Ranks: the argmax exchange has a slice for each.
    pub ranks: u32,
    /// Column tiles of each rank's logits.
    pub argmax_tiles: u32,
    /// Requests may draw their tokens or have penalties. Without it the graphs are greedy, and nothing is spent on it.
    pub sampling: bool,
    /// Workers of each rank.
    pub workers: u32,
}

impl GraphOptions {
    /// Greedy, for `ranks` ranks of `target`.
    pub fn new(config: &ModelConfig, embedding: Embedding, top_k: u32, ranks: u32, target: &Target) -> Self {
        let argmax_tiles = argmax_partial::tiles(u64::from(config.vocab_size), ranks, target);
        GraphOptions { embedding, top_k, ranks, argmax_tiles, sampling: false, workers: target.workers }
    }

    /// The same with sampling, or without.
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
