//! `rmsnorm_linear`: x `[rows, k]` (f32 or the act dtype) normed with the norm weight `[k]`, times weight `[n, k]`, and
//! an optional bias `[n]`. Output `[rows, n]`, or `[samples, n]` with `gather_samples`.
//! See `src/tasks/linear_family.rs`.

use crate::tasks::linear_family::{Family, Source};
use crate::tasks::linear_member::member;
use taskgraph::task_type::Fusion;

#[cfg(test)]
pub(crate) mod reference;
#[cfg(test)]
mod test;

const FAMILY: Family = Family { source: Source::RmsNorm, residual: false, gated: false };
const FUSIONS: &[Fusion] =
    &[Fusion { producer: "rmsnorm", consumer: "linear", consumer_input: 0, fused: "rmsnorm_linear" }];

member!("rmsnorm_linear", RmsNormLinear, mpk_task_rmsnorm_linear, FAMILY, &[1, 2, 3], FUSIONS);
