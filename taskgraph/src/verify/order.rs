//! Happens-before over the tasks and events of all ranks.
//!
//! Nodes are events and tasks. Edges lead from a task to the event that it triggers (on any rank), from an event to the tasks
//! that depend on it, from each task of a worker's list to the next, and from a flagged write to its reads. The begin event of a
//! rank comes before all of that rank's tasks: no worker starts a task of an iteration before its own rank's batch step has
//! published the iteration.
//!
//! There are two orders. The *strong* one has no flagged edges: events release and acquire, and the tasks of a list share a
//! worker, so earlier writes are visible later. The *weak* one also has flagged edges. Pushes and polls of flagged words are
//! relaxed. So a reader of the word knows that the writer has come this far, but cannot rely on seeing its other writes. The weak
//! order contains those flagged edges that hold in every iteration. The others, of rows that may not be in use, count only for
//! cycles. [`Kind`] says which order is used when. A put (a copy, a signal or another task that writes on another rank) completes at
//! its own time: it comes before what follows the event that it triggers, not before the next task of its list.
//!
//! *Clocks* answer most questions in constant time. On each rank, one chain of nodes is chosen in which each node comes before
//! the next: a longest path from begin to end, which passes through every event that separates two operators. For each node, the
//! clocks hold the first element of each rank's chain that comes after it, and the last one that comes before it. `b` comes
//! before `a` if, on some rank, the first element after `b` is not later than the last one before `a`. This condition is
//! sufficient but not necessary, so if it fails, a search decides.
//!
//! If ranks are alike (see `symmetry`), only rank 0's nodes are *held*, with their edges, places and clocks. A node of rank r is
//! that of rank 0 turned by r, and so is everything known about it. A cycle over all ranks gives a cycle of held nodes if rank
//! numbers are left out, and the other way round: going round it often enough leads back to the first rank.

mod clocks;
mod lanes;
mod queries;

use super::flagged::FlagEdges;
use super::lists::{Lists, bases};
use super::ranks::Ranks;
use super::structure::is_put;
use crate::task_graph::{Task, TaskGraph};
pub(super) use lanes::Bound;
use lanes::Clocks;

/// No node.
pub(super) const NONE: u32 = u32::MAX;

/// A choice of edges by flagged words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Flagged {
    /// None: the strong order.
    None,
    /// Those of rows that are always in use: the weak order.
    Always,
    /// All, because a task may wait for them.
    All,
}

impl Flagged {
    /// The edges of the weak or of the strong order.
    fn of(weak: bool) -> Flagged {
        if weak { Flagged::Always } else { Flagged::None }
    }
}

/// How one task is known to come before another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Proof {
    /// The event that the earlier task triggers comes before one that the later task depends on. So this holds for all tasks with
    /// that trigger and all with those dependencies.
    Events,
    /// Known for these two tasks only.
    Tasks,
    /// They are not ordered.
    Missing,
}

/// The kinds of two accesses to the same bytes, which determine the order that they need.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// A read of what was written. Needs the strong order, because the value must be visible. For a flagged word, its own edge.
    Data,
    /// A write after a read. Needs the weak order.
    Reuse,
    /// A write after a write. An event must release the earlier one; after that, the weak order is enough.
    Overwrite,
}

impl Kind {
    /// The kind of a pair of accesses, from whether each one writes. Two reads need no order.
    pub(super) fn of(first_writes: bool, second_writes: bool) -> Kind {
        match (first_writes, second_writes) {
            (true, false) => Kind::Data,
            (true, true) => Kind::Overwrite,
            (false, _) => Kind::Reuse,
        }
    }
}

/// The order of all nodes. Tasks are numbered over all ranks from 0; the node of task `t` is `events + t`. Data per node or task
/// is kept for held ones, under their own numbers, and refers to others by their numbers over all ranks.
pub(super) struct Order<'g> {
    pub(super) graphs: Ranks<'g>,
    event_base: Vec<u32>,
    task_base: Vec<u32>,
    /// True if ranks are alike, so that only rank 0's nodes are held.
    alike: bool,
    task_rank: Vec<u16>,
    /// The node of the event that each task triggers.
    trigger: Vec<u32>,
    worker_previous: Vec<u32>,
    worker_next: Vec<u32>,
    dependents: Lists,
    triggerers: Lists,
    flags: FlagEdges,
    /// All held nodes in topological order.
    sequence: Vec<u32>,
    /// Index in `sequence` of each held node.
    position: Vec<u32>,
    /// The tasks that are puts.
    puts: Vec<bool>,
    strong: Clocks,
    /// `None` if no words are flagged; then it equals the strong order.
    weak: Option<Clocks>,
    blocks: usize,
    has_carried: bool,
}

impl<'g> Order<'g> {
    /// The order of structurally sound graphs. If there is none, also the nodes of a cycle, each before the next and the last
    /// before the first; then only names may be requested from the order. If ranks are alike, a cycle is not named.
    pub(super) fn new(graphs: Ranks<'g>, flags: FlagEdges) -> (Order<'g>, Option<Vec<u32>>) {
        let alike = graphs.symmetry().is_some();
        let (event_base, task_base) = bases(graphs);
        let world = graphs.len();
        let held = graphs.held();
        let events = event_base[held.len()] as usize;
        let tasks = task_base[held.len()] as usize;
        let mut task_rank = Vec::with_capacity(tasks);
        let mut trigger = Vec::with_capacity(tasks);
        let mut waits = vec![0u32; events + tasks];
        let mut worker_previous = vec![NONE; tasks];
        let mut worker_next = vec![NONE; tasks];
        let mut puts = Vec::with_capacity(tasks);
        let mut has_carried = false;
        // Pairs (held event, task that triggers it).
        let mut triggers = Vec::with_capacity(tasks);
        for (rank, graph) in held.iter().enumerate() {
            let base = task_base[rank];
            for (index, task) in graph.tasks.iter().enumerate() {
                let event = task.trigger.map_or(NONE, |e| event_base[e.owner() as usize] + e.index());
                trigger.push(event);
                task_rank.push(rank as u16);
                puts.push(is_put(task));
                if let Some(event) = task.trigger {
                    let (owner, number) = (usize::from(event.owner()), base + index as u32);
                    let pair = if alike {
                        // Rank 0's event is triggered by the rank that is as far ahead of it as the owner is ahead of rank 0.
                        (event.index(), task_base[(world - owner) % world] + index as u32)
                    } else {
                        (event_base[owner] + event.index(), number)
                    };
                    waits[pair.0 as usize] += 1;
                    triggers.push(pair);
                }
                waits[events + base as usize + index] = task.dependencies.len() as u32;
                has_carried |= !task.carried.is_empty();
            }
            for list in &graph.worker_lists {
                for pair in list.windows(2) {
                    worker_next[(base + pair[0]) as usize] = base + pair[1];
                    worker_previous[(base + pair[1]) as usize] = base + pair[0];
                    waits[events + (base + pair[1]) as usize] += 1;
                }
            }
        }
        for t in 0..tasks as u32 {
            waits[events + t as usize] += flags.writers.get(t).len() as u32;
        }
        let pairs = held.iter().enumerate().flat_map(|(rank, graph)| {
            let (event_base, task_base) = (event_base[rank], task_base[rank]);
            graph.tasks.iter().enumerate().flat_map(move |(index, task)| {
                task.dependencies.iter().map(move |&e| (event_base + e, task_base + index as u32))
            })
        });
        let dependents = Lists::new(events, pairs);
        let triggerers = Lists::new(events, triggers.iter().copied());
        let blocks = world.div_ceil(lanes::LANES);
        let mut order = Order {
            graphs,
            event_base,
            task_base,
            alike,
            task_rank,
            trigger,
            worker_previous,
            worker_next,
            dependents,
            triggerers,
            flags,
            sequence: Vec::with_capacity(events + tasks),
            position: vec![NONE; events + tasks],
            puts,
            strong: Clocks::default(),
            weak: None,
            blocks,
            has_carried,
        };
        order.sort(&mut waits);
        if order.sequence.len() < events + tasks {
            let cycle = if alike { Vec::new() } else { order.cycle() };
            return (order, Some(cycle));
        }
        order.strong = order.clocks_of(Flagged::None);
        order.weak = order.flags.any().then(|| order.clocks_of(Flagged::Always));
        (order, None)
    }

    /// Number of events, which is the node of task 0 of rank 0.
    pub(super) fn events(&self) -> u32 {
        self.event_base[self.graphs.len()]
    }
    /// Number of tasks.
    pub(super) fn tasks(&self) -> u32 {
        self.task_base[self.graphs.len()]
    }
    /// Number of the task `index` of `rank`.
    pub(super) fn task_number(&self, rank: usize, index: u32) -> u32 {
        self.task_base[rank] + index
    }
    /// Node of the event `index` of `rank`.
    pub(super) fn event_node(&self, rank: usize, index: u32) -> u32 {
        self.event_base[rank] + index
    }
    /// Rank and index of a task.
    pub(super) fn task_place(&self, task: u32) -> (usize, u32) {
        if self.alike {
            let of_rank = self.task_base[1];
            return ((task / of_rank) as usize, task % of_rank);
        }
        let rank = self.task_rank[task as usize] as usize;
        (rank, task - self.task_base[rank])
    }
    /// Rank and index of an event node.
    pub(super) fn event_place(&self, event: u32) -> (usize, u32) {
        let rank = self.event_base.partition_point(|&b| b <= event) - 1;
        (rank, event - self.event_base[rank])
    }
    pub(super) fn task(&self, task: u32) -> &'g Task {
        let (rank, index) = self.task_place(task);
        &self.graphs.of(rank).tasks[index as usize]
    }
    /// Tasks that trigger an event.
    pub(super) fn triggerers(&self, event: u32) -> Vec<u32> {
        let (held, by) = self.held(event);
        self.triggerers.get(held).iter().map(|&task| self.turned_task(task, by)).collect()
    }
    /// Node of the event that a task triggers, or [`NONE`].
    pub(super) fn trigger(&self, task: u32) -> u32 {
        let (held, by) = self.held_task(task);
        self.turned(self.trigger[held as usize], by)
    }
    /// A number that grows from each node to those after it.
    pub(super) fn position(&self, node: u32) -> u32 {
        let (held, by) = self.held(node);
        let ranks = if self.alike { self.graphs.len() as u32 } else { 1 };
        self.position[held as usize] * ranks + by
    }
    /// The tasks of each of the first `ranks` ranks, in topological order.
    pub(super) fn in_order(&self, ranks: usize) -> Vec<Vec<u32>> {
        let tasks = |g: &TaskGraph| Vec::with_capacity(g.tasks.len());
        let mut own: Vec<Vec<u32>> = self.graphs.iter().take(ranks).map(tasks).collect();
        let events = self.held_events();
        for &node in self.sequence.iter().filter(|&&n| n >= events) {
            let (rank, index) = self.task_place(node - events);
            if rank < ranks {
                own[rank].push(index);
            }
        }
        own
    }

    /// Number of held events, which is the held node of task 0.
    fn held_events(&self) -> u32 {
        self.event_base[if self.alike { 1 } else { self.graphs.len() }]
    }
    /// Number of nodes of all ranks.
    fn nodes(&self) -> usize {
        (self.events() + self.tasks()) as usize
    }
    /// The held node from which a node is turned, and by how many ranks.
    #[inline]
    fn held(&self, node: u32) -> (u32, u32) {
        let of_rank = self.event_base[1];
        match node.checked_sub(self.events()) {
            _ if !self.alike => (node, 0),
            None => (node % of_rank, node / of_rank),
            Some(task) => {
                let (held, by) = self.held_task(task);
                (of_rank + held, by)
            }
        }
    }
    #[inline]
    fn held_task(&self, task: u32) -> (u32, u32) {
        let of_rank = self.task_base[1];
        if !self.alike || task < of_rank { (task, 0) } else { (task % of_rank, task / of_rank) }
    }
    /// The node that is `by` ranks ahead. [`NONE`] stays.
    fn turned(&self, node: u32, by: u32) -> u32 {
        match node.checked_sub(self.events()) {
            _ if by == 0 || node == NONE => node,
            None => (node + by * self.event_base[1]) % self.events(),
            Some(task) => self.events() + self.turned_task(task, by),
        }
    }
    fn turned_task(&self, task: u32, by: u32) -> u32 {
        if by == 0 || task == NONE { task } else { (task + by * self.task_base[1]) % self.tasks() }
    }

    /// Successors of a held node.
    fn held_successors(&self, node: u32, flagged: Flagged, mut visit: impl FnMut(u32)) {
        let (events, held_events) = (self.events(), self.held_events());
        if node < held_events {
            self.dependents.get(node).iter().for_each(|&t| visit(events + t));
        } else {
            let task = node - held_events;
            if self.trigger[task as usize] != NONE {
                visit(self.trigger[task as usize]);
            }
            if self.worker_next[task as usize] != NONE {
                visit(events + self.worker_next[task as usize]);
            }
            match flagged {
                Flagged::None => {}
                Flagged::Always => self.flags.next.get(task).iter().for_each(|&t| visit(events + t)),
                Flagged::All => self.flags.readers.get(task).iter().for_each(|&t| visit(events + t)),
            }
        }
    }

    /// Predecessors.
    fn predecessors(&self, node: u32, flagged: Flagged, mut visit: impl FnMut(u32)) {
        let events = self.events();
        let (held, by) = self.held(node);
        let mut visit_task = |task: u32| visit(events + self.turned_task(task, by));
        let Some(number) = held.checked_sub(self.held_events()) else {
            self.triggerers.get(held).iter().for_each(|&t| visit_task(t));
            return;
        };
        if self.worker_previous[number as usize] != NONE {
            visit_task(self.worker_previous[number as usize]);
        }
        match flagged {
            Flagged::None => {}
            Flagged::Always => self.flags.previous.get(number).iter().for_each(|&t| visit_task(t)),
            Flagged::All => self.flags.writers.get(number).iter().for_each(|&t| visit_task(t)),
        }
        let (rank, index) = self.task_place(number);
        for &event in &self.graphs[rank].tasks[index as usize].dependencies {
            visit(self.turned(self.event_base[rank] + event, by));
        }
    }

    fn sort(&mut self, waits: &mut [u32]) {
        let mut ready: Vec<u32> = (0..waits.len() as u32).rev().filter(|&n| waits[n as usize] == 0).collect();
        let mut sequence = std::mem::take(&mut self.sequence);
        while let Some(node) = ready.pop() {
            self.position[node as usize] = sequence.len() as u32;
            sequence.push(node);
            self.held_successors(node, Flagged::All, |next| {
                let (next, _) = self.held(next);
                waits[next as usize] -= 1;
                if waits[next as usize] == 0 {
                    ready.push(next);
                }
            });
        }
        self.sequence = sequence;
    }

    /// A cycle among the nodes that `sort` could not place. All of them are held.
    fn cycle(&self) -> Vec<u32> {
        let open = |n: u32| self.position[n as usize] == NONE;
        let Some(start) = (0..self.position.len() as u32).find(|&n| open(n)) else { return Vec::new() };
        let mut step = vec![NONE; self.position.len()];
        let mut path = vec![start];
        let mut at = start;
        loop {
            step[at as usize] = path.len() as u32 - 1;
            let mut before = NONE;
            self.predecessors(at, Flagged::All, |p| {
                if before == NONE && open(p) {
                    before = p;
                }
            });
            if before == NONE {
                return Vec::new();
            }
            if step[before as usize] != NONE {
                let mut cycle = path.split_off(step[before as usize] as usize);
                cycle.reverse();
                return cycle;
            }
            path.push(before);
            at = before;
        }
    }
}

/// The working memory of a search; one per thread.
#[derive(Default)]
pub(super) struct Search {
    seen: Vec<u32>,
    generation: u32,
    stack: Vec<u32>,
    /// Nodes reached in the weak order. The second half of a search continues from them.
    events: Vec<u32>,
    /// Number of searches, for the report.
    pub(super) searches: u64,
}

impl Search {
    fn start(&mut self, nodes: usize) {
        self.seen.resize(nodes, 0);
        if self.generation == u32::MAX {
            self.seen.fill(0);
            self.generation = 0;
        }
        self.generation += 1;
        self.searches += 1;
        self.stack.clear();
    }
    fn push(&mut self, node: u32) {
        if self.seen[node as usize] != self.generation {
            self.seen[node as usize] = self.generation;
            self.stack.push(node);
        }
    }
}
