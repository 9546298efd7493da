//! Everything besides the model that determines a graph, and names that graphs and host share.

use crate::model::hf_config::{ModelConfig, WeightDtype};
use crate::model::model_json::{AllreduceDtype, Embedding, Runtime};
use kernels_cu::tasks::argmax_partial;
use taskgraph::{Backend, Capacity, DType, Target};

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
    /// The type in which ranks send the summands of an allreduce.
    pub allreduce_dtype: AllreduceDtype,
    /// What runs the tasks.
    pub backend: Backend,
    /// Number of log-probabilities per token.
    pub top_k: u32,
    /// Number of ranks. What they exchange to choose tokens has a slice for each.
    pub ranks: u32,
    /// Number of column tiles of each rank's logits.
    pub argmax_tiles: u32,
    /// Requests may sample or use penalties. Otherwise the graphs are greedy, without any cost for sampling.
    pub sampling: bool,
    /// Number of workers per rank.
    pub workers: u32,
}

/// The fewest rows for which summands are rounded by default. With fewer rows, latency counts more than bytes.
const LEAST_ROUNDED_ROWS: u32 = 256;

impl GraphOptions {
    /// Greedy options for `ranks` ranks of `target`.
    pub fn new(config: &ModelConfig, runtime: &Runtime, top_k: u32, ranks: u32, target: &Target) -> Self {
        GraphOptions {
            embedding: runtime.embedding,
            allreduce_dtype: runtime.allreduce_dtype,
            backend: target.backend,
            top_k,
            ranks,
            argmax_tiles: argmax_partial::tiles(u64::from(config.vocab_size), ranks, target),
            sampling: false,
            workers: target.workers,
        }
    }

    /// The same options with or without sampling.
    pub fn with_sampling(self, sampling: bool) -> Self {
        GraphOptions { sampling, ..self }
    }

    /// The element type of the partial sums of row-parallel products, in the graph for `capacity`. An allreduce sends them in
    /// that type. On one rank they are whole sums, and nothing is sent.
    pub fn partial_sums(&self, config: &ModelConfig, capacity: Capacity) -> DType {
        // Rows that are not sampled belong to prompts.
        let of_prompts = capacity.rows > capacity.samples && capacity.rows >= LEAST_ROUNDED_ROWS;
        let rounded = match self.allreduce_dtype {
            AllreduceDtype::Auto => self.backend == Backend::Cuda && of_prompts,
            AllreduceDtype::F32 => false,
            AllreduceDtype::Activation => true,
        };
        if rounded && self.ranks > 1 { dtype(config) } else { DType::F32 }
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
