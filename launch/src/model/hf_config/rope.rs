//! Rotary position embedding: its configuration and its table.
//!
//! Frequencies follow `transformers/modeling_rope_utils.py` step by step in f32, with each step correctly
//! rounded. As there, the angle is the f32 product of position and frequency. Its cosine and sine are computed in f64
//! and rounded. The only difference from transformers' own table is the last bit of its power function, which is at
//! most about 6e-8 x position in the angle.

use super::yarn::Yarn;
use crate::model::{error::InputError, json::Fields, sampling::short};

/// Rotary position embedding of all layers.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// How the frequencies are changed for longer contexts.
    pub scaling: RopeScaling,
}

/// A change to the frequencies.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// `rope_type` "default".
    None,
    /// `rope_type` "linear": all frequencies are divided.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// `rope_type` "llama3": long wavelengths are divided, short ones kept, and those between blended.
    Llama3 {
        /// The divisor of long wavelengths.
        factor: f64,
        /// Wavelengths over `original_max_position_embeddings / low_freq_factor` are long.
        low_freq_factor: f64,
        /// Wavelengths under `original_max_position_embeddings / high_freq_factor` are short.
        high_freq_factor: f64,
        /// Context length before the change.
        original_max_position_embeddings: u32,
    },
    /// `rope_type` "yarn".
    Yarn(Yarn),
}

impl RopeConfig {
    /// Reads `rope_parameters` (transformers 5, flat or one per layer type), or `rope_theta` and `rope_scaling`
    /// (transformers 4).
    ///
    /// All layers have one rotary embedding. A model with sliding layers (`slides`) whose entry of `sliding_attention` differs from that
    /// of `full_attention` is refused.
    pub(crate) fn read(fields: &Fields<'_>, max_positions: u32, slides: bool) -> Result<Self, InputError> {
        // As in transformers, `rope_scaling` takes precedence over `rope_parameters`.
        let (name, parameters) = match fields.object("rope_scaling")? {
            Some(scaling) if !scaling.is_empty() => ("rope_scaling", Some(scaling)),
            _ => ("rope_parameters", fields.object("rope_parameters")?),
        };
        let parameters = match parameters {
            // Nested by layer type.
            Some(p) if p.get("full_attention").is_some() => {
                if slides
                    && p.get("sliding_attention").is_some_and(|own| Some(own) != p.get("full_attention"))
                {
                    return Err(p.unsupported(
                        "sliding_attention",
                        "a rotary embedding of its own for sliding layers",
                        "only one that equals `full_attention` is supported",
                    ));
                }
                p.object("full_attention")?
            }
            Some(p) if p.get("sliding_attention").is_some() => {
                return Err(p.error("full_attention", "missing"));
            }
            other => other,
        };
        let own = parameters.as_ref();

        let theta_of = |from: &Fields<'_>| -> Result<Option<f64>, InputError> {
            match from.f64("rope_theta")? {
                Some(theta) if !(theta > 0.0 && (theta as f32).is_finite()) => {
                    let problem = format!("must be above 0 and below 3.4e38, found {}", short(theta));
                    Err(from.error("rope_theta", problem))
                }
                theta => Ok(theta),
            }
        };
        let theta = match own.map(theta_of).transpose()?.flatten() {
            Some(theta) => theta,
            None => theta_of(fields)?.unwrap_or(10_000.0),
        };

        for from in [Some(fields), own].into_iter().flatten() {
            if let Some(factor) = from.f64("partial_rotary_factor")?
                && factor != 1.0
            {
                return Err(from.unsupported(
                    "partial_rotary_factor",
                    format!("rotating {factor} of each head"),
                    "only 1.0 is supported",
                ));
            }
        }
        let Some(own) = own else { return Ok(Self { theta, scaling: RopeScaling::None }) };

        let type_name = if own.get("rope_type").is_some() { "rope_type" } else { "type" };
        let factor = |name: &str| -> Result<f64, InputError> {
            match own.f64(name)? {
                Some(v) if v > 0.0 && v.is_finite() => Ok(v),
                Some(v) => Err(own.error(name, format!("must be positive, found {v}"))),
                None => Err(own.error(name, "missing")),
            }
        };
        let original = || -> Result<u32, InputError> {
            // As in transformers, the field outside `name` takes precedence, and the longest context is the default.
            const ORIGINAL: &str = "original_max_position_embeddings";
            match fields.u32(ORIGINAL)?.map_or_else(|| own.u32(ORIGINAL), |v| Ok(Some(v)))? {
                Some(0) => Err(own.error(ORIGINAL, "must be at least 1")),
                positions => Ok(positions.unwrap_or(max_positions)),
            }
        };
        let scaling = match own.str(type_name)?.unwrap_or("default") {
            "default" => RopeScaling::None,
            "linear" => RopeScaling::Linear { factor: factor("factor")? },
            "llama3" => {
                let low_freq_factor = factor("low_freq_factor")?;
                let high_freq_factor = factor("high_freq_factor")?;
                if high_freq_factor <= low_freq_factor {
                    return Err(own.error(
                        "high_freq_factor",
                        format!(
                            "{high_freq_factor} must be greater than low_freq_factor = {low_freq_factor}"
                        ),
                    ));
                }
                RopeScaling::Llama3 {
                    factor: factor("factor")?,
                    low_freq_factor,
                    high_freq_factor,
                    original_max_position_embeddings: original()?,
                }
            }
            "yarn" => {
                // Its logarithm is a divisor.
                if theta <= 1.0 {
                    let at = if own.get("rope_theta").is_some() { own } else { fields };
                    return Err(at.error("rope_theta", format!("yarn needs more than 1, found {theta}")));
                }
                RopeScaling::Yarn(Yarn::read(own, factor("factor")?, original()?)?)
            }
            other => {
                return Err(fields.unsupported(
                    &format!("{name}.{type_name}"),
                    format!("the rope type \"{other}\""),
                    "supported are default, linear, llama3 and yarn",
                ));
            }
        };
        Ok(Self { theta, scaling })
    }
}

/// Radians per position for each of the `head_dim / 2` pairs of a head.
pub fn inverse_frequencies(rope: &RopeConfig, head_dim: u32) -> Vec<f32> {
    let theta = f64::from(rope.theta as f32);
    let powers: Vec<f32> = (0..head_dim / 2)
        .map(|i| {
            let exponent = (2 * i) as f32 / head_dim as f32;
            theta.powf(f64::from(exponent)) as f32
        })
        .collect();
    let mut frequencies: Vec<f32> = powers.iter().map(|power| 1.0 / power).collect();
    match &rope.scaling {
        RopeScaling::None => {}
        RopeScaling::Linear { factor } => {
            for frequency in &mut frequencies {
                *frequency /= *factor as f32;
            }
        }
        &RopeScaling::Llama3 {
            factor,
            low_freq_factor: low,
            high_freq_factor: high,
            original_max_position_embeddings,
        } => {
            let context = f64::from(original_max_position_embeddings);
            let (longest, shortest) = ((context / low) as f32, (context / high) as f32);
            for frequency in &mut frequencies {
                let wavelength = (2.0 * std::f64::consts::PI) as f32 / *frequency;
                if wavelength > longest {
                    *frequency /= factor as f32;
                } else if wavelength >= shortest {
                    let smooth = (context as f32 / wavelength - low as f32) / ((high - low) as f32);
                    *frequency = (1.0 - smooth) * *frequency / factor as f32 + smooth * *frequency;
                }
            }
        }
        RopeScaling::Yarn(yarn) => frequencies = yarn.frequencies(rope.theta, &powers),
    }
    frequencies
}

/// The table [positions, head_dim]. Row p holds the cosines, then the sines, of p x each frequency. Yarn scales both.
///
/// Elements i and i + head_dim/2 of a head form the pair that rotates by frequency i. The table must fit in memory:
/// [`ModelJson::sizes`](crate::model::model_json::ModelJson::sizes) checks its size.
pub fn rope_table(rope: &RopeConfig, head_dim: u32, positions: u32) -> Vec<f32> {
    let frequencies = inverse_frequencies(rope, head_dim);
    let scale = match &rope.scaling {
        RopeScaling::Yarn(yarn) => yarn.attention_factor as f32,
        _ => 1.0,
    };
    let mut table = Vec::with_capacity(positions as usize * 2 * frequencies.len());
    for position in 0..positions {
        let angles = frequencies.iter().map(|f| f64::from(position as f32 * f));
        table.extend(angles.clone().map(|angle| angle.cos() as f32 * scale));
        table.extend(angles.map(|angle| angle.sin() as f32 * scale));
    }
    table
}
