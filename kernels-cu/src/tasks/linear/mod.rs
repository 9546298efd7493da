//! `linear`: x `[rows, k]` times weight `[n, k]`, and an optional bias `[n]`. Output `[rows, n]`.
//! See `src/tasks/linear_family.rs`.

use crate::tasks::linear_family::{Family, Source};
use crate::tasks::linear_member::member;

#[cfg(test)]
pub(crate) mod reference;
#[cfg(test)]
mod test;

const FAMILY: Family = Family { source: Source::Plain, residual: false, gated: false };

member!("linear", Linear, mpk_task_linear, FAMILY, &[1, 2], &[]);
