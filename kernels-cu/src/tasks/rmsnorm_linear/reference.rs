//! The norm, rounded to the weight's type, then the product, in f64.

use crate::tasks::linear::reference::linear;
use crate::tasks::rmsnorm::reference::rmsnorm;
use crate::testing::rounded;
use taskgraph::DType;

/// As `rmsnorm`, then as `linear`; `dtype` is the weight's type.
pub fn rmsnorm_linear(
    x: &[f32],
    norm: &[f32],
    weight: &[f32],
    dtype: DType,
    eps: f64,
    bias: Option<&[f32]>,
) -> Vec<f64> {
    let normed: Vec<f32> = rmsnorm(x, norm, eps).into_iter().map(|v| v as f32).collect();
    linear(&rounded(dtype, &normed), weight, norm.len(), bias, None)
}
