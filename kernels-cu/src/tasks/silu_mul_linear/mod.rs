//! `silu_mul_linear`: silu(gate) * up of x `[rows, 2k]` = `[gate | up]`, times weight `[n, k]`, and an optional bias
//! `[n]`. Output `[rows, n]`. See `src/tasks/linear_family.rs`.

use crate::tasks::linear_family::{Family, Source};
use crate::tasks::linear_member::member;
use taskgraph::task_type::Fusion;

#[cfg(test)]
pub(crate) mod reference;
#[cfg(test)]
mod test;

const FAMILY: Family = Family { source: Source::SiluMul, residual: false, gated: false };
const FUSIONS: &[Fusion] =
    &[Fusion { producer: "silu_mul", consumer: "linear", consumer_input: 0, fused: "silu_mul_linear" }];

member!("silu_mul_linear", SiluMulLinear, mpk_task_silu_mul_linear, FAMILY, &[1, 2], FUSIONS);
