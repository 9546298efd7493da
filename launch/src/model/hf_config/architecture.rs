//! The differences between architectures' configurations, and transformers' defaults for missing fields.

use serde_json::Value;
use taskgraph::words::counted;

use crate::model::{error::InputError, json::Fields};

/// transformers' defaults for missing fields.
#[derive(Debug, Clone, Copy)]
pub struct Defaults {
    /// Size of the vocabulary.
    pub vocab_size: u32,
    /// Width of the residual stream.
    pub hidden_size: u32,
    /// Width of the MLP.
    pub intermediate_size: u32,
    /// Decoder layers.
    pub num_layers: u32,
    /// Query heads.
    pub num_heads: u32,
    /// Key/value heads; `None` means as many as query heads.
    pub num_kv_heads: Option<u32>,
    /// Elements per head; `None` means hidden size / query heads.
    pub head_dim: Option<u32>,
    /// The longest sequence.
    pub max_position_embeddings: u32,
    /// End-of-sequence token.
    pub eos: Option<u32>,
}

/// Layers in which a query sees only its own position and some before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlidingWindow {
    /// The positions that a query sees, its own included.
    pub positions: u32,
    /// Whether each layer has the window; at least one has it.
    pub layers: Vec<bool>,
}

/// The differences between decoders.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Traits {
    /// q, k and v projections have a bias.
    pub attention_bias: bool,
    /// The attention's output projection has a bias.
    pub output_bias: bool,
    /// Query and key heads are normalised.
    pub qk_norm: bool,
    /// The sliding window of some or all layers.
    pub sliding_window: Option<SlidingWindow>,
}

/// How to read the config.json of an architecture.
pub trait Architecture: std::fmt::Debug + Sync {
    /// Its value of `architectures`, such as `LlamaForCausalLM`.
    fn name(&self) -> &'static str;

    /// Its `model_type`. A configuration that has another one is refused; one without `architectures` is found by it.
    fn model_type(&self) -> &'static str;

    /// transformers' defaults.
    fn defaults(&self) -> Defaults;

    /// The traits of this model.
    ///
    /// # Errors
    /// A field has an invalid or unsupported value.
    fn traits(&self, fields: &Fields<'_>, num_layers: u32) -> Result<Traits, InputError>;

    /// Refuses fields that change the arithmetic but are not implemented.
    ///
    /// # Errors
    /// The configuration has such a field.
    fn refuse(&self, fields: &Fields<'_>) -> Result<(), InputError> {
        let act = fields.str("hidden_act")?.unwrap_or("silu");
        // transformers uses both names for this function.
        if !matches!(act, "silu" | "swish") {
            return Err(fields.unsupported(
                "hidden_act",
                format!("the activation \"{act}\""),
                "only \"silu\" is supported",
            ));
        }
        refuse_in_any(fields)
    }
}

/// Refuses what is not implemented for any architecture: quantised checkpoints, MLP biases, attention to later positions, soft-capping.
///
/// # Errors
/// The configuration asks for one of them.
pub fn refuse_in_any(fields: &Fields<'_>) -> Result<(), InputError> {
    if fields.get("quantization_config").is_some() {
        return Err(fields.unsupported(
            "quantization_config",
            "a quantised checkpoint",
            "use a checkpoint with bf16, f16 or f32 weights",
        ));
    }
    if fields.bool("mlp_bias")? == Some(true) {
        return Err(fields.unsupported("mlp_bias", "an MLP with biases", "only false is supported"));
    }
    if fields.bool("is_causal")? == Some(false) {
        let fix = "only true is supported";
        return Err(fields.unsupported("is_causal", "attention to later positions", fix));
    }
    for name in ["attn_logit_softcapping", "final_logit_softcapping", "logit_softcapping"] {
        if fields.get(name).is_some() {
            return Err(fields.unsupported(name, "soft-capping of logits", "only null is supported"));
        }
    }
    Ok(())
}

/// Whether `layer_types` names each layer as one with a sliding window; `None` if it is not given.
///
/// # Errors
/// It names another layer type, or does not have one entry per layer.
pub fn sliding_layers(fields: &Fields<'_>, num_layers: u32) -> Result<Option<Vec<bool>>, InputError> {
    let Some(types) = fields.strings("layer_types")? else { return Ok(None) };
    if let Some(i) = types.iter().position(|t| !matches!(*t, "full_attention" | "sliding_attention")) {
        return Err(fields.unsupported(
            &format!("layer_types[{i}]"),
            format!("the layer type \"{}\"", types[i]),
            "supported are full_attention and sliding_attention",
        ));
    }
    if types.len() != num_layers as usize {
        let problem = format!("has {}, but num_hidden_layers is {num_layers}", counted(types.len(), "entry"));
        return Err(fields.error("layer_types", problem));
    }
    Ok(Some(types.iter().map(|t| *t == "sliding_attention").collect()))
}

/// Reads `sliding_window`: `default` if the field is absent, no window if it is null.
///
/// # Errors
/// It is not a positive number.
pub fn sliding_window(fields: &Fields<'_>, default: u32) -> Result<Option<u32>, InputError> {
    match fields.raw("sliding_window") {
        None => Ok(Some(default)),
        Some(Value::Null) => Ok(None),
        Some(_) => match fields.u32("sliding_window")? {
            Some(0) => Err(fields.error("sliding_window", "must be at least 1")),
            window => Ok(window),
        },
    }
}
