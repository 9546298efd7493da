//! Gated products: how the rows of gates and ups lie in the weight, and when a gate becomes part of the product.
//!
//! On GPUs the rows lie in pairs (`MPK_LAYOUT_PAIRED`). So the gates and ups of a task are one operand, and its columns are a multiple of 8
//! instead of 16.

use super::Family;
use crate::abi;
use crate::tasks::contract;
use crate::tasks::linear_knobs::GATING_WORKERS;
use crate::tasks::source::Source;
use smallvec::{SmallVec, smallvec};
use std::ops::Range;
use taskgraph::target::Backend;
use taskgraph::task_type::OpView;
use taskgraph::{Sharding, Target};

/// The layout in which GPUs read the weight of a product, gated or not.
pub fn gpu_layout(gated: bool) -> u32 {
    if gated { abi::MPK_LAYOUT_PAIRED } else { abi::MPK_LAYOUT_FRAGMENT }
}

/// The weight's rows for columns `columns` of the output, of `all` columns, as they lie in memory. Of a gated product, these are the gates
/// and the ups: two ranges, or one if they lie in pairs.
pub fn rows_of(gated: bool, columns: Range<u32>, all: u32, target: &Target) -> SmallVec<[Range<u32>; 2]> {
    let Range { start, end } = columns;
    match (gated, target.backend.pair_rows()) {
        (false, _) => smallvec![start..end],
        (true, Some(_)) => smallvec![2 * start..2 * end],
        (true, None) => smallvec![start..end, all + start..all + end],
    }
}

impl Family {
    /// For [`taskgraph::TaskType::fuses`]. A gate after the product becomes part of it if there are many workers. Otherwise each of them
    /// would gate all inputs, which costs more than gating its few outputs. Packed weights are cut at multiples of 16 rows, so the ups must
    /// begin at such a row. If the rows lie in pairs, they must begin at a multiple of 8.
    pub fn fuses(self, op: &OpView<'_>, world: u32, target: &Target) -> bool {
        if !contract::activation(op.attrs).is_ok_and(|activation| self.has_gate(activation, target)) {
            return false;
        }
        if !self.gated {
            return true;
        }
        let Some(weight) = self.operands(op.inputs.len()).ok().and_then(|at| op.inputs.get(at.weight)) else {
            return false;
        };
        let unit = self.column_unit(target);
        let aligned = |columns: u64| columns.is_multiple_of(u64::from(unit));
        let aligned = match weight.sharding {
            Sharding::Split { dim: 0, parts } => parts.iter().all(|part| {
                (0..world)
                    .map(|rank| part.split.range(part.len, rank, world))
                    .all(|r| aligned(r.end - r.start))
            }),
            _ => weight.ty.dims.first().is_some_and(|n| aligned(n / 2)),
        };
        aligned && u64::from(target.max_tiles) >= target.tuned(&GATING_WORKERS)
    }

    /// True if the target's code has this gate, or the product has none. The GPU's products gate by SiLU only.
    pub(super) fn has_gate(self, activation: u32, target: &Target) -> bool {
        let gates = self.gated || self.source == Source::SiluMul;
        !gates || target.backend != Backend::Cuda || activation == abi::MPK_ACTIVATION_SILU
    }

    /// What to use instead of a gate that is refused, for the message.
    pub(super) fn separate(self) -> &'static str {
        match (self.gated, self.source, self.residual) {
            (true, Source::RmsNorm, _) => {
                "use `rmsnorm_linear`, then `silu_mul`; they are fused where that is possible"
            }
            (true, ..) => "use `linear`, then `silu_mul`",
            (false, _, true) => "use `silu_mul`, then `linear_with_residual`",
            (false, _, false) => "use `silu_mul`, then `linear`",
        }
    }

    /// The widths of column tiles of the output are multiples of this.
    pub(super) fn column_unit(self, target: &Target) -> u32 {
        target.backend.pair_rows().filter(|_| self.gated).unwrap_or(target.column_unit)
    }

    /// For [`taskgraph::TaskType::paired_inputs`], if `weight` is the weight.
    pub fn paired_inputs<'a>(self, weight: &'a [usize], target: &Target) -> &'a [usize] {
        if self.gated && target.backend.pair_rows().is_some() { weight } else { &[] }
    }
}
