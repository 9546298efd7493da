//! `silu_mul_linear_with_residual`: silu(gate) * up of x `[rows, 2k]` = `[gate | up]`, times weight `[n, k]`, an
//! optional bias `[n]`, plus residual `[rows, n]` (f32). Output `[rows, n]` f32. See `src/tasks/linear_family.rs`.

use crate::tasks::linear_family::{Family, Source};
use crate::tasks::linear_member::member;
use taskgraph::task_type::Fusion;

#[cfg(test)]
mod reference;
#[cfg(test)]
mod test;

const FAMILY: Family = Family { source: Source::SiluMul, residual: true, gated: false };
const FUSIONS: &[Fusion] = &[
    Fusion {
        producer: "silu_mul_linear",
        consumer: "add",
        consumer_input: 0,
        fused: "silu_mul_linear_with_residual",
    },
    Fusion {
        producer: "silu_mul",
        consumer: "linear_with_residual",
        consumer_input: 0,
        fused: "silu_mul_linear_with_residual",
    },
];

member!(
    "silu_mul_linear_with_residual",
    SiluMulLinearWithResidual,
    mpk_task_silu_mul_linear_with_residual,
    FAMILY,
    &[1],
    FUSIONS
);
