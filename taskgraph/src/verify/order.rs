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

mod queries;

use super::flagged::FlagEdges;
use super::lists::{Lists, bases};
use super::structure::is_put;
use crate::ids::EventId;
use crate::task_graph::{Task, TaskGraph};
use smallvec::SmallVec;

/// No node.
pub(super) const NONE: u32 = u32::MAX;
const LANES: usize = 8;
type Lanes = [u16; LANES];

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

/// Clocks of one order; see the module's page.
#[derive(Default)]
struct Clocks {
    /// `blocks` lane groups for each node: first chain element after it (`u16::MAX`: none).
    first: Vec<Lanes>,
    /// Last chain element before it (0: none); elements count from 1, the begin event.
    last: Vec<Lanes>,
}

/// The order of all nodes. Tasks are numbered over all ranks from 0; the node of task `t` is `events + t`.
pub(super) struct Order<'g> {
    pub(super) graphs: &'g [TaskGraph],
    event_base: Vec<u32>,
    task_base: Vec<u32>,
    task_rank: Vec<u16>,
    /// Node of the event that each task triggers.
    pub(super) trigger: Vec<u32>,
    worker_previous: Vec<u32>,
    worker_next: Vec<u32>,
    dependents: Lists,
    triggerers: Lists,
    flags: FlagEdges,
    /// All nodes, each after those that come before it.
    pub(super) sequence: Vec<u32>,
    /// Index in `sequence` of each node.
    pub(super) position: Vec<u32>,
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
    /// and the last before the first (then only names may be asked of the order).
    pub(super) fn new(graphs: &'g [TaskGraph], flags: FlagEdges) -> (Order<'g>, Option<Vec<u32>>) {
        let (event_base, task_base) = bases(graphs);
        let events = event_base[graphs.len()] as usize;
        let tasks = task_base[graphs.len()] as usize;
        let mut task_rank = Vec::with_capacity(tasks);
        let mut trigger = Vec::with_capacity(tasks);
        let mut waits = vec![0u32; events + tasks];
        let mut worker_previous = vec![NONE; tasks];
        let mut worker_next = vec![NONE; tasks];
        let mut puts = Vec::with_capacity(tasks);
        let mut has_carried = false;
        for (rank, graph) in graphs.iter().enumerate() {
            let base = task_base[rank];
            for (index, task) in graph.tasks.iter().enumerate() {
                let event = task.trigger.map_or(NONE, |e| event_base[e.owner() as usize] + e.index());
                trigger.push(event);
                task_rank.push(rank as u16);
                puts.push(is_put(task));
                if event != NONE {
                    waits[event as usize] += 1;
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
        let pairs = graphs.iter().enumerate().flat_map(|(rank, graph)| {
            let (event_base, task_base) = (event_base[rank], task_base[rank]);
            graph.tasks.iter().enumerate().flat_map(move |(index, task)| {
                task.dependencies.iter().map(move |&e| (event_base + e, task_base + index as u32))
            })
        });
        let dependents = Lists::new(events, pairs);
        let triggers = trigger.iter().enumerate().filter(|(_, e)| **e != NONE);
        let triggerers = Lists::new(events, triggers.map(|(t, e)| (*e, t as u32)));
        let blocks = graphs.len().div_ceil(LANES);
        let mut order = Order {
            graphs,
            event_base,
            task_base,
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
            let cycle = order.cycle();
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
        &self.graphs[rank].tasks[index as usize]
    }
    /// Tasks that trigger an event.
    pub(super) fn triggerers(&self, event: u32) -> &[u32] {
        self.triggerers.get(event)
    }

    /// Successors.
    fn successors(&self, node: u32, flagged: Flagged, mut visit: impl FnMut(u32)) {
        let events = self.events();
        if node < events {
            self.dependents.get(node).iter().for_each(|&t| visit(events + t));
        } else {
            let task = node - events;
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
        if node < events {
            self.triggerers.get(node).iter().for_each(|&t| visit(events + t));
        } else {
            let number = node - events;
            let rank = self.task_rank[number as usize] as usize;
            for &event in &self.task(number).dependencies {
                visit(self.event_base[rank] + event);
            }
            if self.worker_previous[number as usize] != NONE {
                visit(events + self.worker_previous[number as usize]);
            }
            match flagged {
                Flagged::None => {}
                Flagged::Always => self.flags.previous.get(number).iter().for_each(|&t| visit(events + t)),
                Flagged::All => self.flags.writers.get(number).iter().for_each(|&t| visit(events + t)),
            }
        }
    }

    fn sort(&mut self, waits: &mut [u32]) {
        let mut ready: Vec<u32> = (0..waits.len() as u32).rev().filter(|&n| waits[n as usize] == 0).collect();
        let mut sequence = std::mem::take(&mut self.sequence);
        while let Some(node) = ready.pop() {
            self.position[node as usize] = sequence.len() as u32;
            sequence.push(node);
            self.successors(node, Flagged::All, |next| {
                waits[next as usize] -= 1;
                if waits[next as usize] == 0 {
                    ready.push(next);
                }
            });
        }
        self.sequence = sequence;
    }

    /// A cycle among the nodes that `sort` could not place.
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

    /// For each rank a chain of nodes, each before the next, from its begin event to its end event.
    fn chains(&self, flagged: Flagged) -> Vec<Vec<u32>> {
        let events = self.events();
        let rank_of: Vec<u16> = (0..self.graphs.len())
            .flat_map(|r| std::iter::repeat_n(r as u16, self.graphs[r].events.len()))
            .chain(self.task_rank.iter().copied())
            .collect();
        let mut depth = vec![0u32; self.position.len()];
        let mut parent = vec![NONE; self.position.len()];
        for &node in &self.sequence {
            let next_depth = depth[node as usize] + 1;
            self.successors(node, flagged, |next| {
                if depth[next as usize] < next_depth && rank_of[next as usize] == rank_of[node as usize] {
                    depth[next as usize] = next_depth;
                    parent[next as usize] = node;
                }
            });
        }
        (0..self.graphs.len())
            .map(|rank| {
                let begin = self.event_node(rank, EventId::BEGIN);
                let end = self.event_node(rank, EventId::END_OF_GRAPH);
                let mut chain = Vec::new();
                let mut at = end;
                while at != NONE && at != begin {
                    chain.push(at);
                    at = parent[at as usize];
                }
                chain.reverse();
                // An event before the first task is not known to come after this rank's begin.
                let first_task = chain.iter().position(|&n| n >= events).unwrap_or(chain.len());
                chain.drain(..first_task);
                let step = chain.len() / (usize::from(u16::MAX) - 8) + 1;
                let mut chosen = vec![begin];
                chosen.extend(chain.iter().rev().step_by(step).rev());
                if chain.is_empty() {
                    chosen.push(end);
                }
                chosen
            })
            .collect()
    }

    fn clocks_of(&self, flagged: Flagged) -> Clocks {
        let blocks = self.blocks;
        let mut on_chain = vec![(0u16, 0u16); self.position.len()];
        for (rank, chain) in self.chains(flagged).into_iter().enumerate() {
            for (index, node) in chain.into_iter().enumerate() {
                on_chain[node as usize] = (rank as u16, index as u16 + 1);
            }
        }
        let on_chain = &on_chain;
        let this = self;
        let forward = || {
            let mut last = vec![[0u16; LANES]; this.position.len() * blocks];
            let events = this.events() as usize;
            for (task, &rank) in this.task_rank.iter().enumerate() {
                let rank = rank as usize;
                last[(events + task) * blocks + rank / LANES][rank % LANES] = 1;
            }
            for &node in &this.sequence {
                let at = node as usize * blocks;
                let (rank, index) = on_chain[node as usize];
                if index > 0 {
                    last[at + rank as usize / LANES][rank as usize % LANES] = index;
                }
                for block in 0..blocks {
                    let own = last[at + block];
                    this.successors(node, flagged, |next| {
                        let lanes = &mut last[next as usize * blocks + block];
                        for (lane, value) in lanes.iter_mut().zip(own) {
                            *lane = (*lane).max(value);
                        }
                    });
                }
            }
            last
        };
        let backward = || {
            let mut first = vec![[u16::MAX; LANES]; this.position.len() * blocks];
            for &node in this.sequence.iter().rev() {
                let at = node as usize * blocks;
                for block in 0..blocks {
                    let mut own = first[at + block];
                    this.successors(node, flagged, |next| {
                        for (lane, value) in own.iter_mut().zip(first[next as usize * blocks + block]) {
                            *lane = (*lane).min(value);
                        }
                    });
                    first[at + block] = own;
                }
                let (rank, index) = on_chain[node as usize];
                if index > 0 {
                    first[at + rank as usize / LANES][rank as usize % LANES] = index;
                }
            }
            first
        };
        let (last, first) = std::thread::scope(|scope| {
            let first = std::thread::Builder::new().spawn_scoped(scope, backward);
            let last = forward();
            // Where the system gives no thread, this one does both.
            (last, first.map_or_else(|_| backward(), |thread| thread.join().unwrap_or_default()))
        });
        Clocks { first, last }
    }
}

/// Clocks of a set of tasks: of each rank's chain, the last of the first elements after them, and the first of
/// the last elements before them.
pub(super) struct Bound {
    weak: bool,
    first: SmallVec<[Lanes; 1]>,
    last: SmallVec<[Lanes; 1]>,
}

impl Bound {
    /// The same of the ranks that are `by` further on of `world` alike ones.
    pub(super) fn turned(&self, by: usize, world: usize) -> Bound {
        let turn = |lanes: &[Lanes]| {
            let mut turned: SmallVec<[Lanes; 1]> = SmallVec::from_slice(lanes);
            for rank in 0..world {
                let to = (rank + by) % world;
                turned[to / LANES][to % LANES] = lanes[rank / LANES][rank % LANES];
            }
            turned
        };
        Bound { weak: self.weak, first: turn(&self.first), last: turn(&self.last) }
    }

    /// All of these tasks of one iteration come before all of `next`'s of the next one, by one rank's barrier.
    pub(super) fn all_cross_barrier(&self, next: &Bound) -> bool {
        self.first.iter().zip(&next.last).any(|(first, last)| {
            (0..LANES).any(|lane| {
                first[lane] != u16::MAX && first[lane] != 0 && last[lane] != 0 && last[lane] != u16::MAX
            })
        })
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
