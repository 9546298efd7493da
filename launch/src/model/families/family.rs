//! The trait of a model family.

use super::decoder;
use super::options::GraphOptions;
use crate::model::hf_config::{Architecture, ModelConfig};
use crate::model::model_json::Sizes;
use taskgraph::{Capacity, OpGraph};

/// A model family: how to read its configurations, and what they compute.
pub trait Family: Architecture {
    /// The op graph of one iteration for `capacity`.
    ///
    /// Its weights name the tensors of the checkpoint. It reads the batch and writes the tensor `batch.next_token`,
    /// like [`decoder::op_graph`], which is the default. With `options.top_k` above 0 it also writes `batch.top_token` and
    /// `batch.top_logprob`. A graph whose tokens need not be the best ones also writes `batch.token_logprob`; without that tensor,
    /// the log-probability of a token that is not among the `top_k` best is not known.
    fn op_graph(
        &self,
        config: &ModelConfig,
        sizes: &Sizes,
        options: &GraphOptions,
        name: &str,
        capacity: Capacity,
    ) -> OpGraph {
        decoder::op_graph(config, sizes, options, name, capacity)
    }
}
