//! States of the machine, and the steps between them.

use super::model::{Machine, Phase, Word, transition};
use std::hash::{DefaultHasher, Hash, Hasher};
use taskgraph::EventId;

pub fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// A thread of the machine: a worker's list, a launched task, or a put.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Thread {
    /// Nodes that remain.
    pub at: usize,
    end: usize,
    /// What the first of them has read.
    read: Option<(u64, Vec<u64>)>,
    /// Writes that are not yet visible to others.
    hidden: Vec<(Word, u64)>,
    put: bool,
    worker: bool,
}

#[derive(Clone)]
pub struct State {
    memory: Vec<u64>,
    counters: Vec<u32>,
    /// Current iteration of each rank.
    iteration: Vec<usize>,
    /// Dynamic: events of the rank's iteration that have launched.
    launched: Vec<Vec<bool>>,
    pub threads: Vec<Thread>,
    /// A hash of everything that tasks have read.
    seen: u64,
    /// Transitions that have happened, a bit each. The other fields determine them.
    fired: Vec<u64>,
}

impl State {
    pub fn key(&self) -> u64 {
        hash((&self.memory, &self.counters, &self.iteration, &self.threads, self.seen))
    }

    /// What the node has read, as a hash, if it has not written yet.
    pub fn read_by(&self, node: usize) -> Option<u64> {
        let thread = self.threads.iter().find(|t| t.at == node)?;
        thread.read.as_ref().map(|(hash, _)| *hash)
    }

    /// Whether all nodes have read these hashes, and no others.
    pub fn has_read(&self, hashes: &[Option<u64>]) -> bool {
        hashes.iter().flatten().fold(0, |all, hash| all ^ hash) == self.seen
    }

    pub fn has_fired(&self, transition: usize) -> bool {
        self.fired[transition / 64] >> (transition % 64) & 1 == 1
    }
}

impl Machine {
    pub(super) fn start(&self) -> State {
        let mut state = State {
            memory: vec![0; self.words],
            counters: vec![0; self.counters],
            iteration: vec![0; self.world],
            launched: vec![Vec::new(); self.world],
            threads: Vec::new(),
            seen: 0,
            fired: vec![0; (3 * self.nodes.len()).div_ceil(64)],
        };
        (0..self.world).for_each(|rank| self.begin(&mut state, rank));
        self.settle(&mut state);
        state
    }

    /// Publishes the rank's next iteration.
    fn begin(&self, state: &mut State, rank: usize) {
        let iteration = state.iteration[rank];
        let Some(&(class, _)) = self.program.get(iteration) else { return };
        state.counters[self.counter(class, rank, EventId::BEGIN)] += 1;
        state.launched[rank] = vec![false; self.launches[iteration][rank].len()];
        for list in self.lists[iteration][rank].iter().filter(|list| !list.is_empty()) {
            state.threads.push(thread(list.start, list.end, false, true));
        }
    }

    fn ready(&self, state: &State, class: usize, epoch: u32, rank: usize, on: (u32, u32)) -> bool {
        state.counters[self.counter(class, rank, on.0)] >= self.wanted(class, epoch, rank, on)
    }

    /// Steps that only count: launches and ends of iterations.
    fn settle(&self, state: &mut State) {
        loop {
            let mut moved = false;
            for rank in 0..self.world {
                let iteration = state.iteration[rank];
                let Some(&(class, epoch)) = self.program.get(iteration) else { continue };
                for (event, nodes) in self.launches[iteration][rank].iter().enumerate() {
                    let due = event as u32 != EventId::TERMINATION
                        && !state.launched[rank][event]
                        && self.ready(state, class, epoch, rank, (event as u32, 0));
                    if due {
                        state.launched[rank][event] = true;
                        state.threads.extend(nodes.clone().map(|node| thread(node, node + 1, false, false)));
                        moved = true;
                    }
                }
                let busy = state.threads.iter().any(|t| t.worker && self.nodes[t.at].rank == rank);
                if !busy && self.ready(state, class, epoch, rank, (EventId::END_OF_GRAPH, 0)) {
                    state.iteration[rank] += 1;
                    self.begin(state, rank);
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        state.threads.sort_by_key(|t| (t.at, t.put));
    }

    fn phase(&self, t: &Thread) -> Phase {
        match t.read {
            Some(_) => Phase::Write,
            None if self.step(t.at).put && !t.put => Phase::Issue,
            None => Phase::Read,
        }
    }

    /// The next transition of a thread.
    pub(super) fn next(&self, t: &Thread) -> usize {
        transition(t.at, self.phase(t))
    }

    pub(super) fn enabled(&self, state: &State, t: &Thread) -> bool {
        if t.read.is_some() || t.put {
            return true;
        }
        let node = &self.nodes[t.at];
        let (class, epoch) = self.program[node.iteration];
        let step = self.step(t.at);
        step.dependencies.iter().all(|&d| self.ready(state, class, epoch, node.rank, d))
            && step.reads.iter().filter(|(_, flagged)| *flagged > 0).all(|(w, flagged)| {
                state.memory[*w as usize] & 0xff == self.classes[class].tag(epoch, *flagged)
            })
    }

    pub(super) fn apply(&self, state: &State, index: usize, lazy: bool) -> State {
        let mut next = state.clone();
        let mut t = next.threads.swap_remove(index);
        let node = &self.nodes[t.at];
        let (class, epoch) = self.program[node.iteration];
        let step = self.step(t.at);
        let phase = self.phase(&t);
        let fired = transition(t.at, phase);
        next.fired[fired / 64] |= 1 << (fired % 64);
        match phase {
            Phase::Issue => {
                // It continues by itself.
                next.threads.push(thread(t.at, t.at + 1, true, false));
                // Its trigger publishes what its worker wrote before: the put carries it.
                publish(&mut next, &mut t);
                self.finish(&mut next, t);
            }
            Phase::Read => {
                let value = |w: Word| {
                    let own = t.hidden.iter().rev().find(|(at, _)| *at == w);
                    own.map_or(next.memory[w as usize], |(_, value)| *value)
                };
                let values: Vec<u64> = step.reads.iter().map(|(w, _)| value(*w)).collect();
                let all = hash((node.rank, node.iteration, node.task, &values));
                next.seen ^= all;
                t.read = Some((all, values));
                next.threads.push(t);
                next.threads.sort_by_key(|t| (t.at, t.put));
            }
            Phase::Write => {
                let (all, values) = t.read.take().unwrap_or_default();
                for (i, &(word, flagged)) in step.writes.iter().enumerate() {
                    let value = if step.copy { values.get(i).copied().unwrap_or(0) } else { hash((all, i)) };
                    if flagged > 0 {
                        next.memory[word as usize] = value & !0xff | self.classes[class].tag(epoch, flagged);
                    } else if lazy && !step.put {
                        t.hidden.push((word, value));
                    } else {
                        next.memory[word as usize] = value;
                    }
                }
                if let Some(counter) = self.triggered(t.at) {
                    publish(&mut next, &mut t);
                    next.counters[counter] += 1;
                }
                self.finish(&mut next, t);
            }
        }
        next
    }

    fn finish(&self, next: &mut State, mut t: Thread) {
        t.at += 1;
        if t.at == t.end {
            publish(next, &mut t);
        } else {
            next.threads.push(t);
        }
        self.settle(next);
    }

    pub(super) fn done(&self, state: &State) -> bool {
        state.threads.is_empty() && state.iteration.iter().all(|&i| i == self.program.len())
    }
}

fn thread(at: usize, end: usize, put: bool, worker: bool) -> Thread {
    Thread { at, end, read: None, hidden: Vec::new(), put, worker }
}

fn publish(next: &mut State, t: &mut Thread) {
    t.hidden.drain(..).for_each(|(w, value)| next.memory[w as usize] = value);
}
