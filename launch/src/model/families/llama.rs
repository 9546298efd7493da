//! Llama 2 and 3, and models with the same architecture.

use super::family::Family;
use crate::model::error::InputError;
use crate::model::hf_config::{Architecture, Defaults, Traits, sliding_layers};
use crate::model::json::Fields;

/// Llama: no q/k norm, attention biases if the configuration says so, no sliding window.
#[derive(Debug)]
pub struct Llama;

impl Architecture for Llama {
    fn name(&self) -> &'static str {
        "LlamaForCausalLM"
    }

    fn model_type(&self) -> &'static str {
        "llama"
    }

    fn defaults(&self) -> Defaults {
        Defaults {
            vocab_size: 32000,
            hidden_size: 4096,
            intermediate_size: 11008,
            num_layers: 32,
            num_heads: 32,
            num_kv_heads: None,
            head_dim: None,
            max_position_embeddings: 2048,
            eos: Some(2),
        }
    }

    fn traits(&self, fields: &Fields<'_>, num_layers: u32) -> Result<Traits, InputError> {
        if sliding_layers(fields, num_layers)?.is_some_and(|layers| layers.contains(&true)) {
            let what = "sliding_attention in a Llama model";
            return Err(fields.unsupported("layer_types", what, "only full_attention is supported"));
        }
        let bias = fields.bool("attention_bias")?.unwrap_or(false);
        Ok(Traits { attention_bias: bias, output_bias: bias, ..Traits::default() })
    }
}

impl Family for Llama {}
