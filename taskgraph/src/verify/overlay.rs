//! Tensors that overlap: all accesses to one must be done before any write to the other.
//!
//! This is decided for whole tensors in one rank's memory. Where several tensors share a byte, the order of their first writes is
//! the only order in which they can take turns. It is enough to compare neighbours: each tensor is written, so
//! everything before its writes comes before everything that follows. The last tensor must come before the first one of
//! the next iteration, which closes the ring. Readers of a tensor read what was written in the same iteration (see
//! `memory`), so they come after the tensor's own writes.

use super::access::{Access, Memory};
use super::memory::across_message;
use super::order::{Bound, Kind, NONE, Order, Proof, Search};
use super::ranks::Ranks;
use super::report::{Names, Violation, ViolationKind};
use crate::task_graph::{Area, Overlay, TaskGraph, TensorEntry};
use rustc_hash::FxHashSet;
use std::collections::HashSet;

/// Maximum number of violations kept for each rank's memory.
const KEEP: usize = 16;

fn end(tensor: &TensorEntry, overlay: Overlay) -> u64 {
    overlay.offset + tensor.bytes
}

/// Tensors of one graph that share memory: number, bytes.
fn overlaid(graph: &TaskGraph, area: Area) -> impl Iterator<Item = (usize, u64, u64)> + '_ {
    graph.tensors.iter().enumerate().filter_map(move |(number, tensor)| {
        let overlay = tensor.overlay.filter(|o| o.area == area && tensor.bytes > 0)?;
        Some((number, overlay.offset, end(tensor, overlay)))
    })
}

/// Checks one graph and one rank's memory, within an iteration and from one to the next.
pub(super) fn check(
    order: &Order<'_>,
    memory: &Memory<'_>,
    uses: &Uses,
    search: &mut Search,
) -> Vec<Violation> {
    let mut violations = Vec::new();
    for area in Area::ALL {
        let turns = Turns::new(order, memory, area);
        for (first, second) in turns.neighbours {
            turns_in_iteration(order, memory, uses, (first, second), search, &mut violations);
        }
        for (last, first) in turns.rings {
            if memory.is_remote(last) || memory.is_remote(first) {
                turns_across(order, memory, uses, (last, first), search, &mut violations);
            }
        }
        if violations.len() >= KEEP {
            break;
        }
    }
    violations
}

/// Which tensor follows which at some byte of an area.
struct Turns {
    neighbours: Vec<(usize, usize)>,
    /// Pairs of the last and the first tensor.
    rings: Vec<(usize, usize)>,
}

impl Turns {
    fn new(order: &Order<'_>, memory: &Memory<'_>, area: Area) -> Turns {
        let graph = &order.graphs[memory.owner];
        // Ordered by their first writes. A tensor without writes must not be read either.
        let mut tensors: Vec<(u32, usize, u64, u64)> = overlaid(graph, area)
            .filter_map(|(tensor, start, end)| {
                let writes = memory.accesses(tensor).iter().filter(|a| a.write);
                let first = writes.map(|a| order.position(order.events() + number(order, a))).min()?;
                Some((first, tensor, start, end))
            })
            .collect();
        tensors.sort_unstable();
        let mut cuts: Vec<u64> = tensors.iter().flat_map(|t| [t.2, t.3]).collect();
        cuts.sort_unstable();
        cuts.dedup();
        // For each piece between two cuts, the last and the first tensor so far.
        let mut last: Vec<Option<usize>> = vec![None; cuts.len()];
        let mut first: Vec<Option<usize>> = vec![None; cuts.len()];
        let mut neighbours = HashSet::new();
        for &(_, tensor, start, end) in &tensors {
            let pieces = cuts.partition_point(|&c| c < start)..cuts.partition_point(|&c| c < end);
            for piece in pieces {
                match last[piece].replace(tensor) {
                    Some(before) => drop(neighbours.insert((before, tensor))),
                    None => first[piece] = Some(tensor),
                }
            }
        }
        let rings: HashSet<(usize, usize)> =
            last.into_iter().zip(first).filter_map(|(l, f)| Some((l?, f?))).filter(|(l, f)| l != f).collect();
        let sorted = |set: HashSet<(usize, usize)>| {
            let mut list: Vec<_> = set.into_iter().collect();
            list.sort_unstable();
            list
        };
        Turns { neighbours: sorted(neighbours), rings: sorted(rings) }
    }
}

fn number(order: &Order<'_>, access: &Access) -> u32 {
    order.task_number(usize::from(access.rank), access.task)
}

/// Adds the access to those that must be done before others write.
fn add(order: &Order<'_>, bound: &mut Bound, access: &Access) {
    if access.write {
        order.add_written(bound, number(order, access));
    } else {
        order.add(bound, number(order, access));
    }
}

/// True if the access itself must be done. A push of flagged words that are all read need not be: their readers have seen it.
fn counts(order: &Order<'_>, memory: &Memory<'_>, tensor: usize, access: &Access) -> bool {
    !(access.write && order.all_read(memory.owner, tensor))
}

/// Accesses that must be done before others write. Those with the same trigger are adjacent.
fn by_trigger<'m>(order: &Order<'_>, memory: &'m Memory<'_>, tensor: usize) -> Vec<&'m Access> {
    let mut found: Vec<&Access> =
        memory.accesses(tensor).iter().filter(|a| counts(order, memory, tensor, a)).collect();
    found.sort_by_key(|a| order.trigger(number(order, a)));
    found
}

fn turns_in_iteration(
    order: &Order<'_>,
    memory: &Memory<'_>,
    uses: &Uses,
    (first, second): (usize, usize),
    search: &mut Search,
    violations: &mut Vec<Violation>,
) {
    let mut all = order.no_tasks(true);
    uses.of(order, [first]).all.iter().flatten().for_each(|bound| all.join(bound));
    let mut groups: Option<Vec<&Access>> = None;
    // What the writes waited for whose order followed from events alone. Others that wait for the same need no check.
    let mut proven: FxHashSet<(usize, &[u32])> = FxHashSet::default();
    for write in memory.accesses(second).iter().filter(|a| a.write) {
        let later = number(order, write);
        let waits = (order.rank(later), order.task(later).dependencies.as_slice());
        if order.all_before(&all, later) || proven.contains(&waits) {
            continue;
        }
        let groups = groups.get_or_insert_with(|| by_trigger(order, memory, first));
        let (mut by_events, mut done) = (true, NONE);
        let unordered = |a: &&&Access| {
            let earlier = number(order, a);
            let trigger = order.trigger(earlier);
            if trigger != NONE && trigger == done {
                return false;
            }
            match order.before(earlier, later, Kind::of(a.write, true), search) {
                Proof::Events => done = trigger,
                Proof::Tasks => by_events = false,
                Proof::Missing => return true,
            }
            false
        };
        let found = groups.iter().find(unordered).copied();
        if by_events && found.is_none() {
            proven.insert(waits);
        }
        if let Some(access) = found {
            let message = format!(
                "{} and {} are not ordered: {}",
                Names { graphs: order.graphs }.task(access.place()),
                Names { graphs: order.graphs }.task(write.place()),
                both(order, memory, (first, second), access)
            );
            violations.push(Violation::new(
                ViolationKind::Unordered,
                &[access.place(), write.place()],
                message,
            ));
            return;
        }
    }
}

fn turns_across(
    order: &Order<'_>,
    memory: &Memory<'_>,
    uses: &Uses,
    (last, first): (usize, usize),
    search: &mut Search,
    violations: &mut Vec<Violation>,
) {
    let writes = || memory.accesses(first).iter().filter(|a| a.write);
    if uses.of(order, [last]).before(&uses.of(order, [first])) {
        return;
    }
    for access in memory.accesses(last).iter().filter(|a| counts(order, memory, last, a)) {
        let earlier = number(order, access);
        let kind = Kind::of(access.write, true);
        if let Some(write) = writes().find(|w| !order.before_in_next(earlier, number(order, w), kind, search))
        {
            let names = Names { graphs: order.graphs };
            let (a, b) = (names.task(access.place()), names.task(write.place()));
            let message = across_message(order, order, earlier, number(order, write), (&a, &b))
                + &format!(": {}", both(order, memory, (last, first), access));
            violations.push(Violation::new(
                ViolationKind::UnorderedAcrossEpochs,
                &[access.place(), write.place()],
                message,
            ));
            return;
        }
    }
}

fn both(order: &Order<'_>, memory: &Memory<'_>, pair: (usize, usize), access: &Access) -> String {
    let tensors = &order.graphs[memory.owner].tensors;
    format!(
        "the former {} '{}', the latter writes '{}', which overlaps it in rank {}'s memory",
        if access.write { "writes" } else { "reads" },
        tensors[pair.0].name,
        tensors[pair.1].name,
        memory.owner
    )
}

/// A graph's accesses to each tensor of one rank's memory that may overlap others.
pub(super) struct Uses(Vec<Option<Use>>);

impl Uses {
    pub(super) fn new(order: &Order<'_>, memory: &Memory<'_>) -> Uses {
        let tensors = order.graphs[memory.owner].tensors.iter().enumerate();
        let each = |(number, tensor): (usize, &TensorEntry)| {
            tensor.overlay.map(|_| Use::new(order, memory, [number]))
        };
        Uses(tensors.map(each).collect())
    }

    /// The accesses to any of these tensors.
    fn of(&self, order: &Order<'_>, tensors: impl IntoIterator<Item = usize>) -> Use {
        let mut all = Use::nothing(order);
        let uses = tensors.into_iter().filter_map(|tensor| self.0[tensor].as_ref());
        uses.for_each(|of_tensor| all.join(of_tensor));
        all
    }
}

/// A graph's accesses to an area of one rank's memory.
pub(super) struct Use {
    /// Those of each rank's tasks, if there are any.
    all: Vec<Option<Bound>>,
    writes: Vec<Option<Bound>>,
}

impl Use {
    fn nothing(order: &Order<'_>) -> Use {
        let none = || (0..order.graphs.len()).map(|_| None).collect::<Vec<Option<Bound>>>();
        Use { all: none(), writes: none() }
    }

    fn new(order: &Order<'_>, memory: &Memory<'_>, tensors: impl IntoIterator<Item = usize>) -> Use {
        let mut found = Use::nothing(order);
        for tensor in tensors {
            let mut added = None;
            for access in memory.accesses(tensor) {
                // A task's boxes are adjacent, and its clocks are the same for each.
                let same = (access.place(), access.write);
                if added.replace(same) == Some(same) {
                    continue;
                }
                let rank = usize::from(access.rank);
                if counts(order, memory, tensor, access) {
                    add(order, found.all[rank].get_or_insert_with(|| order.no_tasks(true)), access);
                }
                if access.write {
                    let writes = found.writes[rank].get_or_insert_with(|| order.no_tasks(true));
                    order.add(writes, number(order, access));
                }
            }
        }
        found
    }

    /// Adds the accesses of another.
    fn join(&mut self, other: &Use) {
        let join = |(own, other): (&mut Option<Bound>, &Option<Bound>)| match (own, other) {
            (_, None) => {}
            (Some(own), Some(other)) => own.join(other),
            (own, Some(_)) => own.clone_from(other),
        };
        self.all.iter_mut().zip(&other.all).for_each(join);
        self.writes.iter_mut().zip(&other.writes).for_each(join);
    }

    /// Accesses to an area that graphs share: those that the rank's barrier does not bound, and all.
    pub(super) fn of_area(order: &Order<'_>, memory: &Memory<'_>, uses: &Uses, area: Area) -> (Use, Use) {
        let tensors = || overlaid(&order.graphs[memory.owner], area).map(|(tensor, _, _)| tensor);
        let remote = tensors().filter(|&tensor| looked_at(area, memory, tensor));
        (uses.of(order, remote), uses.of(order, tensors()))
    }

    /// The same for the memory of a rank that is `by` ahead, of `world` ranks that are alike.
    pub(super) fn turned(&self, by: usize, world: usize) -> Use {
        let turn = |list: &[Option<Bound>]| -> Vec<Option<Bound>> {
            list.iter().map(|bound| bound.as_ref().map(|b| b.turned(by, world))).collect()
        };
        Use { all: turn(&self.all), writes: turn(&self.writes) }
    }

    /// True if all of these accesses are done before the following graph writes.
    pub(super) fn before(&self, next: &Use) -> bool {
        self.all
            .iter()
            .flatten()
            .all(|first| next.writes.iter().flatten().all(|second| first.all_cross_barrier(second)))
    }
}

/// Checks graphs that follow each other, in one rank's memory (`memories` has one per graph). In the rank's own memory, only the
/// sources of puts must be checked, because its barrier separates everything else.
pub(super) fn across(orders: &[&Order<'_>], memories: &[Memory<'_>]) -> Vec<Violation> {
    let mut violations = Vec::new();
    for area in Area::ALL.into_iter().filter(|area| area.is_shared()) {
        let uses = |wanted: &dyn Fn(&Memory<'_>, usize) -> bool| -> Vec<Use> {
            let each = orders.iter().zip(memories);
            each.map(|(order, memory)| {
                let tensors = overlaid(&order.graphs[memory.owner], area);
                let tensors = tensors.filter(|(tensor, _, _)| wanted(memory, *tensor));
                Use::new(order, memory, tensors.map(|(tensor, _, _)| tensor))
            })
            .collect()
        };
        let all = uses(&|_, _| true);
        let remote = uses(&|memory, tensor| looked_at(area, memory, tensor));
        for (from, before) in remote.iter().enumerate() {
            for (to, after) in all.iter().enumerate() {
                if from != to && !before.before(after) && violations.len() < KEEP {
                    let orders = (orders[from], orders[to]);
                    violations.extend(pair(orders, (&memories[from], &memories[to]), area));
                }
            }
        }
    }
    violations
}

/// True if the rank's barrier does not bound the accesses to this tensor.
fn looked_at(area: Area, memory: &Memory<'_>, tensor: usize) -> bool {
    area != Area::Device || memory.is_remote(tensor)
}

/// The first unordered pair of accesses to bytes that two graphs share.
fn pair(
    (order, next): (&Order<'_>, &Order<'_>),
    (first, second): (&Memory<'_>, &Memory<'_>),
    area: Area,
) -> Option<Violation> {
    let graphs = (&order.graphs[first.owner], &next.graphs[second.owner]);
    for (a, a_start, a_end) in overlaid(graphs.0, area).filter(|t| looked_at(area, first, t.0)) {
        let before = Use::new(order, first, [a]);
        for (b, _, _) in overlaid(graphs.1, area).filter(|&(_, start, end)| start < a_end && a_start < end) {
            if before.before(&Use::new(next, second, [b])) {
                continue;
            }
            for access in first.accesses(a).iter().filter(|x| counts(order, first, a, x)) {
                for write in second.accesses(b).iter().filter(|w| w.write) {
                    let (earlier, later) = (number(order, access), number(next, write));
                    if order.crosses_barrier(earlier, next, later, Kind::of(access.write, true)) {
                        continue;
                    }
                    let named = |graphs: Ranks<'_>, x: &Access| {
                        format!("{} in graph '{}'", Names { graphs }.task(x.place()), graphs[0].name)
                    };
                    let names = (named(order.graphs, access), named(next.graphs, write));
                    let message = across_message(order, next, earlier, later, (&names.0, &names.1))
                        + &format!(
                            ": '{}' and '{}' overlap in rank {}'s memory",
                            graphs.0.tensors[a].name, graphs.1.tensors[b].name, first.owner
                        );
                    return Some(Violation::new(
                        ViolationKind::UnorderedAcrossEpochs,
                        &[access.place(), write.place()],
                        message,
                    ));
                }
            }
        }
    }
    None
}
