//! The gate, rounded to the weight's type, then the product, in f64.

use crate::tasks::linear::reference::linear;
use crate::tasks::silu_mul::reference::silu_mul;
use crate::testing::rounded;
use taskgraph::DType;

/// As `silu_mul` over `k` columns, then as `linear`; `dtype` is the weight's
/// type.
pub fn silu_mul_linear(
    gate_up: &[f32],
    weight: &[f32],
    k: usize,
    dtype: DType,
    bias: Option<&[f32]>,
    residual: Option<&[f32]>,
) -> Vec<f64> {
    let gated: Vec<f32> = silu_mul(gate_up, k).into_iter().map(|v| v as f32).collect();
    linear(&rounded(dtype, &gated), weight, k, bias, residual)
}
