//! Which tasks of one slot access the same elements as which tasks of another.

use super::types::Part;
use crate::region::{MAX_DIMS, Region};
use crate::task_type::{Access, TaskSpec};
use crate::trust::RowShares;

/// The reads or the writes of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Side {
    Read(u8),
    Write(u8),
}

/// For each task of the later slot, the tasks of the earlier one that it overlaps.
#[derive(Debug)]
pub(crate) struct Overlap {
    /// True if all tasks overlap all others. The lists are then left out.
    pub every: bool,
    offsets: Vec<u32>,
    items: Vec<u32>,
}

impl Overlap {
    /// The producers of a consumer, if not [`Overlap::every`].
    pub fn row(&self, consumer: usize) -> &[u32] {
        &self.items[self.offsets[consumer] as usize..self.offsets[consumer + 1] as usize]
    }
}

/// A shift of regions along one dimension.
pub(crate) type Shift = (usize, u32);

/// The boxes of one operand of a part. `shares`: how the tasks of both parts share the rows.
fn boxes(part: &Part, side: Side, shift: Shift, shares: RowShares) -> Vec<(Region, u32)> {
    let mut all = Vec::with_capacity(part.tasks.len());
    for (index, task) in part.tasks.iter().enumerate() {
        for access in touching(task, side) {
            let mut region = access.region;
            if region.is_empty() {
                continue;
            }
            region.lo[shift.0] += shift.1;
            region.hi[shift.0] += shift.1;
            for &d in shares.any_row(access.trust) {
                (region.lo[d], region.hi[d]) = (0, u32::MAX);
            }
            all.push((region, index as u32));
        }
    }
    all
}

fn touching(task: &TaskSpec, side: Side) -> impl Iterator<Item = &Access> {
    let (list, wanted) = match side {
        Side::Read(o) => (&task.reads[..], o),
        Side::Write(o) => (&task.writes[..], o),
    };
    list.iter().filter(move |a| a.operand == wanted)
}

/// Overlaps between one operand of an earlier slot and one of a later slot.
pub(crate) fn overlap(
    earlier: &Part,
    earlier_side: Side,
    earlier_shift: Shift,
    later: &Part,
    later_side: Side,
    later_shift: Shift,
) -> Overlap {
    let mut shares = RowShares::default();
    for (part, side) in [(earlier, earlier_side), (later, later_side)] {
        let accesses = part.tasks.iter().flat_map(|task| touching(task, side));
        accesses.filter_map(|access| access.trust).for_each(|trust| shares.add(trust));
    }
    let mut producers = boxes(earlier, earlier_side, earlier_shift, shares);
    let consumers = boxes(later, later_side, later_shift, shares);
    let mut bounds = Region { lo: [u32::MAX; MAX_DIMS], hi: [0; MAX_DIMS] };
    let mut present = vec![false; earlier.tasks.len()];
    for (region, task) in &producers {
        present[*task as usize] = true;
        bounds = bounds.hull(region);
    }
    let complete = !producers.is_empty() && present.iter().all(|p| *p);
    let mut whole = vec![false; later.tasks.len()];
    if complete {
        consumers.iter().filter(|(r, _)| r.contains(&bounds)).for_each(|(_, t)| whole[*t as usize] = true);
    }
    if !whole.is_empty() && whole.iter().all(|w| *w) {
        return Overlap { every: true, offsets: Vec::new(), items: Vec::new() };
    }
    let dim = widest_dimension(&producers);
    producers.sort_by_key(|(r, task)| (r.lo[dim], *task));
    // The largest end among this one and all before it. A backward scan can stop where this is too small.
    let mut reach = Vec::with_capacity(producers.len());
    let mut furthest = 0;
    for (region, _) in &producers {
        furthest = furthest.max(region.hi[dim]);
        reach.push(furthest);
    }
    let mut offsets = Vec::with_capacity(later.tasks.len() + 1);
    let mut items = Vec::new();
    let mut next = 0;
    offsets.push(0);
    for (task, &reads_all) in whole.iter().enumerate() {
        let start = items.len();
        while next < consumers.len() && consumers[next].1 as usize == task {
            let region = &consumers[next].0;
            next += 1;
            if reads_all {
                continue;
            }
            let end = producers.partition_point(|(r, _)| r.lo[dim] < region.hi[dim]);
            for i in (0..end).rev().take_while(|&i| reach[i] > region.lo[dim]) {
                if producers[i].0.overlaps(region) {
                    items.push(producers[i].1);
                }
            }
        }
        if reads_all {
            items.extend(0..earlier.tasks.len() as u32);
        } else {
            items[start..].sort_unstable();
            let mut kept = start;
            for i in start..items.len() {
                if kept == start || items[kept - 1] != items[i] {
                    items[kept] = items[i];
                    kept += 1;
                }
            }
            items.truncate(kept);
        }
        offsets.push(items.len() as u32);
    }
    let every = items.len() == earlier.tasks.len() * later.tasks.len() && !items.is_empty();
    Overlap { every, offsets, items }
}

fn widest_dimension(producers: &[(Region, u32)]) -> usize {
    let mut best = (0, 0);
    for dim in 0..MAX_DIMS {
        let mut starts: Vec<u32> = producers.iter().map(|(r, _)| r.lo[dim]).collect();
        starts.sort_unstable();
        starts.dedup();
        if starts.len() > best.1 {
            best = (dim, starts.len());
        }
    }
    best.0
}
