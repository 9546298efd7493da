//! Rope type "yarn" (arXiv 2309.00071), as `_compute_yarn_parameters` of `transformers/modeling_rope_utils.py` has it.
//!
//! Pairs that turn slowly are interpolated (their frequency is divided), fast ones are kept, and those between are blended. Cosines and
//! sines are multiplied by a factor.

use std::f64::consts::PI;

use crate::model::{error::InputError, json::Fields};

/// A change to the frequencies for a context `factor` times as long.
#[derive(Debug, Clone, PartialEq)]
pub struct Yarn {
    /// The divisor of slow pairs.
    pub factor: f64,
    /// What cosines and sines are multiplied by.
    pub attention_factor: f64,
    /// Pairs that turn at least this often in the original context are kept.
    pub beta_fast: f64,
    /// Pairs that turn at most this often in the original context are divided.
    pub beta_slow: f64,
    /// Context length before the change.
    pub original_max_position_embeddings: u32,
    /// The blend begins and ends at whole pairs.
    pub truncate: bool,
}

impl Yarn {
    /// Reads all but `factor` and `original`, which other rope types have, too.
    ///
    /// # Errors
    /// A value is not positive.
    pub(super) fn read(own: &Fields<'_>, factor: f64, original: u32) -> Result<Self, InputError> {
        // As in transformers, zero means the default.
        let or_default = |name: &str, default: f64| -> Result<f64, InputError> {
            match own.f64(name)? {
                None | Some(0.0) => Ok(default),
                Some(v) if v > 0.0 && v.is_finite() => Ok(v),
                Some(v) => Err(own.error(name, format!("must be positive, found {v}"))),
            }
        };
        let attention_factor = match own.f64("attention_factor")? {
            Some(v) if v > 0.0 && v.is_finite() => v,
            Some(v) => return Err(own.error("attention_factor", format!("must be positive, found {v}"))),
            None => {
                let mscale = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
                match (or_default("mscale", 0.0)?, or_default("mscale_all_dim", 0.0)?) {
                    (scale, of_all) if scale > 0.0 && of_all > 0.0 => mscale(scale) / mscale(of_all),
                    _ => mscale(1.0),
                }
            }
        };
        Ok(Self {
            factor,
            attention_factor,
            beta_fast: or_default("beta_fast", 32.0)?,
            beta_slow: or_default("beta_slow", 1.0)?,
            original_max_position_embeddings: original,
            // transformers takes null for false.
            truncate: own.bool("truncate")?.unwrap_or(own.raw("truncate").is_none()),
        })
    }

    /// The context that the change is for, in positions.
    pub fn longest(&self) -> u32 {
        (f64::from(self.original_max_position_embeddings) * self.factor) as u32
    }

    /// The frequencies of pairs whose wavelengths are 2 pi x `powers` (powers of `theta`, which is more than 1).
    pub(super) fn frequencies(&self, theta: f64, powers: &[f32]) -> Vec<f32> {
        let head_dim = 2.0 * powers.len() as f64;
        // The pair that turns `turns` times in the original context.
        let pair = |turns: f64| {
            let wavelength = f64::from(self.original_max_position_embeddings) / turns;
            head_dim * (wavelength / (2.0 * PI)).ln() / (2.0 * theta.ln())
        };
        let (mut first, mut last) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.truncate {
            (first, last) = (first.floor(), last.ceil());
        }
        let (first, last) = (first.max(0.0), last.min(head_dim - 1.0));
        let width = if first == last { 0.001 } else { last - first };
        let blend = |(i, power): (usize, &f32)| {
            let divided = 1.0 / (self.factor as f32 * power);
            let kept = 1.0 - ((i as f32 - first as f32) / width as f32).clamp(0.0, 1.0);
            divided * (1.0 - kept) + 1.0 / power * kept
        };
        powers.iter().enumerate().map(blend).collect()
    }
}
