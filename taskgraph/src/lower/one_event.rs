//! Exchanges that are awaited as a whole.
//!
//! A collective has an event for each region that arrives, so that a tile can be summed while others are on their way. A task that reads
//! whole rows waits for all column tiles at once, and one wait for one event is much shorter than one for each tile: with 132 tiles,
//! 2 to 3 us instead of 8 on H200.

use super::collectives::{add, arrival, table};
use super::types::{Part, Table};
use crate::task_type::{Access, TaskSpec};
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// Gives exchanges one event for each rank. It remembers the results, so that equal layers share them.
#[derive(Debug, Default)]
pub(super) struct OneEvent {
    /// By the address of the first table, which this keeps alive.
    by_table: FxHashMap<usize, Merged>,
}

#[derive(Debug)]
struct Merged {
    _several: Arc<Table>,
    one: Arc<Table>,
    arrive: Vec<u32>,
}

impl OneEvent {
    /// The table of an exchange and the ranks' parts of its arrival, with one event for each rank.
    pub fn of(
        &mut self,
        several: &Arc<Table>,
        arrive: &[u32],
        parts: &mut Vec<Part>,
    ) -> (Arc<Table>, Vec<u32>) {
        let found = self.by_table.entry(Arc::as_ptr(several) as usize).or_insert_with(|| {
            let mut sends = several.sends.clone();
            sends.iter_mut().flatten().for_each(|send| send.event = 0);
            let arrivals = arrive.iter().map(|&part| {
                let tasks = parts.get(part as usize).map_or(&[][..], |part| &part.tasks);
                arrival(if tasks.is_empty() { Vec::new() } else { vec![together(tasks)] })
            });
            let arrivals = arrivals.collect();
            let one = Arc::new(table(&sends, arrive.len() as u32));
            Merged { _several: several.clone(), one, arrive: add(arrivals, parts) }
        });
        (found.one.clone(), found.arrive.clone())
    }
}

/// One arrival of all that these tasks stand for. If it fills one region, as the tiles of a tensor do, it is that region.
fn together(tasks: &[TaskSpec]) -> TaskSpec {
    let writes: Vec<Access> = tasks.iter().flat_map(|task| task.writes.iter().copied()).collect();
    let hull = writes.iter().map(|access| access.region).reduce(|a, b| a.hull(&b));
    let volume: u64 = writes.iter().map(|access| access.region.volume()).sum();
    let apart = |(at, a): (usize, &Access)| writes[..at].iter().all(|b| !a.region.overlaps(&b.region));
    let whole = hull.filter(|hull| hull.volume() == volume && writes.iter().enumerate().all(apart));
    let writes = match whole {
        Some(region) => [Access::new(0, region)].into_iter().collect(),
        None => writes.into_iter().collect(),
    };
    TaskSpec { writes, ..TaskSpec::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::Send;
    use crate::region::Region;

    /// Two ranks send each other tiles `[rows, columns]` of a tensor, which arrive in slot 0 or 1.
    fn exchange(tiles: &[(u32, u32)]) -> (Arc<Table>, Vec<Part>) {
        let whole = Region::whole(&[2, 8, 12]);
        let tile = |&(first, end): &(u32, u32)| whole.with(2, first, end);
        let send = |rank: u32, (event, columns): (usize, &(u32, u32))| Send {
            to: 1 - rank,
            source: Some(Region::whole(&[8, 12]).with(1, columns.0, columns.1)),
            target: tile(columns).with(0, rank, rank + 1),
            event: event as u32,
        };
        let sends: Vec<Vec<Send>> =
            (0..2).map(|rank| tiles.iter().enumerate().map(|sent| send(rank, sent)).collect()).collect();
        let written = |columns| TaskSpec {
            writes: [Access::new(0, tile(columns))].into_iter().collect(),
            ..TaskSpec::default()
        };
        (Arc::new(table(&sends, 2)), vec![arrival(tiles.iter().map(written).collect())])
    }

    #[test]
    fn tiles_arrive_as_one_tensor() {
        let (several, mut parts) = exchange(&[(0, 4), (4, 8), (8, 12)]);
        assert_eq!(several.triggers, [[1, 1, 1], [1, 1, 1]]);
        let mut one_event = OneEvent::default();
        let (one, arrive) = one_event.of(&several, &[0, 0], &mut parts);
        assert_eq!(one.triggers, [[3], [3]]);
        assert!(one.one_event && one.from_all && one.to_all);
        assert_eq!((one.sends[0].len(), one.sends[1][2].target), (3, several.sends[1][2].target));
        assert_eq!(arrive, [1, 1]);
        let whole = [Access::new(0, Region::whole(&[2, 8, 12]))];
        assert_eq!(parts[1].tasks.iter().map(|task| &task.writes[..]).collect::<Vec<_>>(), [whole]);
        // The next layer has the same.
        assert_eq!(one_event.of(&several, &[0, 0], &mut parts).1, [1, 1]);
        assert_eq!(parts.len(), 2);
    }

    #[test]
    fn tiles_with_a_gap_or_an_overlap_remain_a_list() {
        for tiles in [[(0, 4), (8, 12)], [(0, 8), (4, 12)]] {
            let (several, mut parts) = exchange(&tiles);
            let (one, _) = OneEvent::default().of(&several, &[0, 0], &mut parts);
            assert_eq!(one.triggers, [[2], [2]]);
            assert_eq!(parts[1].tasks[0].writes.len(), 2);
        }
    }
}
