//! Graphs of one model that follow each other: what they share must be the same everywhere, and accesses at the end of one are
//! ordered before accesses at the start of another.

use super::access::{Access, Memory, Symmetric};
use super::memory::across_message;
use super::order::{Bound, Kind, Order};
use super::overlay::{self, Use, Uses};
use super::ranks::Ranks;
use super::report::{Names, Report, Violation, ViolationKind};
use crate::dtype::DType;
use crate::op_graph::Role;
use crate::task_graph::{Area, Space, TensorEntry};
use std::collections::{HashMap, HashSet};

/// True if the tensor is the same memory in every graph that has a tensor of this name.
fn keeps(tensor: &TensorEntry) -> bool {
    matches!(tensor.role, Role::Weight { .. } | Role::Constant | Role::Persistent { .. })
}

/// True if two tensors of the same name may be the same memory. What one graph takes for constant, no other may write. The index
/// space of a cache may differ.
fn same_role(a: &Role, b: &Role) -> bool {
    matches!((a, b), (Role::Persistent { .. }, Role::Persistent { .. })) || a == b
}

fn role_name(role: &Role) -> &'static str {
    match role {
        Role::Weight { .. } => "a weight",
        Role::Constant => "a constant",
        Role::Input => "an input",
        Role::Activation => "an activation",
        Role::Persistent { .. } => "a persistent tensor",
    }
}

/// A verified class with its order.
pub(super) struct Verified<'g> {
    pub(super) report: Report,
    pub(super) order: Order<'g>,
    pub(super) symmetric: Symmetric,
    /// One summary per held rank.
    pub(super) summaries: Vec<Summary>,
}

/// What is known of a verified class without its tasks: names, tensors and summaries.
#[derive(Clone, Copy)]
pub(super) struct Known<'a> {
    pub(super) ranks: Ranks<'a>,
    pub(super) summaries: &'a [Summary],
}

/// A summary of a class's accesses to the memory of one rank that it shares with other graphs: enough to see that everything is
/// ordered, if it is.
pub(super) struct Summary {
    /// For each tensor with its own name.
    named: HashMap<String, Named>,
    /// For each area that graphs share.
    areas: Vec<(Use, Use)>,
}

/// A class's accesses to one tensor of one rank's memory.
struct Named {
    /// All of them.
    all: Bound,
    /// True if any writes.
    writes: bool,
    /// True if there are accesses that the rank's barrier does not bound.
    remote: bool,
    /// The same accesses by kind, if other ranks may access the tensor and no words are flagged.
    by_kind: Option<ByKind>,
}

/// Accesses by what must come between them and those of the next iteration. [`Order::crosses_barrier`] has the rules.
struct ByKind {
    /// Reads and writes in the strong order: a read must see what was written.
    seen: (Groups, Groups),
    /// Reads and writes in the weak order, which is enough before a later write. Writes are released by their events.
    done: (Groups, Groups),
}

/// Accesses by the rank that knows when they are done, if there are any. A rank that sends to its peers cannot learn
/// from a single peer that all accesses are done, because each peer knows only about its own.
struct Groups(Vec<Option<Bound>>);

impl Groups {
    fn none(order: &Order<'_>) -> Groups {
        Groups((0..order.graphs.len()).map(|_| None).collect())
    }

    /// The bound that an access of this task is added to.
    fn of(&mut self, order: &Order<'_>, task: u32, weak: bool) -> &mut Bound {
        self.0[order.rank_done(task)].get_or_insert_with(|| order.no_tasks(weak))
    }

    fn all_cross_barrier(&self, next: &Groups) -> bool {
        let next = || next.0.iter().flatten();
        self.0.iter().flatten().all(|own| next().all(|next| own.all_cross_barrier(next)))
    }

    fn turned(&self, by: usize, world: usize) -> Groups {
        Groups(self.0.iter().map(|bound| bound.as_ref().map(|b| b.turned(by, world))).collect())
    }
}

impl ByKind {
    fn new(order: &Order<'_>, memory: &Memory<'_>, tensor: usize) -> ByKind {
        let pair = || (Groups::none(order), Groups::none(order));
        let mut found = ByKind { seen: pair(), done: pair() };
        for access in memory.accesses(tensor) {
            let task = order.task_number(access.rank.into(), access.task);
            if access.write {
                order.add(found.seen.1.of(order, task, false), task);
                order.add_written(found.done.1.of(order, task, true), task);
            } else {
                order.add(found.seen.0.of(order, task, false), task);
                order.add(found.done.0.of(order, task, true), task);
            }
        }
        found
    }

    /// True if the accesses come before all conflicting accesses of the graph that follows. Two accesses conflict if at
    /// least one of them writes.
    fn before(&self, next: &ByKind) -> bool {
        self.seen.1.all_cross_barrier(&next.seen.0)
            && self.done.0.all_cross_barrier(&next.done.1)
            && self.done.1.all_cross_barrier(&next.done.1)
    }

    fn turned(&self, by: usize, world: usize) -> ByKind {
        let turn = |(a, b): &(Groups, Groups)| (a.turned(by, world), b.turned(by, world));
        ByKind { seen: turn(&self.seen), done: turn(&self.done) }
    }
}

impl Named {
    fn new(order: &Order<'_>, memory: &Memory<'_>, tensor: usize) -> Named {
        let entry = &order.graphs[memory.owner].tensors[tensor];
        let flagged = entry.dtype == DType::F32Flagged;
        let remote = memory.is_remote(tensor);
        let shared = remote || entry.space == Space::Symmetric;
        Named {
            all: bound(order, memory, tensor),
            writes: memory.accesses(tensor).iter().any(|a| a.write),
            remote,
            by_kind: (shared && !flagged).then(|| ByKind::new(order, memory, tensor)),
        }
    }

    fn turned(&self, by: usize, world: usize) -> Named {
        Named {
            all: self.all.turned(by, world),
            by_kind: self.by_kind.as_ref().map(|kinds| kinds.turned(by, world)),
            ..*self
        }
    }

    /// True if the accesses obviously come before those of the graph that follows.
    fn before(&self, next: &Named) -> bool {
        let matters = (self.writes || next.writes) && (self.remote || next.remote);
        !matters || self.all.all_cross_barrier(&next.all) || {
            let both = self.by_kind.as_ref().zip(next.by_kind.as_ref());
            both.is_some_and(|(own, next)| own.before(next))
        }
    }
}

fn shared_areas() -> impl Iterator<Item = Area> {
    Area::ALL.into_iter().filter(|area| area.is_shared())
}

/// True if the tensor's value or memory is shared with other graphs, and may change.
fn is_shared(tensor: &TensorEntry) -> bool {
    (keeps(tensor) || tensor.space == Space::Symmetric || tensor.overlay.is_some())
        && !matches!(tensor.role, Role::Weight { .. } | Role::Constant)
}

/// True if the tensor is compared by name. Tensors that overlap others are compared by their bytes.
fn by_name(tensor: &TensorEntry) -> bool {
    tensor.overlay.is_none()
}

fn bound(order: &Order<'_>, memory: &Memory<'_>, tensor: usize) -> Bound {
    let flagged = order.graphs[memory.owner].tensors[tensor].dtype == DType::F32Flagged;
    let mut bound = order.no_tasks(flagged);
    for a in memory.accesses(tensor) {
        order.add(&mut bound, order.task_number(a.rank.into(), a.task));
    }
    bound
}

impl Summary {
    /// For a class and one rank's memory. `memory` must contain at least all shared tensors.
    pub(super) fn new(order: &Order<'_>, memory: &Memory<'_>, uses: &Uses) -> Summary {
        let mut named = HashMap::new();
        for (t, tensor) in order.graphs.of(memory.owner).tensors.iter().enumerate() {
            if is_shared(tensor) && by_name(tensor) && !memory.accesses(t).is_empty() {
                named.insert(tensor.name.clone(), Named::new(order, memory, t));
            }
        }
        let areas = shared_areas().map(|area| Use::of_area(order, memory, uses, area)).collect();
        Summary { named, areas }
    }

    /// The same for a rank that is `by` ahead, of `world` ranks that are alike.
    fn turned(&self, by: usize, world: usize) -> Summary {
        let turn = |(name, named): (&String, &Named)| (name.clone(), named.turned(by, world));
        let areas = self.areas.iter();
        Summary {
            named: self.named.iter().map(turn).collect(),
            areas: areas.map(|(a, b)| (a.turned(by, world), b.turned(by, world))).collect(),
        }
    }

    /// Records what is not obviously done by this class before conflicting accesses of the one that follows.
    fn before(&self, next: &Summary, unseen: &mut Unseen) {
        for (name, named) in &self.named {
            if next.named.get(name).is_some_and(|next| !named.before(next)) {
                unseen.names.insert(name.clone());
            }
        }
        for (area, ((remote, _), (_, all))) in shared_areas().zip(self.areas.iter().zip(&next.areas)) {
            if !remote.before(all) {
                unseen.areas.insert(area);
            }
        }
    }
}

/// The tensors and areas whose order the summaries cannot show.
#[derive(Default)]
struct Unseen {
    names: HashSet<String>,
    areas: HashSet<Area>,
    /// True if summaries were not asked, so that everything counts.
    all: bool,
}

impl Unseen {
    fn is_empty(&self) -> bool {
        !self.all && self.names.is_empty() && self.areas.is_empty()
    }

    fn has(&self, tensor: &TensorEntry) -> bool {
        is_shared(tensor)
            && (self.all
                || match tensor.overlay {
                    None => self.names.contains(tensor.name.as_str()),
                    Some(overlay) => self.areas.contains(&overlay.area),
                })
    }
}

/// Accesses of one class to a shared tensor of one rank that other ranks access in some class.
struct Shared<'g> {
    memory: &'g Memory<'g>,
    tensor: usize,
    bound: Bound,
    writes: bool,
}

/// With `by_access`, summaries are not asked.
pub(super) fn check(classes: &[Verified<'_>], by_access: bool) -> Vec<Violation> {
    let known: Vec<Known<'_>> =
        classes.iter().map(|c| Known { ranks: c.order.graphs, summaries: &c.summaries }).collect();
    let mut violations = same_tensors(&known);
    if !violations.is_empty() || classes.len() < 2 {
        return violations;
    }
    let world = known[0].ranks.len();
    let found = crate::parallel::map(world, |rank| {
        let unseen = match by_access {
            true => Unseen { all: true, ..Unseen::default() },
            false => unseen(&known, rank),
        };
        if unseen.is_empty() { Vec::new() } else { check_rank(classes, rank, &unseen) }
    });
    violations.extend(found.into_iter().flatten());
    violations.truncate(16);
    violations
}

/// True if the summaries show that any of the classes may follow any other.
pub(super) fn is_seen(classes: &[Known<'_>]) -> bool {
    if !same_tensors(classes).is_empty() {
        return false;
    }
    let world = classes.first().map_or(0, |class| class.ranks.len());
    (0..world).all(|rank| unseen(classes, rank).is_empty())
}

/// What the classes' summaries do not show to be ordered in the memory of `rank`.
fn unseen(classes: &[Known<'_>], rank: usize) -> Unseen {
    let world = classes[0].ranks.len();
    let turned: Vec<Option<Summary>> = classes
        .iter()
        .map(|c| (rank > 0 && c.ranks.symmetry().is_some()).then(|| c.summaries[0].turned(rank, world)))
        .collect();
    let summary = |c: usize| match &turned[c] {
        Some(turned) => turned,
        None => &classes[c].summaries[rank],
    };
    let mut unseen = Unseen::default();
    for (from, a) in classes.iter().enumerate() {
        for (to, b) in classes.iter().enumerate().filter(|(to, _)| *to != from) {
            let alike = match (a.ranks.symmetry(), b.ranks.symmetry()) {
                // What holds for rank 0 holds for all.
                (Some(own), Some(other)) => rank > 0 && own.agrees(&a.ranks[0], other, &b.ranks[0]),
                _ => false,
            };
            if !alike {
                summary(from).before(summary(to), &mut unseen);
            }
        }
    }
    unseen
}

/// Checks one rank's memory, access by access, where the summaries do not show the order.
fn check_rank(classes: &[Verified<'_>], rank: usize, unseen: &Unseen) -> Vec<Violation> {
    let mut violations = Vec::new();
    // Within one rank, its barrier orders everything. Only the writes of other ranks must be checked.
    let mut remote: HashSet<&str> = HashSet::new();
    let memories: Vec<Memory<'_>> = classes
        .iter()
        .map(|class| {
            let graphs = class.order.graphs;
            let own: Vec<u32> = (0..graphs[rank].tasks.len() as u32).collect();
            Memory::new(graphs, &class.symmetric, rank, &own, |t| unseen.has(&graphs[rank].tensors[t]))
        })
        .collect();
    for (class, memory) in classes.iter().zip(&memories) {
        let tensors = class.order.graphs.of(rank).tensors.iter().enumerate();
        let tensors = tensors.filter(|(t, tensor)| memory.is_remote(*t) && by_name(tensor));
        remote.extend(tensors.map(|(_, t)| t.name.as_str()));
    }
    let orders: Vec<&Order<'_>> = classes.iter().map(|class| &class.order).collect();
    violations.extend(overlay::across(&orders, &memories));
    if violations.len() >= 16 {
        return violations;
    }
    let tables: Vec<HashMap<&str, Shared<'_>>> = orders
        .iter()
        .zip(&memories)
        .map(|(order, memory)| {
            let mut table = HashMap::new();
            for (t, tensor) in order.graphs.of(rank).tensors.iter().enumerate() {
                let compared = by_name(tensor) && remote.contains(tensor.name.as_str());
                if compared && !memory.accesses(t).is_empty() {
                    let bound = bound(order, memory, t);
                    let writes = memory.accesses(t).iter().any(|a| a.write);
                    table.insert(tensor.name.as_str(), Shared { memory, tensor: t, bound, writes });
                }
            }
            table
        })
        .collect();
    for (from, before) in tables.iter().enumerate() {
        for (to, after) in tables.iter().enumerate() {
            if from == to {
                continue;
            }
            for (name, first) in before {
                let Some(second) = after.get(name) else { continue };
                if (first.writes || second.writes) && !first.bound.all_cross_barrier(&second.bound) {
                    violations.extend(pairs((orders[from], orders[to]), (first, second), rank, name));
                    if violations.len() >= 16 {
                        return violations;
                    }
                }
            }
        }
    }
    violations
}

/// The first unordered pair of accesses to a shared tensor.
fn pairs(
    (order, next): (&Order<'_>, &Order<'_>),
    (first, second): (&Shared<'_>, &Shared<'_>),
    rank: usize,
    name: &str,
) -> Option<Violation> {
    let space = |o: &Order<'_>, s: &Shared<'_>| o.graphs[rank].tensors[s.tensor].region_dims.clone();
    let comparable = space(order, first) == space(next, second);
    let flagged = order.graphs[rank].tensors[first.tensor].dtype == DType::F32Flagged;
    let number = |o: &Order<'_>, x: &Access| o.task_number(x.rank.into(), x.task);
    let overlap = |b: &Access, a: &Access| !comparable || b.region.overlaps(&a.region);
    let accesses = first.memory.accesses(first.tensor);
    for b in accesses {
        // A reader of a flagged word has seen its write, so everything that comes after the read comes after both.
        let read = flagged && accesses.iter().any(|r| !r.write && overlap(b, r));
        for a in second.memory.accesses(second.tensor) {
            if !(a.write || b.write) || !overlap(b, a) {
                continue;
            }
            let kind = Kind::of(b.write, a.write);
            if flagged && (kind == Kind::Data || kind == Kind::Overwrite && read) {
                continue;
            }
            let (earlier, later) = (number(order, b), number(next, a));
            if !order.crosses_barrier(earlier, next, later, kind) {
                let named = |graphs: Ranks<'_>, x: &Access| {
                    format!("{} in graph '{}'", Names { graphs }.task(x.place()), graphs[0].name)
                };
                let names = (named(order.graphs, b), named(next.graphs, a));
                let message = across_message(order, next, earlier, later, (&names.0, &names.1))
                    + &format!(": both touch '{name}' in rank {rank}'s memory, and at least one writes");
                return Some(Violation::new(
                    ViolationKind::UnorderedAcrossEpochs,
                    &[b.place(), a.place()],
                    message,
                ));
            }
        }
    }
    None
}

/// Checks that tensors that persist across graphs are the same in all of them.
fn same_tensors(classes: &[Known<'_>]) -> Vec<Violation> {
    let mut violations = Vec::new();
    let say = |message: String| Violation::new(ViolationKind::Shared, &[], message);
    let ranks = || classes.iter().map(|class| class.ranks);
    let Some(first) = ranks().next() else { return violations };
    if let Some(other) = ranks().find(|r| r.len() != first.len()) {
        violations.push(say(format!(
            "graph '{}' is for {} ranks, graph '{}' for {}",
            first[0].name,
            first.len(),
            other[0].name,
            other.len()
        )));
        return violations;
    }
    for rank in 0..first.len() {
        let mut known: HashMap<&str, (&TensorEntry, &str)> = HashMap::new();
        for ranks in ranks() {
            let graph = ranks.of(rank);
            for tensor in ranks.tensors(rank).iter().filter(|t| keeps(t)) {
                let (other, name) = *known.entry(&tensor.name).or_insert((tensor, &graph.name));
                let same = tensor.dtype == other.dtype
                    && tensor.dims == other.dims
                    && tensor.strides == other.strides
                    && tensor.space == other.space
                    && tensor.bytes == other.bytes
                    && tensor.parts == other.parts
                    && tensor.tiled == other.tiled
                    && tensor.paired == other.paired
                    && same_role(&tensor.role, &other.role);
                if !same && violations.len() < 16 {
                    let what = |t: &TensorEntry| {
                        format!("{} of {} {:?} ({} bytes)", role_name(&t.role), t.dtype, t.dims, t.bytes)
                    };
                    violations.push(say(format!(
                        "rank {rank}: '{}' is {} in graph '{}' and {} in graph '{name}', but it persists across graphs",
                        tensor.name,
                        what(tensor),
                        graph.name,
                        what(other)
                    )));
                }
            }
        }
    }
    violations
}
