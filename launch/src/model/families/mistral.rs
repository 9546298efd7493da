//! Mistral.

use super::family::Family;
use super::llama::Llama;
use crate::model::error::InputError;
use crate::model::hf_config::{
    Architecture, Defaults, SlidingWindow, Traits, sliding_layers, sliding_window,
};
use crate::model::json::Fields;

/// Mistral: Llama with a sliding window in all layers, whatever `layer_types` says, as in transformers. The window is 4096 if the
/// configuration does not set it, and absent if it says null.
#[derive(Debug)]
pub struct Mistral;

impl Architecture for Mistral {
    fn name(&self) -> &'static str {
        "MistralForCausalLM"
    }

    fn model_type(&self) -> &'static str {
        "mistral"
    }

    fn defaults(&self) -> Defaults {
        Defaults {
            intermediate_size: 14336,
            num_kv_heads: Some(8),
            max_position_embeddings: 4096 * 32,
            ..Llama.defaults()
        }
    }

    fn traits(&self, fields: &Fields<'_>, num_layers: u32) -> Result<Traits, InputError> {
        sliding_layers(fields, num_layers)?;
        let layers = vec![true; num_layers as usize];
        let window = sliding_window(fields, 4096)?.map(|positions| SlidingWindow { positions, layers });
        Ok(Traits { sliding_window: window, ..Traits::default() })
    }
}

impl Family for Mistral {}
