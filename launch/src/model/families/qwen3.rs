//! Qwen3.

use super::family::Family;
use super::qwen2::{Qwen2, window};
use crate::model::error::InputError;
use crate::model::hf_config::{Architecture, Defaults, Traits};
use crate::model::json::Fields;

/// Qwen3: query and key heads are normalised, the head size is explicit, and there are biases if the configuration says
/// so.
#[derive(Debug)]
pub struct Qwen3;

impl Architecture for Qwen3 {
    fn name(&self) -> &'static str {
        "Qwen3ForCausalLM"
    }

    fn model_type(&self) -> &'static str {
        "qwen3"
    }

    fn defaults(&self) -> Defaults {
        Defaults { head_dim: Some(128), ..Qwen2.defaults() }
    }

    fn traits(&self, fields: &Fields<'_>, num_layers: u32) -> Result<Traits, InputError> {
        let bias = fields.bool("attention_bias")?.unwrap_or(false);
        let sliding_window = window(fields, num_layers)?;
        Ok(Traits { attention_bias: bias, output_bias: bias, qk_norm: true, sliding_window })
    }
}

impl Family for Qwen3 {}
