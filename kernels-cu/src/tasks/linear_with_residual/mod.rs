//! `linear_with_residual`: x `[rows, k]` times weight `[n, k]`, an optional bias `[n]`, plus residual `[rows, n]` (f32).
//! Output `[rows, n]` f32. See `src/tasks/linear_family.rs`.

use crate::tasks::linear_family::{Family, Source};
use crate::tasks::linear_member::member;
use taskgraph::task_type::Fusion;

#[cfg(test)]
mod reference;
#[cfg(test)]
mod test;

const FAMILY: Family = Family { source: Source::Plain, residual: true, gated: false };
const FUSIONS: &[Fusion] =
    &[Fusion { producer: "linear", consumer: "add", consumer_input: 0, fused: "linear_with_residual" }];

member!("linear_with_residual", LinearWithResidual, mpk_task_linear_with_residual, FAMILY, &[1], FUSIONS);
