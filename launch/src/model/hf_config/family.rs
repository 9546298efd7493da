//! The supported architectures and what transformers assumes where their configurations are silent.

use serde_json::Value;

use crate::model::{error::InputError, json::Fields};

/// A model architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// Llama 2 and 3, and what follows their architecture.
    Llama,
    /// Qwen2 and Qwen2.5: attention bias.
    Qwen2,
    /// Qwen3: q/k norm, head_dim given.
    Qwen3,
    /// Mistral.
    Mistral,
}

/// The values of `architectures` that are supported.
pub const SUPPORTED_ARCHITECTURES: [&str; 4] =
    ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"];

/// transformers' defaults for fields that are absent.
pub(super) struct Defaults {
    pub vocab_size: u32,
    pub hidden_size: u32,
    pub intermediate_size: u32,
    pub num_layers: u32,
    pub num_heads: u32,
    /// `None`: as many as query heads.
    pub num_kv_heads: Option<u32>,
    /// `None`: hidden size / query heads.
    pub head_dim: Option<u32>,
    pub max_position_embeddings: u32,
    pub eos: Option<u32>,
}

impl Family {
    /// The family's value of `architectures`.
    pub const fn architecture(self) -> &'static str {
        match self {
            Self::Llama => SUPPORTED_ARCHITECTURES[0],
            Self::Qwen2 => SUPPORTED_ARCHITECTURES[1],
            Self::Qwen3 => SUPPORTED_ARCHITECTURES[2],
            Self::Mistral => SUPPORTED_ARCHITECTURES[3],
        }
    }

    /// By `architectures`, or `model_type` where that is absent.
    pub(super) fn of(fields: &Fields<'_>) -> Result<Self, InputError> {
        const ALL: [Family; 4] = [Family::Llama, Family::Qwen2, Family::Qwen3, Family::Mistral];
        let supported = format!("supported are {}", SUPPORTED_ARCHITECTURES.join(", "));
        match fields.strings("architectures")? {
            Some(names) if !names.is_empty() => {
                ALL.into_iter().find(|family| names.contains(&family.architecture())).ok_or_else(|| {
                    let what = format!("the architecture {}", names.join(", "));
                    fields.unsupported("architectures", what, supported)
                })
            }
            _ => match fields.str("model_type")? {
                Some("llama") => Ok(Self::Llama),
                Some("qwen2") => Ok(Self::Qwen2),
                Some("qwen3") => Ok(Self::Qwen3),
                Some("mistral") => Ok(Self::Mistral),
                Some(other) => {
                    Err(fields.unsupported("model_type", format!("the model type \"{other}\""), supported))
                }
                None => Err(fields.error("architectures", format!("missing; {supported}"))),
            },
        }
    }

    pub(super) const fn defaults(self) -> Defaults {
        match self {
            Self::Llama => Defaults {
                vocab_size: 32000,
                hidden_size: 4096,
                intermediate_size: 11008,
                num_layers: 32,
                num_heads: 32,
                num_kv_heads: None,
                head_dim: None,
                max_position_embeddings: 2048,
                eos: Some(2),
            },
            Self::Qwen2 => Defaults {
                vocab_size: 151936,
                hidden_size: 4096,
                intermediate_size: 22016,
                num_layers: 32,
                num_heads: 32,
                num_kv_heads: Some(32),
                head_dim: None,
                max_position_embeddings: 32768,
                eos: None,
            },
            Self::Qwen3 => Defaults { head_dim: Some(128), ..Self::Qwen2.defaults() },
            Self::Mistral => Defaults {
                intermediate_size: 14336,
                num_kv_heads: Some(8),
                max_position_embeddings: 4096 * 32,
                ..Self::Llama.defaults()
            },
        }
    }

    /// The window of the layers that have one.
    ///
    /// Mistral: `sliding_window` for all layers, 4096 where the field is absent, none where it is null. Qwen2 and
    /// Qwen3: only with `use_sliding_window`, for the layers that `layer_types` names or, without it, those from
    /// `max_window_layers` on. Llama has none.
    pub(super) fn sliding_window(
        self,
        fields: &Fields<'_>,
        num_layers: u32,
    ) -> Result<Option<u32>, InputError> {
        let layer_types = fields.strings("layer_types")?;
        if let Some(types) = &layer_types {
            if let Some(i) = types.iter().position(|t| !matches!(*t, "full_attention" | "sliding_attention"))
            {
                return Err(fields.unsupported(
                    &format!("layer_types[{i}]"),
                    format!("the layer type \"{}\"", types[i]),
                    "only full_attention is",
                ));
            }
            if types.len() != num_layers as usize {
                let problem = format!("has {} entries, num_hidden_layers = {num_layers}", types.len());
                return Err(fields.error("layer_types", problem));
            }
        }
        let some_slide = layer_types.as_ref().map(|t| t.contains(&"sliding_attention"));
        match self {
            Self::Llama if some_slide == Some(true) => Err(fields.unsupported(
                "layer_types",
                "sliding_attention in a Llama model",
                "only full_attention is",
            )),
            Self::Llama => Ok(None),
            Self::Mistral => match fields.raw("sliding_window") {
                None => Ok(Some(4096)),
                Some(Value::Null) => Ok(None),
                Some(_) => self.window(fields),
            },
            Self::Qwen2 | Self::Qwen3 => {
                let used = fields.bool("use_sliding_window")?.unwrap_or(false);
                let max_window_layers = fields.u32("max_window_layers")?.unwrap_or(28);
                if used && some_slide.unwrap_or(max_window_layers < num_layers) {
                    match fields.raw("sliding_window") {
                        None => Ok(Some(4096)),
                        Some(Value::Null) => Ok(None),
                        Some(_) => self.window(fields),
                    }
                } else {
                    Ok(None)
                }
            }
        }
    }

    fn window(self, fields: &Fields<'_>) -> Result<Option<u32>, InputError> {
        match fields.u32("sliding_window")? {
            Some(0) => Err(fields.error("sliding_window", "must be at least 1")),
            window => Ok(window),
        }
    }
}
