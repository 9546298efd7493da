//! Qwen2 and Qwen2.5.

use super::family::Family;
use crate::model::error::InputError;
use crate::model::hf_config::{
    Architecture, Defaults, SlidingWindow, Traits, sliding_layers, sliding_window,
};
use crate::model::json::Fields;

/// Qwen2: the q, k and v projections have biases.
#[derive(Debug)]
pub struct Qwen2;

impl Architecture for Qwen2 {
    fn name(&self) -> &'static str {
        "Qwen2ForCausalLM"
    }

    fn model_type(&self) -> &'static str {
        "qwen2"
    }

    fn defaults(&self) -> Defaults {
        Defaults {
            vocab_size: 151936,
            hidden_size: 4096,
            intermediate_size: 22016,
            num_layers: 32,
            num_heads: 32,
            num_kv_heads: Some(32),
            head_dim: None,
            max_position_embeddings: 32768,
            eos: None,
        }
    }

    fn traits(&self, fields: &Fields<'_>, num_layers: u32) -> Result<Traits, InputError> {
        Ok(Traits { attention_bias: true, sliding_window: window(fields, num_layers)?, ..Traits::default() })
    }
}

impl Family for Qwen2 {}

/// The window exists only with `use_sliding_window`. It applies to the layers that `layer_types` names, or without it to
/// those from `max_window_layers` on.
pub(super) fn window(fields: &Fields<'_>, num_layers: u32) -> Result<Option<SlidingWindow>, InputError> {
    let named = sliding_layers(fields, num_layers)?;
    let used = fields.bool("use_sliding_window")?.unwrap_or(false);
    let max_window_layers = fields.u32("max_window_layers")?.unwrap_or(28);
    let layers = named.unwrap_or_else(|| (0..num_layers).map(|layer| layer >= max_window_layers).collect());
    if used && layers.contains(&true) {
        Ok(sliding_window(fields, 4096)?.map(|positions| SlidingWindow { positions, layers }))
    } else {
        Ok(None)
    }
}
