//! `rmsnorm_linear_silu_mul`: x `[rows, k]` (f32 or the act dtype) normed with the norm weight `[k]`, times weight
//! `[2n, k]` = gate above up, and an optional bias `[2n]`; then silu(gate) * up. Output `[rows, n]`. Gate and up are
//! rounded to the output's type first, so the bits are the same as those of separate `rmsnorm_linear` and `silu_mul`.
//! See `src/tasks/linear_family.rs`.

use crate::tasks::linear_family::{Family, Source};
use crate::tasks::linear_member::member;
use taskgraph::task_type::Fusion;

#[cfg(test)]
mod reference;
#[cfg(test)]
mod test;

const FAMILY: Family = Family { source: Source::RmsNorm, residual: false, gated: true };
const FUSIONS: &[Fusion] = &[Fusion {
    producer: "rmsnorm_linear",
    consumer: "silu_mul",
    consumer_input: 0,
    fused: "rmsnorm_linear_silu_mul",
}];

member!(
    "rmsnorm_linear_silu_mul",
    RmsNormLinearSiluMul,
    mpk_task_rmsnorm_linear_silu_mul,
    FAMILY,
    &[1, 2, 3],
    FUSIONS
);
