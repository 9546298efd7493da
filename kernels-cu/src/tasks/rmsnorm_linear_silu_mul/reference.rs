//! The product as `rmsnorm_linear`, rounded to `dtype`, then the gate, in f64.

use crate::tasks::rmsnorm_linear::reference::rmsnorm_linear;
use crate::tasks::silu_mul::reference::silu_mul;
use crate::testing::rounded;
use taskgraph::DType;

/// `weight` [2n, k] and the output have type `dtype`.
pub fn rmsnorm_linear_silu_mul(
    x: &[f32],
    norm: &[f32],
    weight: &[f32],
    dtype: DType,
    eps: f64,
    bias: Option<&[f32]>,
) -> Vec<f64> {
    let n = weight.len() / norm.len() / 2;
    let gate_up: Vec<f32> =
        rmsnorm_linear(x, norm, weight, dtype, eps, bias).into_iter().map(|v| v as f32).collect();
    silu_mul(&rounded(dtype, &gate_up), n)
}
