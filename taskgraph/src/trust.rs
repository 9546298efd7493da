//! All assumptions of the proof.
//!
//! The verifier works on bytes, which it computes from the kernels' views. Some bytes are known only at run time: the
//! rows of a slot or task, and the pages of a cache. For these, a task names a [`Trust`], and its region stands for the
//! bytes. Each trust has an invariant that other code maintains, and a check of the invariant at run time.
//! `docs/architecture.md` has the same list ("What is taken on trust").

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// An assumption about bytes that are known only at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Trust {
    /// The task accesses only the rows (dimension 0; in tiles, dimensions 0 and 2) of one active slot. The rows of its region
    /// are the slot's *share*: R slot/of .. R (slot + 1)/of of R rows, or a box of the tiles' rows (`share_of_tiles`). In the
    /// other dimensions, its region is exact. An access to rows without this trust may conflict with the rows of any slot.
    RowsOfSlot {
        /// The active slot.
        slot: u32,
        /// Number of active slots that the graph has room for.
        of: u32,
        /// The rows lie in tiles: the tensor is `[row tiles, column tiles, rows of a tile, columns of a tile]`.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        in_tiles: bool,
    },
    /// The task accesses only the cache pages of one slot. Its region is in the tensor's own index space `[active slot,
    /// head, split]`.
    PagesOfSlot,
    /// The task accesses only the rows of its part of the iteration's work. The rows of its region are the task's
    /// *share*: R task/of .. R (task + 1)/of of R rows, or a box of the tiles' rows (`share_of_tiles`). An access to rows
    /// without this trust may conflict with those of any task.
    RowsOfUnits {
        /// Index of the task among those that share the work.
        task: u32,
        /// Number of these tasks.
        of: u32,
        /// The rows lie in tiles, as for a slot.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        in_tiles: bool,
    },
    /// The task accesses only cache pages of the rows that are assigned to it. Its region is in the tensor's own index
    /// space.
    PagesOfRows,
}

/// The description of a trust for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Assumption {
    /// Its name in files and messages.
    pub name: &'static str,
    /// What must hold, and which code maintains it.
    pub invariant: &'static str,
    /// Where that is checked at run time.
    pub checked: &'static str,
}

/// All assumptions of the proof.
pub const ASSUMPTIONS: [Assumption; 4] = [
    Assumption {
        name: "rows_of_slot",
        invariant: "in one iteration no row belongs to two active slots; the batch step assigns rows to slots",
        checked: "by the region sanitizer, for every task: the rows of active slots follow each other, and the kernel \
                  touches no other rows",
    },
    Assumption {
        name: "pages_of_slot",
        invariant: "one owner writes: a cache page that a slot writes belongs to no other slot, a page that several slots \
                    share is no longer written, and the splits of a slot share no position. An iteration writes only \
                    positions from the slot's context on, so earlier ones may be read ahead of a task's events; the page \
                    allocator and the attention task maintain this",
        checked: "by the page allocator, which gives no page to a second owner (debug builds check the whole invariant: \
                  MPK_DEBUG_CHECKS); by the region sanitizer, for every task: the kernel touches only pages of its slot, and \
                  writes no page that was full before the iteration",
    },
    Assumption {
        name: "rows_of_units",
        invariant: "the units of an iteration are disjoint: each task has what lies between two neighbouring cuts of one \
                    order, and the cuts follow from the batch; or each of d tasks has every d-th slot",
        checked: "by the CPU's tasks: that their cuts are in order",
    },
    Assumption {
        name: "pages_of_rows",
        invariant: "no two rows of an iteration have the same slot and position; the batch step assigns both",
        checked: "by the kernels: that each position they touch has a page of the cache; by the region sanitizer, for \
                  every task: only pages of active slots, and no write to one that was full before",
    },
];

/// The share of slot or task `index` of `of` in a tensor whose rows lie in tiles: ranges of dimensions 0 and 2. Shares are boxes, they
/// are disjoint, and together they are all rows. None is empty if there are at least as many rows as shares.
pub fn share_of_tiles(tiles: u32, rows_of_tile: u32, index: u32, of: u32) -> (Range<u32>, Range<u32>) {
    let part = |all: u32, index: u32, of: u32| (u64::from(all) * u64::from(index) / u64::from(of)) as u32;
    let range = |all, index, of| part(all, index, of)..part(all, index + 1, of);
    // A tile has at most as many shares as rows. So with more shares, the tiles are divided into groups first.
    let groups = of.div_ceil(rows_of_tile.max(1)).clamp(1, tiles.max(1));
    let shares = |group| range(of, group, groups);
    let group = (0..groups).find(|&group| shares(group).contains(&index)).unwrap_or(0);
    let Range { start, end } = shares(group);
    (range(tiles, group, groups), range(rows_of_tile, index.saturating_sub(start), (end - start).max(1)))
}

impl std::fmt::Display for Trust {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = self.assumption().name;
        let (index, of, in_tiles) = match *self {
            Trust::PagesOfSlot | Trust::PagesOfRows => return f.write_str(name),
            Trust::RowsOfSlot { slot, of, in_tiles } => (slot, of, in_tiles),
            Trust::RowsOfUnits { task, of, in_tiles } => (task, of, in_tiles),
        };
        write!(f, "{name} {index} of {of}{}", if in_tiles { " in tiles" } else { "" })
    }
}

impl Trust {
    /// Its entry in [`ASSUMPTIONS`].
    pub fn assumption(&self) -> &'static Assumption {
        match self {
            Trust::RowsOfSlot { .. } => &ASSUMPTIONS[0],
            Trust::PagesOfSlot => &ASSUMPTIONS[1],
            Trust::RowsOfUnits { .. } => &ASSUMPTIONS[2],
            Trust::PagesOfRows => &ASSUMPTIONS[3],
        }
    }

    /// True if the region's rows stand for rows that are known only at run time.
    pub fn of_rows(&self) -> bool {
        matches!(self, Trust::RowsOfSlot { .. } | Trust::RowsOfUnits { .. })
    }

    /// The dimensions that number the rows, if the region's rows stand for rows that are known only at run time.
    pub fn row_dims(&self) -> &'static [usize] {
        match self {
            Trust::RowsOfSlot { in_tiles, .. } | Trust::RowsOfUnits { in_tiles, .. } => match in_tiles {
                true => &[0, 2],
                false => &[0],
            },
            Trust::PagesOfSlot | Trust::PagesOfRows => &[],
        }
    }

    /// How the rows are shared, if the region's rows stand for rows that are known only at run time.
    fn sharing(&self) -> Option<Sharing> {
        match *self {
            Trust::RowsOfSlot { of, in_tiles, .. } => Some(Sharing { by_units: false, of, in_tiles }),
            Trust::RowsOfUnits { of, in_tiles, .. } => Some(Sharing { by_units: true, of, in_tiles }),
            Trust::PagesOfSlot | Trust::PagesOfRows => None,
        }
    }

    /// True if the region is in a cache's own index space and stands for pages.
    pub fn of_pages(&self) -> bool {
        matches!(self, Trust::PagesOfSlot | Trust::PagesOfRows)
    }
}

/// What two shares of rows must have in common to be disjoint if their numbers differ. A slot's rows may belong to any unit, and a unit
/// of three may meet any unit of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sharing {
    by_units: bool,
    of: u32,
    in_tiles: bool,
}

/// How tasks share the rows of a tensor.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RowShares {
    dims: &'static [usize],
    /// `None` if no task names a share, or if they share the rows in different ways.
    sharing: Option<Sharing>,
}

impl RowShares {
    /// Takes note of how an access shares the rows.
    pub(crate) fn add(&mut self, trust: Trust) {
        let Some(sharing) = trust.sharing() else { return };
        if self.dims.is_empty() {
            self.sharing = Some(sharing);
        } else if self.sharing != Some(sharing) {
            self.sharing = None;
        }
        if trust.row_dims().len() > self.dims.len() {
            self.dims = trust.row_dims();
        }
    }

    /// True if no task names a share.
    pub(crate) fn is_empty(&self) -> bool {
        self.dims.is_empty()
    }

    /// The dimensions in which an access may meet any row, although its region has fewer. None if it has a share, and all others share
    /// the rows in the same way.
    pub(crate) fn any_row(&self, trust: Option<Trust>) -> &'static [usize] {
        match trust.and_then(|trust| trust.sharing()) {
            Some(sharing) if self.sharing == Some(sharing) => &[],
            _ => self.dims,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{RowShares, Trust, share_of_tiles};

    #[test]
    fn a_trust_is_shown_by_its_name() {
        let of_units = Trust::RowsOfUnits { task: 1, of: 3, in_tiles: true };
        assert_eq!(of_units.to_string(), "rows_of_units 1 of 3 in tiles");
        assert_eq!(Trust::PagesOfSlot.to_string(), "pages_of_slot");
    }

    #[test]
    fn shares_of_different_kinds_may_meet() {
        let slot = |slot, of| Trust::RowsOfSlot { slot, of, in_tiles: false };
        let unit = |task, of| Trust::RowsOfUnits { task, of, in_tiles: false };
        let any_row = |trusts: &[Trust], of: Option<Trust>| {
            let mut shares = RowShares::default();
            trusts.iter().for_each(|&trust| shares.add(trust));
            shares.any_row(of)
        };
        assert!(any_row(&[slot(0, 4), slot(1, 4)], Some(slot(1, 4))).is_empty());
        assert!(any_row(&[unit(0, 3), unit(2, 3)], Some(unit(0, 3))).is_empty());
        assert_eq!(any_row(&[slot(0, 4)], None), [0]);
        for other in [unit(0, 4), slot(0, 3), Trust::RowsOfSlot { slot: 0, of: 4, in_tiles: true }] {
            let trusts = [slot(0, 4), other, slot(2, 4)];
            assert!(trusts.iter().all(|&trust| any_row(&trusts, Some(trust)).contains(&0)), "{other:?}");
        }
        assert_eq!(any_row(&[unit(0, 2), unit(0, 3)], Some(unit(0, 2))), [0]);
        assert!(any_row(&[Trust::PagesOfSlot], Some(Trust::PagesOfSlot)).is_empty());
    }

    /// The shares cover each row once, and none is empty.
    #[test]
    fn each_row_of_the_tiles_is_in_one_share() {
        for (tiles, of) in [(1, 1), (1, 17), (1, 128), (2, 129), (2, 256), (3, 132), (16, 132), (300, 132)] {
            let mut owner = vec![None; tiles * 128];
            for share in 0..of {
                let (of_tiles, rows) = share_of_tiles(tiles as u32, 128, share, of);
                assert!(!of_tiles.is_empty() && !rows.is_empty(), "share {share} of {of}, {tiles} tiles");
                for tile in of_tiles {
                    for row in rows.clone() {
                        let at = &mut owner[(tile * 128 + row) as usize];
                        assert_eq!(at.replace(share), None, "{of} shares of {tiles} tiles");
                    }
                }
            }
            assert!(owner.iter().all(Option::is_some), "{of} shares of {tiles} tiles");
        }
    }
}
