//! Mistral.

use super::family::Family;
use super::llama::Llama;
use crate::model::error::InputError;
use crate::model::hf_config::{Architecture, Defaults, Traits, sliding_window, some_layer_slides};
use crate::model::json::Fields;

/// Mistral: Llama with a sliding window in all layers. The window is 4096 if the configuration does not set it, and
/// absent if it says null.
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
        some_layer_slides(fields, num_layers)?;
        Ok(Traits { sliding_window: sliding_window(fields, 4096)?, ..Traits::default() })
    }
}

impl Family for Mistral {}
