//! The index space of a tensor, cut at every face of a set of boxes, so that each box consists of whole cells.

use crate::region::{MAX_DIMS, Region};

/// Maximum number of cells per box. If there are more, callers compare boxes pair by pair.
const CELLS_PER_BOX: usize = 64;

#[derive(Default)]
pub(super) struct Grid {
    /// Coordinates of the cuts in each dimension.
    cuts: [Vec<u32>; MAX_DIMS],
    /// Cells in each dimension.
    cells: [usize; MAX_DIMS],
}

/// The cells of one box: half-open in each dimension.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Cells {
    lo: [usize; MAX_DIMS],
    hi: [usize; MAX_DIMS],
}

impl Grid {
    /// Cuts the space by `boxes`. Returns false if there would be too many cells.
    pub(super) fn build<'a>(&mut self, boxes: impl Iterator<Item = &'a Region>) -> bool {
        self.cuts.iter_mut().for_each(Vec::clear);
        let mut count = 0;
        let mut previous: Option<&Region> = None;
        for region in boxes {
            count += 1;
            for d in 0..MAX_DIMS {
                if previous.is_none_or(|p| p.lo[d] != region.lo[d] || p.hi[d] != region.hi[d]) {
                    self.cuts[d].push(region.lo[d]);
                    self.cuts[d].push(region.hi[d]);
                }
            }
            previous = Some(region);
        }
        let mut total = 1usize;
        for (cuts, cells) in self.cuts.iter_mut().zip(&mut self.cells) {
            cuts.sort_unstable();
            cuts.dedup();
            *cells = cuts.len().saturating_sub(1);
            total = total.saturating_mul(*cells);
        }
        total <= CELLS_PER_BOX * count + 4096
    }

    /// Number of cells.
    pub(super) fn len(&self) -> usize {
        self.cells.iter().product()
    }

    /// The cells of a box that `build` was given.
    pub(super) fn cells(&self, region: &Region) -> Cells {
        let mut found = Cells { lo: [0; MAX_DIMS], hi: [1; MAX_DIMS] };
        for d in 0..MAX_DIMS {
            if self.cells[d] != 1 {
                found.lo[d] = self.cuts[d].partition_point(|&c| c < region.lo[d]);
                found.hi[d] = self.cuts[d].partition_point(|&c| c < region.hi[d]);
            }
        }
        found
    }

    /// Calls `visit` with the number of each cell until it returns false.
    pub(super) fn visit(&self, cells: &Cells, mut visit: impl FnMut(usize) -> bool) {
        for a in cells.lo[0]..cells.hi[0] {
            for b in cells.lo[1]..cells.hi[1] {
                for c in cells.lo[2]..cells.hi[2] {
                    let row = ((a * self.cells[1] + b) * self.cells[2] + c) * self.cells[3];
                    for d in cells.lo[3]..cells.hi[3] {
                        if !visit(row + d) {
                            return;
                        }
                    }
                }
            }
        }
    }
}

/// A box of `region` that is in none of `covers`; `None` if they cover it.
pub(super) fn uncovered(region: &Region, covers: &[Region]) -> Option<Region> {
    let Some((first, rest)) = covers.split_first() else {
        return (!region.is_empty()).then_some(*region);
    };
    if !first.overlaps(region) {
        return uncovered(region, rest);
    }
    let mut inner = *region;
    for d in 0..MAX_DIMS {
        if inner.lo[d] < first.lo[d] {
            let below = inner.with(d, inner.lo[d], first.lo[d]);
            if let Some(found) = uncovered(&below, rest) {
                return Some(found);
            }
            inner.lo[d] = first.lo[d];
        }
        if inner.hi[d] > first.hi[d] {
            let above = inner.with(d, first.hi[d], inner.hi[d]);
            if let Some(found) = uncovered(&above, rest) {
                return Some(found);
            }
            inner.hi[d] = first.hi[d];
        }
    }
    None
}
