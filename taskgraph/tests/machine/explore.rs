//! All executions of a program.

use super::execution::State;
use super::model::{Machine, Phase, transition};
use super::races::Races;
use std::collections::{BTreeSet, HashSet};
use std::ops::ControlFlow;

/// Result of an exploration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All executions gave the same values; the number of states explored, and whether these are all.
    Same { states: usize, all: bool },
    /// A task has read something else in one execution than in another.
    Differs,
    /// An execution could not continue.
    Stuck,
}

/// How a search ended.
enum Search {
    /// The number of states.
    Complete(usize),
    TooManyStates,
    Stopped,
}

/// What a search comes upon.
enum Seen<'a> {
    /// A node, and a hash of what it has read.
    Read(usize, u64),
    /// A final state.
    End(&'a State),
}

impl Machine {
    /// Explores all executions, up to `most` states. A transition that races with nothing is taken alone (`races.rs`).
    pub fn explore(&self, most: usize) -> Outcome {
        let races = Races::of(self);
        self.outcome(most, races.as_ref(), true)
    }

    /// The same with every order of all transitions.
    pub fn explore_unreduced(&self, most: usize) -> Outcome {
        self.outcome(most, None, false)
    }

    /// `hurry`: looks for differences at once where the order may matter, before it tries all orders.
    fn outcome(&self, most: usize, races: Option<&Races>, hurry: bool) -> Outcome {
        let mut wanted = vec![None; self.nodes.len()];
        if let Some(bad) = self.execute(None, false, &mut wanted) {
            return bad;
        }
        for lazy in [false, true].into_iter().filter(|_| hurry) {
            let writes = || (0..self.nodes.len()).map(|node| transition(node, Phase::Write)).collect();
            let slow: Vec<usize> = races.map_or_else(writes, |races| races.unordered(lazy).collect());
            for t in slow {
                if let Some(bad) = self.execute(Some(t), lazy, &mut wanted) {
                    return bad;
                }
            }
        }
        let mut total = 0;
        for lazy in [false, true] {
            let mut bad = None;
            let found = self.search(lazy, races, most, |seen| {
                match seen {
                    Seen::Read(node, hash) if wanted[node] != Some(hash) => bad = Some(Outcome::Differs),
                    Seen::End(state) if !self.done(state) => bad = Some(Outcome::Stuck),
                    // A task that was executed then and not now has read something else too.
                    Seen::End(state) if !state.has_read(&wanted) => bad = Some(Outcome::Differs),
                    _ => {}
                }
                if bad.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            match (bad, found) {
                (Some(bad), _) => return bad,
                (None, Search::Complete(states)) => total += states,
                (None, _) => return Outcome::Same { states: total + most, all: false },
            }
        }
        Outcome::Same { states: total, all: true }
    }

    /// One execution, in which `slow` happens only if nothing else can. Notes what each node reads, or says that it has read something
    /// else before.
    fn execute(&self, slow: Option<usize>, lazy: bool, reads: &mut [Option<u64>]) -> Option<Outcome> {
        let mut state = self.start();
        loop {
            let moves: Vec<usize> =
                (0..state.threads.len()).filter(|&i| self.enabled(&state, &state.threads[i])).collect();
            let quick = moves.iter().find(|&&i| Some(self.next(&state.threads[i])) != slow);
            let Some(&index) = quick.or(moves.first()) else { break };
            let node = state.threads[index].at;
            let reading = self.next(&state.threads[index]) == transition(node, Phase::Read);
            state = self.apply(&state, index, lazy);
            if let Some(hash) = state.read_by(node).filter(|_| reading)
                && *reads[node].get_or_insert(hash) != hash
            {
                return Some(Outcome::Differs);
            }
        }
        (!self.done(&state)).then_some(Outcome::Stuck)
    }

    /// Whether [`Machine::explore`] takes any transition alone.
    pub fn is_reduced(&self) -> bool {
        Races::of(self).is_some()
    }

    /// The final states of all executions; `None` if there are too many states. And the number of states.
    pub fn ends(&self, reduced: bool, most: usize) -> Option<([BTreeSet<u64>; 2], usize)> {
        let races = if reduced { Races::of(self) } else { None };
        let mut total = 0;
        let mut ends = [BTreeSet::new(), BTreeSet::new()];
        for lazy in [false, true] {
            let found = self.search(lazy, races.as_ref(), most, |seen| {
                if let Seen::End(state) = seen {
                    ends[usize::from(lazy)].insert(state.key());
                }
                ControlFlow::Continue(())
            });
            let Search::Complete(states) = found else { return None };
            total += states;
        }
        Some((ends, total))
    }

    fn search(
        &self,
        lazy: bool,
        races: Option<&Races>,
        most: usize,
        mut see: impl FnMut(Seen<'_>) -> ControlFlow<()>,
    ) -> Search {
        let start = self.start();
        let mut known = HashSet::from([start.key()]);
        let mut open = vec![start];
        while let Some(state) = open.pop() {
            let mut moves: Vec<usize> =
                (0..state.threads.len()).filter(|&i| self.enabled(&state, &state.threads[i])).collect();
            if moves.is_empty() && see(Seen::End(&state)).is_break() {
                return Search::Stopped;
            }
            if let Some(races) = races {
                let alone = |&i: &usize| {
                    let racing = races.with(self.next(&state.threads[i]), lazy);
                    racing.iter().all(|&u| state.has_fired(u))
                };
                if let Some(one) = moves.iter().copied().find(alone) {
                    moves = vec![one];
                }
            }
            for index in moves {
                let node = state.threads[index].at;
                let reads = self.next(&state.threads[index]) == transition(node, Phase::Read);
                let next = self.apply(&state, index, lazy);
                if reads
                    && let Some(hash) = next.read_by(node)
                    && see(Seen::Read(node, hash)).is_break()
                {
                    return Search::Stopped;
                }
                if known.insert(next.key()) {
                    open.push(next);
                }
            }
            if known.len() > most {
                return Search::TooManyStates;
            }
        }
        Search::Complete(known.len())
    }
}
