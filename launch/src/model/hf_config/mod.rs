//! Hugging Face configurations, as transformers 4 and 5 write them, read into one [`ModelConfig`].
//!
//! Unused fields are ignored. Fields that change the arithmetic but are not implemented are refused. A missing field
//! has transformers' default for that architecture (`transformers/models/*/configuration_*.py`). Everything that follows
//! transformers here, rope included, follows version 5.23.

use std::path::Path;

use serde_json::{Map, Value};

use crate::model::{
    error::InputError,
    files,
    json::{self, Fields},
    sampling::GenerationConfig,
};

mod architecture;
mod rope;
#[cfg(test)]
mod tests;
mod yarn;

pub use architecture::{
    Architecture, Defaults, SlidingWindow, Traits, refuse_in_any, sliding_layers, sliding_window,
};
pub use rope::{RopeConfig, RopeScaling, inverse_frequencies, rope_table};
pub use yarn::Yarn;

/// Element type of weights and of the activations between tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightDtype {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl WeightDtype {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// The corresponding tensor element type.
    pub const fn dtype(self) -> taskgraph::DType {
        match self {
            Self::F32 => taskgraph::DType::F32,
            Self::F16 => taskgraph::DType::F16,
            Self::Bf16 => taskgraph::DType::Bf16,
        }
    }

    /// `f32`, `f16` or `bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}

impl std::fmt::Display for WeightDtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The largest accepted `num_hidden_layers`.
pub const LARGEST_NUM_LAYERS: u32 = 1 << 14;

/// The values that a model's arithmetic depends on.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The name of the architecture, which determines the family.
    architecture: &'static str,
    /// The object as it was read, for fields that only one family needs.
    pub fields: Map<String, Value>,
    /// Dtype of the weights, from the configuration or otherwise from the checkpoint.
    pub dtype: WeightDtype,
    /// Size of the vocabulary: the rows of the embedding table.
    pub vocab_size: u32,
    /// Width of the residual stream.
    pub hidden_size: u32,
    /// Decoder layers.
    pub num_layers: u32,
    /// Query heads.
    pub num_heads: u32,
    /// Key/value heads. Divides `num_heads`.
    pub num_kv_heads: u32,
    /// Elements per head. Even.
    pub head_dim: u32,
    /// Width of the MLP.
    pub intermediate_size: u32,
    /// Added to the mean square in each RMS norm.
    pub rms_norm_eps: f32,
    /// The LM head uses the embedding table.
    pub tie_word_embeddings: bool,
    /// q, k and v projections have a bias.
    pub attention_bias: bool,
    /// The attention's output projection has a bias.
    pub output_bias: bool,
    /// Query and key heads are normalised (weights `q_norm`, `k_norm` of `head_dim` elements).
    pub qk_norm: bool,
    /// Rotary position embedding.
    pub rope: RopeConfig,
    /// The longest sequence that the model was trained for.
    pub max_position_embeddings: u32,
    /// The sliding window of some or all layers.
    pub sliding_window: Option<SlidingWindow>,
    /// End-of-sequence tokens, ascending. Ids outside the vocabulary cannot occur and are left out.
    pub eos: Vec<u32>,
    /// The sampling values of generation_config.json.
    pub generation: GenerationConfig,
}

impl ModelConfig {
    /// The positions that a query sees in layer `layer`, its own included, if it does not see all.
    pub fn window(&self, layer: u32) -> Option<u32> {
        let window = self.sliding_window.as_ref()?;
        window.layers.get(layer as usize).is_some_and(|&slides| slides).then_some(window.positions)
    }

    /// The name in `architectures`.
    pub fn architecture(&self) -> &'static str {
        self.architecture
    }

    /// The work of [`read_config`](crate::model::families::read_config), once `architecture` has found the family.
    pub(crate) fn read_folder(
        folder: &Path,
        architecture: impl FnOnce(&Fields<'_>) -> Result<&'static dyn Architecture, InputError>,
        fallback_dtype: impl FnOnce() -> Result<WeightDtype, InputError>,
    ) -> Result<Self, InputError> {
        let path = folder.join("config.json");
        let file = path.display().to_string();
        let config = json::parse_object(&file, &files::read(&path)?)?;
        let mut model = Self::parse(&file, "", &config, architecture, fallback_dtype)?;

        let path = folder.join("generation_config.json");
        if let Some(bytes) = files::read_if_there(&path)? {
            let file = path.display().to_string();
            let generation = json::parse_object(&file, &bytes)?;
            let eos = end_of_sequence(&Fields::new(&file, "", &generation), model.vocab_size)?;
            model.eos = eos.unwrap_or(model.eos);
            model.generation = GenerationConfig::parse(&file, &generation)?;
        }
        Ok(model)
    }

    /// The work of [`parse_config`](crate::model::families::parse_config), once `architecture` has found the family.
    pub(crate) fn parse(
        file: &str,
        place: &str,
        config: &Map<String, Value>,
        architecture: impl FnOnce(&Fields<'_>) -> Result<&'static dyn Architecture, InputError>,
        fallback_dtype: impl FnOnce() -> Result<WeightDtype, InputError>,
    ) -> Result<Self, InputError> {
        let fields = Fields::new(file, place, config);
        let architecture = architecture(&fields)?;
        architecture.refuse(&fields)?;
        let defaults = architecture.defaults();

        let size = |name: &str, default: u32| -> Result<u32, InputError> {
            match fields.u32(name)? {
                Some(0) => Err(fields.error(name, "must be at least 1")),
                value => Ok(value.unwrap_or(default)),
            }
        };
        let vocab_size = size("vocab_size", defaults.vocab_size)?;
        let hidden_size = size("hidden_size", defaults.hidden_size)?;
        let intermediate_size = size("intermediate_size", defaults.intermediate_size)?;
        let num_layers = size("num_hidden_layers", defaults.num_layers)?;
        for (name, value, largest) in [
            ("vocab_size", vocab_size, i32::MAX as u32),
            ("num_hidden_layers", num_layers, LARGEST_NUM_LAYERS),
        ] {
            if value > largest {
                return Err(fields.error(name, format!("must be at most {largest}, found {value}")));
            }
        }
        let num_heads = size("num_attention_heads", defaults.num_heads)?;
        // An explicit null means "as many as query heads" in every family. A missing field means the family's default.
        let num_kv_heads = match config.get("num_key_value_heads") {
            None => defaults.num_kv_heads.unwrap_or(num_heads),
            Some(_) => size("num_key_value_heads", num_heads)?,
        };
        if !num_heads.is_multiple_of(num_kv_heads) {
            return Err(fields.error(
                "num_key_value_heads",
                format!("{num_kv_heads} does not divide num_attention_heads = {num_heads}"),
            ));
        }
        let head_dim = match (fields.u32("head_dim")?, defaults.head_dim) {
            (Some(0), _) => return Err(fields.error("head_dim", "must be at least 1")),
            (Some(head_dim), _) => head_dim,
            (None, Some(head_dim)) if !config.contains_key("head_dim") => head_dim,
            (None, _) if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
            (None, _) => {
                let problem = format!(
                    "{hidden_size} is not a multiple of num_attention_heads = {num_heads}; give head_dim"
                );
                return Err(fields.error("hidden_size", problem));
            }
        };
        if head_dim % 2 != 0 {
            let problem = format!("{head_dim} is odd; rotary embedding needs pairs");
            return Err(fields.error("head_dim", problem));
        }
        for (name, heads) in [("num_attention_heads", num_heads), ("num_key_value_heads", num_kv_heads)] {
            // The q, k and v rows form one matrix, so three times the width must fit.
            if heads.checked_mul(head_dim).and_then(|v| v.checked_mul(3)).is_none() {
                let problem = format!("{name} = {heads} x head_dim = {head_dim} is too large");
                return Err(fields.error(name, problem));
            }
        }
        if intermediate_size.checked_mul(2).is_none() {
            return Err(fields.error("intermediate_size", "too large"));
        }
        let eps = fields.f64("rms_norm_eps")?.unwrap_or(1e-6);
        if !(eps > 0.0 && eps < 1.0) {
            return Err(fields.error("rms_norm_eps", format!("must be between 0 and 1, found {eps}")));
        }
        let max_position_embeddings = size("max_position_embeddings", defaults.max_position_embeddings)?;
        let dtype = match dtype_field(&fields)? {
            Some(dtype) => dtype,
            None => fallback_dtype()?,
        };
        let traits = architecture.traits(&fields, num_layers)?;
        let model = Self {
            architecture: architecture.name(),
            fields: config.clone(),
            dtype,
            vocab_size,
            hidden_size,
            num_layers,
            num_heads,
            num_kv_heads,
            head_dim,
            intermediate_size,
            rms_norm_eps: eps as f32,
            tie_word_embeddings: fields.bool("tie_word_embeddings")?.unwrap_or(false),
            attention_bias: traits.attention_bias,
            output_bias: traits.output_bias,
            qk_norm: traits.qk_norm,
            rope: RopeConfig::read(&fields, max_position_embeddings, traits.sliding_window.is_some())?,
            max_position_embeddings,
            sliding_window: traits.sliding_window,
            eos: match end_of_sequence(&fields, vocab_size)? {
                Some(eos) => eos,
                // Null means that there is none. A missing field means the default.
                None if config.contains_key("eos_token_id") => Vec::new(),
                None => defaults.eos.into_iter().filter(|&id| id < vocab_size).collect(),
            },
            generation: GenerationConfig::default(),
        };
        model.check_weight_sizes(&fields)?;
        Ok(model)
    }

    /// Columns of the widest activation row: q|k|v, gate|up, hidden or logits.
    pub(crate) fn widest_row(&self) -> u64 {
        let heads = u64::from(self.num_heads) + 2 * u64::from(self.num_kv_heads);
        let qkv = heads * u64::from(self.head_dim);
        let gate_up = 2 * u64::from(self.intermediate_size);
        qkv.max(gate_up).max(self.hidden_size.into()).max(self.vocab_size.into())
    }

    /// Checks that no matrix, and not the sum of all of them, overflows the address space.
    fn check_weight_sizes(&self, fields: &Fields<'_>) -> Result<(), InputError> {
        let hidden = u128::from(self.hidden_size);
        let heads = u128::from(self.num_heads) + u128::from(self.num_kv_heads);
        let layer = hidden * (2 * heads * u128::from(self.head_dim) + 3 * u128::from(self.intermediate_size));
        let bytes = 4 * (2 * hidden * u128::from(self.vocab_size) + layer * u128::from(self.num_layers));
        if bytes > isize::MAX as u128 {
            return Err(InputError::Overflow {
                file: fields.file.into(),
                what: "the weights' size".into(),
                computation: format!(
                    "{} layers of hidden_size = {}, intermediate_size = {}, vocab_size = {}",
                    self.num_layers, self.hidden_size, self.intermediate_size, self.vocab_size
                ),
            });
        }
        Ok(())
    }
}

/// `dtype` (transformers 5) before `torch_dtype` (4).
fn dtype_field(fields: &Fields<'_>) -> Result<Option<WeightDtype>, InputError> {
    for name in ["dtype", "torch_dtype"] {
        let Some(dtype) = fields.str(name)? else { continue };
        return match dtype.strip_prefix("torch.").unwrap_or(dtype) {
            "float32" | "float" => Ok(Some(WeightDtype::F32)),
            "float16" | "half" => Ok(Some(WeightDtype::F16)),
            "bfloat16" => Ok(Some(WeightDtype::Bf16)),
            // "auto" means the checkpoint's dtype.
            "auto" => Ok(None),
            other => Err(fields.unsupported(
                name,
                format!("the dtype \"{other}\""),
                "supported are float32, float16 and bfloat16",
            )),
        };
    }
    Ok(None)
}

/// Reads `eos_token_id`: one id, a list, or absent.
fn end_of_sequence(fields: &Fields<'_>, vocab_size: u32) -> Result<Option<Vec<u32>>, InputError> {
    const NAME: &str = "eos_token_id";
    let values = match fields.get(NAME) {
        None => return Ok(None),
        Some(Value::Array(list)) => list.as_slice(),
        Some(one) => std::slice::from_ref(one),
    };
    let mut eos = Vec::with_capacity(values.len());
    for value in values {
        let Some(id) = value.as_i64() else {
            let problem = format!("expected a token id or a list of them, found {}", json::kind(value));
            return Err(fields.error(NAME, problem));
        };
        if let Some(id) = u32::try_from(id).ok().filter(|&id| id < vocab_size) {
            eos.push(id);
        }
    }
    eos.sort_unstable();
    eos.dedup();
    Ok(Some(eos))
}
