//! Knowledge per rank: an element of each rank's chain.

use smallvec::SmallVec;

pub(super) const LANES: usize = 8;
pub(super) type Lanes = [u16; LANES];

/// Clocks of one order; see the module's documentation.
#[derive(Default)]
pub(super) struct Clocks {
    /// `blocks` lane groups per node: the first chain element after it (`u16::MAX`: none).
    pub(super) first: Vec<Lanes>,
    /// The last chain element before it (0: none). Elements are counted from 1, the begin event.
    pub(super) last: Vec<Lanes>,
}

/// Rotates all lanes by a distance below their number. Each distance is one shuffle; a variable distance would need a detour
/// through memory.
#[inline]
fn rotated(lanes: &Lanes, by: usize) -> Lanes {
    fn rotate<const BY: usize>(lanes: &Lanes) -> Lanes {
        std::array::from_fn(|lane| lanes[(lane + LANES - BY) % LANES])
    }
    match by {
        1 => rotate::<1>(lanes),
        2 => rotate::<2>(lanes),
        3 => rotate::<3>(lanes),
        4 => rotate::<4>(lanes),
        5 => rotate::<5>(lanes),
        6 => rotate::<6>(lanes),
        7 => rotate::<7>(lanes),
        _ => *lanes,
    }
}

/// Turns the knowledge about a node to that about the node `by` ranks ahead.
#[inline]
pub(super) fn turned_lanes(lanes: &[Lanes], by: usize, world: usize) -> SmallVec<[Lanes; 1]> {
    match (lanes, by) {
        ([lanes], 0) => SmallVec::from_buf([*lanes]),
        ([lanes], by) if by < world && world == LANES => SmallVec::from_buf([rotated(lanes, by)]),
        ([lanes], by) if by < world => {
            let mut turned = *lanes;
            turned[by..world].copy_from_slice(&lanes[..world - by]);
            turned[..by].copy_from_slice(&lanes[world - by..world]);
            SmallVec::from_buf([turned])
        }
        (lanes, 0) => SmallVec::from_slice(lanes),
        _ => {
            let mut turned: SmallVec<[Lanes; 1]> = SmallVec::from_slice(lanes);
            for rank in 0..world {
                let to = (rank + by) % world;
                turned[to / LANES][to % LANES] = lanes[rank / LANES][rank % LANES];
            }
            turned
        }
    }
}

/// Makes each lane at least the other.
#[inline]
pub(super) fn raise(lanes: &mut [Lanes], least: &[Lanes]) {
    for (lanes, least) in lanes.iter_mut().zip(least) {
        for lane in 0..LANES {
            lanes[lane] = lanes[lane].max(least[lane]);
        }
    }
}

/// Makes each lane at most the other.
#[inline]
pub(super) fn lower(lanes: &mut [Lanes], most: &[Lanes]) {
    for (lanes, most) in lanes.iter_mut().zip(most) {
        for lane in 0..LANES {
            lanes[lane] = lanes[lane].min(most[lane]);
        }
    }
}

/// The clocks of a set of tasks. For each rank's chain: the last of the first elements after them, and the first of the last
/// elements before them.
#[derive(Clone)]
pub struct Bound {
    pub(super) weak: bool,
    pub(super) first: SmallVec<[Lanes; 1]>,
    pub(super) last: SmallVec<[Lanes; 1]>,
}

impl Bound {
    /// Adds the tasks of another set, of the same order.
    pub fn join(&mut self, other: &Bound) {
        debug_assert_eq!(self.weak, other.weak);
        raise(&mut self.first, &other.first);
        lower(&mut self.last, &other.last);
    }

    /// The same for the ranks that are `by` ahead, of `world` ranks that are alike.
    pub fn turned(&self, by: usize, world: usize) -> Bound {
        let turn = |lanes: &[Lanes]| turned_lanes(lanes, by, world);
        Bound { weak: self.weak, first: turn(&self.first), last: turn(&self.last) }
    }

    /// True if all of these tasks of one iteration come before all of `next`'s tasks of the next one, because of one rank's
    /// barrier.
    pub fn all_cross_barrier(&self, next: &Bound) -> bool {
        self.first.iter().zip(&next.last).any(|(first, last)| {
            (0..LANES).any(|lane| {
                first[lane] != u16::MAX && first[lane] != 0 && last[lane] != 0 && last[lane] != u16::MAX
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{LANES, Lanes, turned_lanes};

    #[test]
    fn clocks_turn_with_the_ranks() {
        for world in 1..=2 * LANES {
            let blocks = world.div_ceil(LANES);
            let mut lanes: Vec<Lanes> = vec![[0; LANES]; blocks];
            (0..world).for_each(|rank| lanes[rank / LANES][rank % LANES] = 100 + rank as u16);
            for by in 0..world {
                let turned = turned_lanes(&lanes, by, world);
                for rank in 0..world {
                    let to = (rank + by) % world;
                    assert_eq!(turned[to / LANES][to % LANES], 100 + rank as u16, "{world} {by} {rank}");
                }
            }
        }
    }
}
