//! Slots of a tensor's dimension, one for each rank, and where they are on another rank of the rotation.

use super::boxes::Boxes;
use crate::region::Region;

/// How the ranks' accesses to a tensor differ.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Turn {
    /// Not at all.
    Still,
    /// By slots of this dimension.
    Slots(u8),
    /// In some other way.
    Other,
}

/// Boxes with the slots of dimension `d` turned by `rank`; `None` if a box covers neither one slot nor all of
/// them.
pub(super) fn turned(from: &[Region], d: usize, dim: u32, world: u32, rank: u32) -> Option<Boxes> {
    from.iter().map(|region| turned_region(region, d, dim, world, rank)).collect()
}

pub(super) fn turned_region(region: &Region, d: usize, dim: u32, world: u32, rank: u32) -> Option<Region> {
    let slot = dim / world;
    let (lo, hi) = (region.lo[d], region.hi[d]);
    if (lo, hi) == (0, dim) {
        return Some(*region);
    }
    let one = lo < hi && lo / slot == (hi - 1) / slot;
    let start = (lo + rank * slot) % dim;
    one.then(|| region.with(d, start, start + (hi - lo)))
}
