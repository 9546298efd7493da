//! Checks accesses to each tensor of one rank's memory: every pair with at least one write is ordered, within an iteration and
//! between one and the next, and everything that is read has been written.
//!
//! The accesses are processed in an order that respects happens-before. Each cell of the tensor's grid remembers its last writer
//! and its readers since then. A later access that comes after these also comes after everything before them. Tasks that read the
//! same box are one group in its cells, so that many readers of many cells cost their sum, not their product. Between iterations,
//! it is enough to compare the final state with the first accesses.

mod messages;

use super::access::{Access, Memory};
use super::grid::{Grid, uncovered};
use super::order::{Bound, Kind, NONE, Order, Proof, Search};
use super::report::{Names, Violation, ViolationKind};
use crate::dtype::DType;
use crate::op_graph::Role;
use crate::region::Region;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::collections::HashMap;

/// Maximum number of violations kept for each rank's memory.
const KEEP: usize = 16;

/// Maximum number of proofs that readers of one box look through.
const PROOFS: usize = 16;

#[derive(Clone, Copy)]
struct Cell {
    writer: u32,
    first_writer: u32,
    /// The last link in the list of readers since then, or [`NONE`].
    readers: u32,
}

const EMPTY_CELL: Cell = Cell { writer: NONE, first_writer: NONE, readers: NONE };

/// The state of the sweep for one tensor.
#[derive(Default)]
struct Cells {
    all: Vec<Cell>,
    groups: Vec<Readers>,
    /// Lists of groups: (group, next link).
    links: Vec<(u32, u32)>,
    /// The groups that may still grow, by the box that they read.
    growing: FxHashMap<Region, u32>,
    /// Reads before the first write: (cell, task).
    early: Vec<(u32, u32)>,
    /// Memory of earlier groups.
    spare: Vec<Vec<u32>>,
}

/// Tasks that read the same box without a write to any of its bytes in between. They are one entry in the lists of the box's
/// cells.
struct Readers {
    tasks: Vec<u32>,
    bound: Bound,
    /// No part of the box has been written since the first of them.
    whole: bool,
    /// The last write that has been compared with them: an index into the accesses.
    compared: u32,
    /// One reader for each list of dependencies that proves by events alone that everything in the box is read after its write.
    proven: SmallVec<[u32; 4]>,
}

impl Readers {
    /// True if a proof of an earlier reader holds for this one because both wait for the same. The box must still be whole.
    fn prove(&self, order: &Order<'_>, task: u32) -> bool {
        let waits = |task: u32| (order.rank(task), &order.task(task).dependencies);
        self.proven.iter().any(|&proven| waits(proven) == waits(task))
    }
}

impl Cells {
    fn clear(&mut self, cells: usize) {
        self.all.clear();
        self.all.resize(cells, EMPTY_CELL);
        self.spare.extend(self.groups.drain(..).map(|group| group.tasks));
        self.links.clear();
        self.growing.clear();
        self.early.clear();
    }

    /// The groups that have read a cell since its last write.
    fn readers(&self, cell: &Cell) -> impl Iterator<Item = &Readers> {
        let mut link = cell.readers;
        std::iter::from_fn(move || {
            let &(group, next) = self.links.get(link as usize)?;
            link = next;
            Some(&self.groups[group as usize])
        })
    }
}

/// Verifies one rank's memory, one tensor after the other.
pub(super) struct Sweep<'a, 'g> {
    order: &'a Order<'g>,
    memory: &'a Memory<'g>,
    names: Names<'g>,
    grid: Grid,
    cells: Cells,
    /// Counts searches.
    pub(super) search: Search,
    /// The violations found.
    pub(super) violations: Vec<Violation>,
}

impl<'a, 'g> Sweep<'a, 'g> {
    pub(super) fn new(order: &'a Order<'g>, memory: &'a Memory<'g>) -> Self {
        Sweep {
            order,
            memory,
            names: Names { graphs: order.graphs },
            grid: Grid::default(),
            cells: Cells::default(),
            search: Search::default(),
            violations: Vec::new(),
        }
    }

    fn number(&self, access: &Access) -> u32 {
        self.order.task_number(usize::from(access.rank), access.task)
    }

    /// Checks all pairs of accesses to a tensor.
    pub(super) fn tensor(&mut self, tensor: usize) {
        let memory = self.memory;
        let accesses = memory.accesses(tensor);
        if self.violations.len() >= KEEP {
            return;
        }
        self.output(tensor, accesses);
        if accesses.is_empty() {
            return;
        }
        let activation = matches!(self.order.graphs[memory.owner].tensors[tensor].role, Role::Activation);
        if !activation && accesses.iter().all(|a| !a.write) {
            return;
        }
        let said = self.violations.len();
        let mut grid = std::mem::take(&mut self.grid);
        if grid.build(accesses.iter().map(|a| &a.region)) {
            self.by_cells(tensor, accesses, &grid, activation);
        } else {
            self.pair_by_pair(tensor, accesses, activation);
        }
        self.grid = grid;
        self.keep_causes(said);
    }

    /// Checks that tasks write all of an output, because the host reads it after the iteration.
    fn output(&mut self, tensor: usize, accesses: &[Access]) {
        let entry = &self.order.graphs[self.memory.owner].tensors[tensor];
        if !entry.output || entry.role != Role::Activation {
            return;
        }
        let covers: Vec<Region> = accesses.iter().filter(|a| a.write).map(|a| a.region).collect();
        if let Some(rest) = uncovered(&Region::whole(&entry.region_dims), &covers) {
            let message = format!(
                "no task writes {}, which is part of an output",
                self.names.region(self.memory.owner, tensor, &rest)
            );
            self.violations.push(Violation::new(ViolationKind::Unwritten, &[], message));
        }
    }

    /// Removes unwritten reads from the violations from `said` on, if their writer was found but is not ordered.
    fn keep_causes(&mut self, said: usize) {
        let tensor = self.violations.split_off(said);
        let unordered: Vec<(u32, u32)> = tensor
            .iter()
            .filter(|v| v.kind == ViolationKind::Unordered)
            .flat_map(|v| v.tasks.clone())
            .collect();
        let explained = |v: &Violation| {
            v.kind == ViolationKind::Unwritten
                && !v.tasks.is_empty()
                && v.tasks.iter().all(|t| unordered.contains(t))
        };
        self.violations.extend(tensor.into_iter().filter(|v| !explained(v)));
    }

    fn by_cells(&mut self, tensor: usize, accesses: &[Access], grid: &Grid, activation: bool) {
        let order = self.order;
        let mut cells = std::mem::take(&mut self.cells);
        cells.clear(grid.len());
        let remote = self.memory.is_remote(tensor);
        let flagged = self.is_flagged(tensor);
        // Only later writes need to know the readers of a cell, and if other ranks access the tensor, those of the next
        // iteration.
        let asked = if remote { accesses.len() } else { accesses.iter().rposition(|a| a.write).unwrap_or(0) };
        // The group of the last read, which `growing` has for its box.
        let mut latest: Option<(&Region, u32)> = None;
        for (index, access) in accesses.iter().enumerate() {
            if self.violations.len() >= KEEP {
                break;
            }
            let task = self.number(access);
            let region = &access.region;
            let mut last_trigger = NONE;
            let mut by_events = true;
            let mut conflict = None;
            // Whether `earlier` comes before this access. `last_trigger` holds for all tasks that trigger it.
            let search = &mut self.search;
            let mut ordered = |earlier: u32, kind: Kind| {
                let trigger = order.trigger(earlier);
                if earlier == task || (trigger != NONE && trigger == last_trigger) {
                    return true;
                }
                if flagged && kind == Kind::Data && order.polls(earlier, task) {
                    by_events = false;
                    return true;
                }
                match order.before(earlier, task, kind, search) {
                    Proof::Events => last_trigger = trigger,
                    Proof::Tasks => by_events = false,
                    Proof::Missing => return false,
                }
                true
            };
            if !access.write {
                let grown = match latest {
                    Some((last, group)) if last == region => Some(group),
                    _ => cells.growing.get(region).copied(),
                };
                let grown = grown.filter(|&group| cells.groups[group as usize].whole);
                let group = grown.unwrap_or_else(|| {
                    let (mut tasks, bound) = (cells.spare.pop().unwrap_or_default(), order.no_tasks(true));
                    tasks.clear();
                    let proven = SmallVec::new();
                    cells.groups.push(Readers { tasks, bound, whole: true, compared: NONE, proven });
                    let number = cells.groups.len() as u32 - 1;
                    cells.growing.insert(*region, number);
                    number
                });
                latest = Some((region, group));
                let readers = &mut cells.groups[group as usize];
                if index < asked {
                    readers.tasks.push(task);
                    order.add(&mut readers.bound, task);
                }
                if readers.prove(order, task) {
                    continue;
                }
                let mut unwritten = false;
                let mut last_writer = NONE;
                grid.visit(&grid.cells(region), |number| {
                    let cell = &mut cells.all[number];
                    if cell.writer == NONE {
                        unwritten = true;
                        if remote {
                            cells.early.push((number as u32, task));
                        }
                    } else if conflict.is_none() && cell.writer != last_writer {
                        last_writer = cell.writer;
                        if !ordered(cell.writer, Kind::Data) {
                            conflict = Some(cell.writer);
                        }
                    }
                    if grown.is_none() && index < asked {
                        cells.links.push((group, cell.readers));
                        cell.readers = cells.links.len() as u32 - 1;
                    }
                    true
                });
                let proven = &mut cells.groups[group as usize].proven;
                if by_events && conflict.is_none() && !unwritten && proven.len() < PROOFS {
                    proven.push(task);
                }
                if unwritten && activation {
                    self.report_unwritten(tensor, &accesses[..index], access);
                }
            } else {
                grid.visit(&grid.cells(region), |number| {
                    let cell = &mut cells.all[number];
                    if conflict.is_none() && cell.writer != NONE && !ordered(cell.writer, Kind::Overwrite) {
                        conflict = Some(cell.writer);
                    }
                    let mut link = std::mem::replace(&mut cell.readers, NONE);
                    while let Some(&(group, next)) = cells.links.get(link as usize) {
                        link = next;
                        let group = &mut cells.groups[group as usize];
                        group.whole = false;
                        if conflict.is_none() && group.compared != index as u32 {
                            group.compared = index as u32;
                            if !order.all_before(&group.bound, task) {
                                conflict = group.tasks.iter().copied().find(|&r| !ordered(r, Kind::Reuse));
                            }
                        }
                    }
                    cell.writer = task;
                    if cell.first_writer == NONE {
                        cell.first_writer = task;
                    }
                    true
                });
            }
            if let Some(earlier) = conflict {
                self.report_unordered(tensor, accesses, earlier, access);
            }
        }
        if remote && self.violations.len() < KEEP {
            self.next_iteration(tensor, accesses, &cells);
        }
        self.cells = cells;
    }

    /// Compares the state at the end of an iteration with the first accesses of the next.
    fn next_iteration(&mut self, tensor: usize, accesses: &[Access], cells: &Cells) {
        let order = self.order;
        let flagged = self.is_flagged(tensor);
        let (mut all, mut seen) = (order.no_tasks(flagged), NONE);
        for access in accesses {
            let task = self.number(access);
            if task != seen {
                order.add(&mut all, task);
                seen = task;
            }
        }
        if all.all_cross_barrier(&all) {
            return;
        }
        let mut early: HashMap<u32, Vec<u32>> = HashMap::new();
        for &(cell, task) in &cells.early {
            early.entry(cell).or_default().push(task);
        }
        for (number, cell) in cells.all.iter().enumerate().filter(|(_, c)| c.writer != NONE) {
            let readers = cells.readers(cell).flat_map(|group| &group.tasks);
            let readers = readers.map(|&r| (r, cell.first_writer, Kind::Reuse));
            // A reader of a flagged word has seen its write, so everything that comes after the read comes after both.
            let read = flagged && cell.readers != NONE;
            let writer = (!read).then_some((cell.writer, cell.first_writer, Kind::Overwrite));
            let early = early.get(&(number as u32)).into_iter().flatten();
            let early = early.map(|&later| (cell.writer, later, Kind::Data));
            for (earlier, later, kind) in readers.chain(writer).chain(early) {
                if !order.before_in_next(earlier, later, kind, &mut self.search) {
                    self.report_across(tensor, accesses, earlier, later);
                    if self.violations.len() >= KEEP {
                        return;
                    }
                    break;
                }
            }
        }
    }

    fn is_flagged(&self, tensor: usize) -> bool {
        self.order.graphs[self.memory.owner].tensors[tensor].dtype == DType::F32Flagged
    }

    /// Compares boxes pair by pair, for tensors with too many cells.
    fn pair_by_pair(&mut self, tensor: usize, accesses: &[Access], activation: bool) {
        let flagged = self.is_flagged(tensor);
        let mut live: Vec<usize> = Vec::new();
        for (index, access) in accesses.iter().enumerate() {
            if self.violations.len() >= KEEP {
                return;
            }
            let region = &access.region;
            let task = self.number(access);
            let over: Vec<usize> =
                live.iter().copied().filter(|&b| accesses[b].region.overlaps(region)).collect();
            for &b in &over {
                let earlier = self.number(&accesses[b]);
                let kind = Kind::of(accesses[b].write, access.write);
                if (access.write || accesses[b].write)
                    && earlier != task
                    && !(flagged && kind == Kind::Data && self.order.polls(earlier, task))
                    && self.order.before(earlier, task, kind, &mut self.search) == Proof::Missing
                {
                    self.report_unordered(tensor, accesses, earlier, access);
                    break;
                }
            }
            if access.write {
                live.retain(|&b| !region.contains(&accesses[b].region));
            } else if activation {
                let writers = over.iter().filter(|&&b| accesses[b].write);
                let covers: Vec<Region> = writers.map(|&b| accesses[b].region).collect();
                if uncovered(region, &covers).is_some() {
                    self.report_unwritten(tensor, &accesses[..index], access);
                }
            }
            live.push(index);
        }
        if !self.memory.is_remote(tensor) {
            return;
        }
        for &b in &live {
            let earlier = self.number(&accesses[b]);
            let read = flagged
                && live
                    .iter()
                    .any(|&r| !accesses[r].write && accesses[r].region.overlaps(&accesses[b].region));
            for access in accesses {
                let kind = Kind::of(accesses[b].write, access.write);
                if (access.write || accesses[b].write)
                    && access.region.overlaps(&accesses[b].region)
                    && !(flagged && (kind == Kind::Data || (kind == Kind::Overwrite && read)))
                {
                    let later = self.number(access);
                    if !self.order.before_in_next(earlier, later, kind, &mut self.search) {
                        self.report_across(tensor, accesses, earlier, later);
                        if self.violations.len() >= KEEP {
                            return;
                        }
                        break;
                    }
                }
            }
        }
    }
}

/// Explains why two tasks of successive iterations are not ordered.
pub(super) fn across_message(
    order: &Order<'_>,
    next: &Order<'_>,
    earlier: u32,
    later: u32,
    (first, second): (&str, &str),
) -> String {
    let ranks = |test: &dyn Fn(usize) -> bool| -> Vec<usize> {
        (0..order.graphs.len()).filter(|&r| test(r)).collect()
    };
    format!(
        "{second} may run in the next iteration before {first} has run in this one: the latter comes before the end \
         event of ranks {:?} only, the former after the begin event of ranks {:?} only, and no carried event \
         (\"buffer free\") orders them",
        ranks(&|r| order.done_at_end(earlier, r)),
        ranks(&|r| next.after_begin(later, r)),
    )
}
