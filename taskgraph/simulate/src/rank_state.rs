//! The state of a simulated rank: its tasks, events, workers and weight streams.

use crate::cluster::Worker as Limits;
use crate::edges::Flagged;
use crate::stream::{Reached, Stream};
use crate::time::Ps;
use crate::timeline::Record;
use crate::work::{Costs, Load, Work};
use std::collections::VecDeque;
use taskgraph::{EventId, Placement, Registry, TaskGraph};

/// A task's state.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct State {
    /// Number of events and pushes that it still waits for.
    pub(crate) needs: u32,
    /// Whether the last of them came from a peer.
    pub(crate) by_peer: bool,
    pub(crate) done: bool,
}

/// A worker's state.
#[derive(Debug, Default)]
pub(crate) struct Worker {
    /// Next position in its list.
    pub(crate) next: usize,
    /// Its current task, waiting or running.
    pub(crate) task: Option<u32>,
    /// Whether `Begin` is scheduled or has happened.
    pub(crate) begun: bool,
    pub(crate) running: bool,
    pub(crate) loaded: bool,
    pub(crate) using: bool,
    /// Bytes of its stream that the running task still has to use.
    pub(crate) left: u64,
    pub(crate) free: Ps,
    pub(crate) begin: Ps,
    /// The time since which it has been waiting for a piece, and its total waiting time.
    pub(crate) starved: Option<Ps>,
    pub(crate) page: Ps,
    pub(crate) stream: Stream,
}

pub(crate) struct Rank<'a> {
    pub(crate) graph: &'a TaskGraph,
    pub(crate) work: Vec<Work>,
    pub(crate) states: Vec<State>,
    /// The triggers that each event still needs, and the tasks that wait for it.
    pub(crate) events: Vec<u32>,
    pub(crate) waiters: Vec<Vec<u32>>,
    pub(crate) workers: Vec<Worker>,
    /// Dynamic placement: launched tasks, and workers without a task, each in order.
    pub(crate) queue: VecDeque<u32>,
    pub(crate) idle: VecDeque<u32>,
    pub(crate) records: Vec<Record>,
    pub(crate) bytes_read: u64,
}

impl Rank<'_> {
    /// A worker asks for the next piece of its stream, if the limits allow it: its bytes.
    pub(crate) fn ask(&mut self, worker: u32, limits: &Limits) -> Option<u64> {
        let w = &mut self.workers[worker as usize];
        let reached = match w.stream.next_task()? {
            next if w.task != Some(next) => Reached::No,
            _ if w.running => Reached::Runs,
            _ => Reached::Waits,
        };
        let bytes = w.stream.ask(limits, reached)?;
        self.bytes_read += bytes;
        Some(bytes)
    }
}

/// The rank before its first task.
pub(crate) fn rank<'a>(graph: &'a TaskGraph, registry: &Registry, load: Load, flagged: &Flagged) -> Rank<'a> {
    let costs = Costs::new(graph, registry, load);
    let mut waiters = vec![Vec::new(); graph.events.len()];
    let mut states = vec![State::default(); graph.tasks.len()];
    for (index, task) in graph.tasks.iter().enumerate().skip(2) {
        // Events of earlier iterations have happened.
        for &event in &task.dependencies {
            waiters[event as usize].push(index as u32);
        }
        states[index].needs = task.dependencies.len() as u32;
        if graph.placement == Placement::Dynamic && task.dependencies.is_empty() {
            waiters[EventId::BEGIN as usize].push(index as u32);
            states[index].needs = 1;
        }
        states[index].needs += flagged.waits.get(&(graph.rank, index as u32)).copied().unwrap_or(0);
    }
    let workers = (0..graph.workers).map(|_| Worker::default()).collect();
    Rank {
        graph,
        work: graph.tasks.iter().map(|task| costs.of(task)).collect(),
        states,
        events: graph.events.iter().map(|event| event.num_triggers).collect(),
        waiters,
        workers,
        queue: VecDeque::new(),
        idle: VecDeque::new(),
        records: Vec::with_capacity(graph.tasks.len()),
        bytes_read: 0,
    }
}
