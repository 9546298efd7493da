//! Handles the simulation's events in order of time.

use crate::cluster::Cluster;
use crate::edges::{Flagged, flagged};
use crate::rank_state::{Rank, rank};
use crate::resources::{Message, Resources};
use crate::stream::Kind;
use crate::time::{Ps, at_rate, ps};
use crate::timeline::{Outcome, Record, Waited};
use crate::work::{Load, flagged_bytes};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use taskgraph::task_graph::Place;
use taskgraph::words::counted;
use taskgraph::{DType, EventId, Placement, Registry, TaskGraph};
use thiserror::Error;

/// Why a simulation failed.
#[derive(Debug, Error)]
pub enum SimulateError {
    /// The ranks need several nodes, but the cluster file describes no network.
    #[error(
        "{ranks} ranks take {nodes} nodes of {}, but the cluster file has no `network`; add it, or raise `ranks_per_node`",
        counted(*.per_node, "rank")
    )]
    NoNetwork {
        /// Number of ranks.
        ranks: u32,
        /// Number of nodes that they need.
        nodes: u32,
        /// Number of ranks per node.
        per_node: u32,
    },
    /// Some tasks never ran, because the graphs wait in a circle.
    #[error("{left} of {all} tasks never ran; the first is task {task} of rank {rank} ({name})")]
    Stuck {
        /// Number of tasks that did not run.
        left: usize,
        /// Number of all tasks.
        all: usize,
        /// The first of them.
        task: u32,
        /// Its rank.
        rank: u32,
        /// Its operator.
        name: String,
    },
}

/// What can happen. The order breaks ties, so that equal inputs give equal runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    /// An event of a rank is triggered.
    Trigger { rank: u32, event: u32 },
    /// A rank sees the words that a task has pushed.
    Pushed { rank: u32, task: u32, on: u32 },
    /// A worker may take the task from the queue (dynamic).
    Launched { rank: u32, task: u32 },
    /// A worker's task begins.
    Begin { rank: u32, worker: u32 },
    /// The task asks for the data that it reads once it runs.
    Ask { rank: u32, worker: u32 },
    /// That data has arrived.
    Loaded { rank: u32, worker: u32 },
    /// A piece of the stream has arrived.
    Arrived { rank: u32, worker: u32 },
    /// A piece has been used.
    Used { rank: u32, worker: u32 },
    /// The task has ended.
    End { rank: u32, worker: u32 },
}

struct Engine<'a> {
    cluster: &'a Cluster,
    resources: Resources<'a>,
    ranks: Vec<Rank<'a>>,
    flagged: Flagged,
    load: Load,
    heap: BinaryHeap<Reverse<(Ps, u64, Happening)>>,
    count: u64,
}

/// Checks that the cluster has a network if `ranks` ranks need one. Called before graphs are built, so that the error comes early.
///
/// # Errors
/// The cluster has no network, but the ranks do not fit one node.
pub fn check_network(cluster: &Cluster, ranks: u32) -> Result<(), SimulateError> {
    let nodes = cluster.nodes(ranks).last().map_or(1, |last| last + 1);
    if nodes > 1 && cluster.network.is_none() {
        return Err(SimulateError::NoNetwork { ranks, nodes, per_node: cluster.ranks_per_node });
    }
    Ok(())
}

/// Runs one iteration of all ranks' graphs.
///
/// # Errors
/// The cluster needs a network but has none, or the graphs wait in a circle (verified graphs do not).
pub fn simulate(
    graphs: &[TaskGraph],
    registry: &Registry,
    cluster: &Cluster,
    load: Load,
) -> Result<Outcome, SimulateError> {
    let world = graphs.len() as u32;
    check_network(cluster, world)?;
    let flagged = flagged(graphs);
    let ranks = graphs.iter().map(|graph| rank(graph, registry, load, &flagged)).collect();
    let mut engine = Engine {
        cluster,
        resources: Resources::new(cluster, world),
        ranks,
        flagged,
        load,
        heap: BinaryHeap::new(),
        count: 0,
    };
    engine.start();
    let mut last = 0;
    while let Some(Reverse((now, _, what))) = engine.heap.pop() {
        if matches!(what, Happening::End { .. }) {
            last = now;
        }
        engine.step(now, what);
    }
    engine.finish(last)
}

impl Engine<'_> {
    fn at(&mut self, time: Ps, what: Happening) {
        self.heap.push(Reverse((time, self.count, what)));
        self.count += 1;
    }

    fn start(&mut self) {
        for rank in 0..self.ranks.len() as u32 {
            // Task 1 begins the graph.
            self.at(0, Happening::Trigger { rank, event: EventId::BEGIN });
            for worker in 0..self.ranks[rank as usize].graph.workers {
                let r = &mut self.ranks[rank as usize];
                if r.graph.placement == Placement::Static {
                    for &task in &r.graph.worker_lists[worker as usize] {
                        let work = &r.work[task as usize];
                        r.workers[worker as usize].stream.add(task, work, &self.cluster.worker);
                    }
                }
                self.take(rank, worker, 0, 0);
                self.ask(rank, worker, 0);
            }
        }
    }

    /// Gives a worker that has been free since `free` its next task, if there is one.
    fn take(&mut self, rank: u32, worker: u32, free: Ps, now: Ps) {
        let r = &mut self.ranks[rank as usize];
        let w = &mut r.workers[worker as usize];
        w.free = free;
        w.task = match r.graph.placement {
            Placement::Static => {
                let task = r.graph.worker_lists[worker as usize].get(w.next).copied();
                w.next += 1;
                task
            }
            Placement::Dynamic => r.queue.pop_front(),
        };
        let Some(task) = w.task else {
            if r.graph.placement == Placement::Dynamic {
                r.idle.push_back(worker);
            }
            return;
        };
        if r.graph.placement == Placement::Dynamic {
            w.stream.add(task, &r.work[task as usize], &self.cluster.worker);
        }
        if r.states[task as usize].needs == 0 {
            self.begin_at(rank, worker, now.max(free + ps(self.cluster.protocol.task_us)));
        }
    }

    fn begin_at(&mut self, rank: u32, worker: u32, time: Ps) {
        let w = &mut self.ranks[rank as usize].workers[worker as usize];
        w.begun = true;
        self.at(time, Happening::Begin { rank, worker });
    }

    /// One of the task's dependencies is met.
    fn got(&mut self, rank: u32, task: u32, by_peer: bool, now: Ps) {
        let r = &mut self.ranks[rank as usize];
        let state = &mut r.states[task as usize];
        state.needs -= 1;
        state.by_peer = by_peer;
        if state.needs > 0 {
            return;
        }
        // If a worker holds the task already, that worker begins it.
        let holder = match r.graph.placement {
            Placement::Static => r.graph.tasks[task as usize].worker,
            Placement::Dynamic => r.workers.iter().position(|w| w.task == Some(task)).map(|w| w as u32),
        };
        if let Some(worker) = holder {
            let w = &r.workers[worker as usize];
            if w.task == Some(task) && !w.begun {
                let time = now.max(w.free + ps(self.cluster.protocol.task_us));
                self.begin_at(rank, worker, time);
            }
        }
    }

    fn step(&mut self, now: Ps, what: Happening) {
        match what {
            Happening::Trigger { rank, event } => self.trigger(rank, event, now),
            Happening::Pushed { rank, task, on } => {
                let readers = self.flagged.readers.get(&(rank, task)).cloned().unwrap_or_default();
                for (_, reader) in readers.iter().filter(|(reader, _)| *reader == on) {
                    self.got(on, *reader, rank != on, now);
                }
            }
            Happening::Launched { rank, task } => {
                let r = &mut self.ranks[rank as usize];
                r.queue.push_back(task);
                if let Some(worker) = r.idle.pop_front() {
                    let free = r.workers[worker as usize].free;
                    self.take(rank, worker, free, now);
                }
            }
            Happening::Begin { rank, worker } => self.begin(rank, worker, now),
            Happening::Ask { rank, worker } => {
                let r = &mut self.ranks[rank as usize];
                let ahead = self.cluster.worker.pages_run_ahead;
                let work = r.workers[worker as usize].task.map(|task| &r.work[task as usize]);
                let bytes = work.map_or(0, |work| work.gathered + work.pages - work.ahead(ahead));
                r.bytes_read += bytes;
                let there = if bytes > 0 { self.resources.read(rank, now, bytes) } else { now };
                self.at(there, Happening::Loaded { rank, worker });
            }
            Happening::Loaded { rank, worker } => {
                self.ranks[rank as usize].workers[worker as usize].loaded = true;
                self.use_piece(rank, worker, now);
            }
            Happening::Arrived { rank, worker } => {
                self.ranks[rank as usize].workers[worker as usize].stream.arrive();
                self.ask(rank, worker, now);
                self.use_piece(rank, worker, now);
            }
            Happening::Used { rank, worker } => {
                let w = &mut self.ranks[rank as usize].workers[worker as usize];
                w.using = false;
                w.left -= w.stream.used();
                self.ask(rank, worker, now);
                self.use_piece(rank, worker, now);
            }
            Happening::End { rank, worker } => self.end(rank, worker, now),
        }
    }

    fn trigger(&mut self, rank: u32, event: u32, now: Ps) {
        let r = &mut self.ranks[rank as usize];
        let count = &mut r.events[event as usize];
        *count = count.saturating_sub(1);
        if *count > 0 {
            return;
        }
        let remote = r.graph.events[event as usize].remote;
        let waiters = std::mem::take(&mut r.waiters[event as usize]);
        for task in waiters {
            if self.ranks[rank as usize].graph.placement == Placement::Dynamic {
                self.at(now, Happening::Launched { rank, task });
            }
            self.got(rank, task, remote, now);
        }
    }

    /// Asks for as many pieces of a worker's stream as the limits allow.
    fn ask(&mut self, rank: u32, worker: u32, now: Ps) {
        while let Some(bytes) = self.ranks[rank as usize].ask(worker, &self.cluster.worker) {
            let there = self.resources.read(rank, now, bytes);
            self.at(there, Happening::Arrived { rank, worker });
        }
    }

    fn begin(&mut self, rank: u32, worker: u32, now: Ps) {
        let (protocol, limits) = (&self.cluster.protocol, &self.cluster.worker);
        let r = &mut self.ranks[rank as usize];
        let w = &mut r.workers[worker as usize];
        let Some(task) = w.task else { return };
        let work = r.work[task as usize];
        (w.begin, w.running, w.loaded) = (now, true, false);
        w.left = work.streamed + work.ahead(limits.pages_run_ahead);
        let mut ready = now + at_rate(work.read, limits.near_gb_per_s);
        if !work.nothing {
            ready += ps(protocol.work_us);
        }
        if work.streamed > 0 {
            ready += ps(protocol.product_us);
        }
        if work.indirect {
            ready += ps(protocol.indirect_us);
        }
        // The memory serves requests in the order of arrival, so this request must be made at its own time.
        self.at(ready, Happening::Ask { rank, worker });
        self.ask(rank, worker, now);
    }

    /// Uses the next piece of weights, or ends the task if none is left.
    fn use_piece(&mut self, rank: u32, worker: u32, now: Ps) {
        let limits = &self.cluster.worker;
        let r = &mut self.ranks[rank as usize];
        let w = &mut r.workers[worker as usize];
        if !w.running || !w.loaded || w.using {
            return;
        }
        let Some(task) = w.task else { return };
        let work = r.work[task as usize];
        if w.left == 0 {
            w.loaded = false; // once
            let sums = ps(limits.sum_ns * work.sums as f64 / 1e3);
            let end = now + sums + at_rate(work.written, limits.near_gb_per_s);
            self.at(end, Happening::End { rank, worker });
            return;
        }
        let Some(piece) = w.stream.first() else {
            w.starved.get_or_insert(now);
            return;
        };
        if let Some(since) = w.starved.take() {
            w.page += now - since;
        }
        w.using = true;
        let took = match piece.kind {
            Kind::Pages => at_rate(piece.bytes, limits.page_gb_per_s.unwrap_or(limits.stream_gb_per_s)),
            Kind::Weights => {
                let took = at_rate(piece.bytes, limits.stream_gb_per_s);
                let share = piece.bytes as f64 / work.streamed as f64;
                let of = |all: u64| (all as f64 * share) as u64;
                let tiles = ps(limits.tile_us * work.tiles(limits.tile_rows) * share);
                let products = at_rate(of(work.flops), limits.gflop_per_s);
                let along = at_rate(of(work.read_along), limits.near_gb_per_s);
                let step = if work.sums > 0 { ps(limits.step_us) } else { 0 };
                (took + tiles).max(products).max(along).max(step)
            }
        };
        self.at(now + took, Happening::Used { rank, worker });
    }

    fn end(&mut self, rank: u32, worker: u32, now: Ps) {
        let r = &mut self.ranks[rank as usize];
        let w = &mut r.workers[worker as usize];
        let Some(index) = w.task.take() else { return };
        let state = &mut r.states[index as usize];
        state.done = true;
        let waited = match (state.by_peer, r.graph.placement) {
            _ if w.begin <= w.free + ps(self.cluster.protocol.task_us) => Waited::No,
            (true, _) => Waited::Peer,
            (false, Placement::Static) => Waited::Event,
            (false, Placement::Dynamic) => Waited::Queue,
        };
        r.records.push(Record {
            task: index,
            worker,
            free: w.free,
            begin: w.begin,
            end: now,
            page: std::mem::take(&mut w.page),
            waited,
        });
        (w.running, w.begun, w.loaded) = (false, false, false);
        let (graph, work) = (r.graph, r.work[index as usize]);
        let task = &graph.tasks[index as usize];
        self.push(rank, index, now);
        if let Some(event) = task.trigger.filter(|e| *e != EventId::INVALID) {
            let owner = u32::from(event.owner());
            let hop = match graph.placement {
                Placement::Static => ps(self.cluster.protocol.hop_us),
                Placement::Dynamic => ps(self.cluster.protocol.dynamic_hop_us),
            };
            // Triggers and polls of flags wait for the loads that are queued before them at the memory that holds them.
            let queued = self.resources.flag_delay(owner, now);
            let seen = queued
                + if owner == rank {
                    now + hop
                } else {
                    let there = self.resources.send(Message::Put, rank, owner, now, work.put);
                    // A scheduler of the peer launches the waiting tasks.
                    if graph.placement == Placement::Dynamic { there + hop } else { there }
                };
            self.at(seen, Happening::Trigger { rank: owner, event: event.index() });
        }
        self.take(rank, worker, now, now);
        self.ask(rank, worker, now);
    }

    /// Pushes flagged words to every rank that reads them, starting with its own.
    fn push(&mut self, rank: u32, index: u32, now: Ps) {
        let Some(readers) = self.flagged.readers.get(&(rank, index)) else { return };
        let mut on: Vec<u32> = readers.iter().map(|(reader, _)| *reader).collect();
        on.dedup();
        let graph = self.ranks[rank as usize].graph;
        let task = &graph.tasks[index as usize];
        let pushed = graph.outputs(task).iter().filter(|o| {
            graph.tensors[o.tensor as usize].dtype == DType::F32Flagged && !matches!(o.place, Place::Own)
        });
        let bytes: u64 = pushed.map(|o| flagged_bytes(graph, o, self.load)).sum();
        // As in a round: each rank begins with the rank after it, so that they do not all send to rank 0 first.
        let world = self.ranks.len() as u32;
        on.sort_by_key(|to| (to + world - rank) % world);
        for to in on {
            let seen = if to == rank {
                now + ps(self.cluster.protocol.flag_us)
            } else {
                self.resources.send(Message::Flagged, rank, to, now, bytes)
            };
            let seen = seen + self.resources.flag_delay(to, now);
            self.at(seen, Happening::Pushed { rank, task: index, on: to });
        }
    }

    fn finish(self, last: Ps) -> Result<Outcome, SimulateError> {
        let mut all = 0;
        let mut stuck = Vec::new();
        for r in &self.ranks {
            for (index, state) in r.states.iter().enumerate().skip(2) {
                // A task that is in no list and that no event launches does not belong to an iteration.
                all += 1;
                if !state.done {
                    stuck.push((r.graph.rank, index as u32, r.graph.op_name(&r.graph.tasks[index])));
                }
            }
        }
        if let Some((rank, task, name)) = stuck.first() {
            let name = (*name).to_string();
            return Err(SimulateError::Stuck { left: stuck.len(), all, task: *task, rank: *rank, name });
        }
        let protocol = &self.cluster.protocol;
        let further = f64::from(self.load.active.saturating_sub(1));
        Ok(Outcome {
            iteration: last,
            between: ps(protocol.between_us + further * protocol.between_per_slot_us),
            bytes_read: self.ranks.iter().map(|r| r.bytes_read).collect(),
            records: self.ranks.into_iter().map(|r| r.records).collect(),
        })
    }
}
