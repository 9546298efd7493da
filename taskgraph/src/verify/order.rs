//! Happens-before over the tasks and events of all ranks.
//!
//! Nodes are events and tasks. Edges: a task to the event it triggers (on any rank), an event to the tasks that
//! depend on it, each task of a worker's list to the next, and a flagged write to its reads. The begin event of
//! a rank comes before all of that rank's tasks: no worker takes a task of an iteration before its own rank's
//! batch step has published it.
//!
//! There are two orders. The *strong* one has no flagged edges: events release and acquire, and the tasks of a list
//! share a worker, so what was written before is seen after. The *weak* one has them too: the pushes and polls of
//! flagged words are relaxed, so whoever has read the word knows that the writer came as far as that, not that its
//! other writes can be seen. It has those flagged edges that hold in every iteration; the others, of rows that may be
//! out of use, count for cycles alone. See [`Kind`] for which is asked when. What a put (a copy or signal) does is done at a time
//! of its own: it comes before what follows the event that it triggers, not before the next task of its list.
//!
//! Most questions are answered in constant time by *clocks*: on each rank one chain of nodes, each before the
//! next, is chosen (a longest path from begin to end, which passes through every event that separates two
//! operators). For each node the clocks hold the first element of each rank's chain that comes after it, and
//! the last one that comes before it. `b` comes before `a` if, on some rank, the first element after `b` is not
//! later than the last before `a`. That is sufficient, not necessary, so where it fails a search decides.
//!
//! Where ranks are alike (see `symmetry`) only rank 0's nodes are *held*, with their edges, places and clocks: a node of
//! rank r is that of rank 0 turned on by r, and so is all that is known of it. A cycle over all ranks is one of the held nodes
//! with ranks left out, and the other way round: going round it often enough comes back to the first rank.

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

/// Which edges by flagged words are meant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Flagged {
    /// None: the strong order.
    None,
    /// Those of rows that are always in use: the weak order.
    Always,
    /// All, since a task may wait for them.
    All,
}

impl Flagged {
    /// Of the weak order or the strong one.
    fn of(weak: bool) -> Flagged {
        if weak { Flagged::Always } else { Flagged::None }
    }
}

/// How it is known that one task comes before another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Proof {
    /// The event that the earlier triggers comes before one that the later depends on; so it holds for all
    /// tasks with that trigger and all with those dependencies.
    Events,
    /// For these two tasks only.
    Tasks,
    /// They are not ordered.
    Missing,
}

/// What two accesses to the same bytes are, and so which order they need.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// A read of what was written: the strong order, since the value must be seen. Of a flagged word its own edge.
    Data,
    /// A write after a read: the weak order.
    Reuse,
    /// A write after a write: the earlier one is released by an event first; after that the weak order.
    Overwrite,
}

impl Kind {
    /// Of an access that writes or not, and of one after it. Two reads need no order.
    pub(super) fn of(first_writes: bool, second_writes: bool) -> Kind {
        match (first_writes, second_writes) {
            (true, false) => Kind::Data,
            (true, true) => Kind::Overwrite,
            (false, _) => Kind::Reuse,
        }
    }
}

/// The order of all nodes. Tasks are numbered over all ranks from 0; the node of task `t` is `events + t`. What is kept for
/// each node or task is kept for the held ones, by their own numbers, and names others by their numbers over all ranks.
pub(super) struct Order<'g> {
    pub(super) graphs: Ranks<'g>,
    event_base: Vec<u32>,
    task_base: Vec<u32>,
    /// Ranks are alike, so that rank 0's nodes alone are held.
    alike: bool,
    task_rank: Vec<u16>,
    /// Node of the event that each task triggers.
    trigger: Vec<u32>,
    worker_previous: Vec<u32>,
    worker_next: Vec<u32>,
    dependents: Lists,
    triggerers: Lists,
    flags: FlagEdges,
    /// All held nodes, each after those that come before it.
    sequence: Vec<u32>,
    /// Index in `sequence` of each held node.
    position: Vec<u32>,
    /// Tasks that are puts.
    puts: Vec<bool>,
    strong: Clocks,
    /// `None` where no words are flagged: then the strong one.
    weak: Option<Clocks>,
    blocks: usize,
    has_carried: bool,
}

impl<'g> Order<'g> {
    /// The order of structurally sound graphs; where there is none, the nodes of a cycle, each before the next
    /// and the last before the first (then only names may be asked of the order). Where ranks are alike a
    /// cycle is not named.
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
        // (held event, task that triggers it).
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
                        // Rank 0's event is triggered by the rank for which it is as far on as the owner is for rank 0.
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
    /// A number for each node that grows from each to those after it.
    pub(super) fn position(&self, node: u32) -> u32 {
        let (held, by) = self.held(node);
        let ranks = if self.alike { self.graphs.len() as u32 } else { 1 };
        self.position[held as usize] * ranks + by
    }
    /// The tasks of each of the first `ranks` ranks, each after those that come before it.
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
    /// The held node of which a node is the turned one, and by how many ranks.
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
    fn held_task(&self, task: u32) -> (u32, u32) {
        let of_rank = self.task_base[1];
        if !self.alike || task < of_rank { (task, 0) } else { (task % of_rank, task / of_rank) }
    }
    /// The node `by` ranks further on. [`NONE`] stays.
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

    /// A cycle among the nodes that `sort` could not place; all are held.
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

/// Working memory of a search; one for each thread.
#[derive(Default)]
pub(super) struct Search {
    seen: Vec<u32>,
    generation: u32,
    stack: Vec<u32>,
    /// Nodes that were reached by the weak order: the second half of a search goes on from them.
    events: Vec<u32>,
    /// Searches made: a figure for the report.
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
