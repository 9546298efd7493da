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

/// Turns the knowledge about a node to that about the node `by` ranks ahead.
#[inline]
pub(super) fn turned_lanes(lanes: &[Lanes], by: usize, world: usize) -> SmallVec<[Lanes; 1]> {
    match (lanes, by) {
        ([lanes], 0) => SmallVec::from_buf([*lanes]),
        // The common case, without a copy whose length is known only at run time.
        ([lanes], by) if by < world && world == LANES => {
            let mut twice = [0; 2 * LANES];
            twice[..LANES].copy_from_slice(lanes);
            twice[LANES..].copy_from_slice(lanes);
            SmallVec::from_buf([std::array::from_fn(|lane| twice[LANES - by + lane])])
        }
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
pub struct Bound {
    pub(super) weak: bool,
    pub(super) first: SmallVec<[Lanes; 1]>,
    pub(super) last: SmallVec<[Lanes; 1]>,
}

impl Bound {
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
