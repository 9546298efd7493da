//! Blocks of a tensor's dimension that belong to the ranks in turn, and where they are on another rank of the rotation.

use crate::region::Region;
use smallvec::SmallVec;

/// Equal blocks along a dimension. Block b belongs to rank b modulo the number of ranks. With one block for each rank they are slots.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Blocks {
    /// The dimension.
    pub dim: u8,
    /// Indices of a block.
    pub size: u32,
}

impl Blocks {
    /// The blocks along `dim` with which something that begins at index `first` on rank 0 begins at `there` on `rank`.
    pub fn between(dim: u8, first: u32, there: u32, world: u32, rank: u32) -> Option<Blocks> {
        // The block is turned to the same group of blocks, one for each rank.
        let (distance, ranks) =
            if there > first { (there - first, rank) } else { (first - there, world - rank) };
        let whole = ranks > 0 && distance > 0 && distance.is_multiple_of(ranks);
        whole.then(|| Blocks { dim, size: distance / ranks })
    }

    /// True if a dimension with `indices` indices has the same number of blocks for each rank.
    pub fn divide(&self, indices: u32, world: u32) -> bool {
        let group = u64::from(self.size) * u64::from(world);
        group > 0 && indices > 0 && u64::from(indices).is_multiple_of(group)
    }

    /// The rank to which the region belongs; `None` if it is not inside one block.
    pub fn owner(&self, region: &Region, world: u32) -> Option<u32> {
        self.block(region).map(|block| block % world)
    }

    fn block(&self, region: &Region) -> Option<u32> {
        let d = usize::from(self.dim);
        let (first, last) = (region.lo[d] / self.size, region.hi[d].saturating_sub(1) / self.size);
        (first == last).then_some(first)
    }

    /// The region turned by `rank`. `None` if it is neither inside one block nor whole groups of blocks, one for each rank.
    pub fn turned(&self, region: &Region, world: u32, rank: u32) -> Option<Region> {
        let d = usize::from(self.dim);
        let (lo, hi, group) = (region.lo[d], region.hi[d], self.size * world);
        if lo >= hi {
            return None;
        }
        if lo.is_multiple_of(group) && hi.is_multiple_of(group) {
            return Some(*region);
        }
        let block = self.block(region)?;
        let turned = block / world * world + (block % world + rank) % world;
        let start = turned * self.size + lo % self.size;
        Some(region.with(d, start, start + (hi - lo)))
    }

    /// The same for several regions.
    pub fn turned_all(&self, regions: &[Region], world: u32, rank: u32) -> Option<SmallVec<[Region; 2]>> {
        regions.iter().map(|region| self.turned(region, world, rank)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Turning maps the indices one to one, and a region to the indices to which its own are mapped.
    #[test]
    fn blocks_turn_one_to_one() {
        for (size, world, groups) in [(1, 2, 1), (4, 2, 3), (3, 3, 2), (2, 4, 1)] {
            let (blocks, indices) = (Blocks { dim: 0, size }, size * world * groups);
            assert!(blocks.divide(indices, world));
            assert!(!blocks.divide(indices + size, world));
            let one = |i: u32| Region::whole(&[indices]).with(0, i, i + 1);
            for rank in 1..world {
                let to: Vec<u32> =
                    (0..indices).map(|i| blocks.turned(&one(i), world, rank).unwrap().lo[0]).collect();
                let mut all = to.clone();
                all.sort_unstable();
                assert_eq!(all, (0..indices).collect::<Vec<_>>());
                for (first, &there) in to.iter().enumerate() {
                    assert_eq!(Blocks::between(0, first as u32, there, world, rank), Some(blocks));
                }
                for (lo, hi) in (0..indices).flat_map(|lo| (lo + 1..=indices).map(move |hi| (lo, hi))) {
                    let region = Region::whole(&[indices]).with(0, lo, hi);
                    let Some(turned) = blocks.turned(&region, world, rank) else { continue };
                    let mut mapped = to[lo as usize..hi as usize].to_vec();
                    mapped.sort_unstable();
                    assert_eq!(mapped, (turned.lo[0]..turned.hi[0]).collect::<Vec<_>>());
                }
            }
        }
    }
}
