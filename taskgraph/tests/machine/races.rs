//! Which transitions may be taken alone, without trying the others first.
//!
//! Two transitions *conflict* if both access a word and one of them writes it. A transition *races* with those that conflict with it and
//! may happen before it. Both are computed once, from the program.
//!
//! **Claim.** Let `t` be enabled in a state in which everything that races with `t` has happened. Then the executions that continue with
//! `t` reach the same final states as all executions from there.
//!
//! *Proof.* Take an execution from that state to a final one, `u1 u2 ... un`. Let `t` be `uk`, or let no `ui` be `t`. What happens before
//! `t` does not conflict with `t`: it would race with `t`, and everything that races has happened. So each of these `ui`
//!
//! 1. leaves `t` enabled. Counters only grow, so a dependency that is met stays met. A poll changes only if its word is written, which
//!    would be a conflict. No transition stops another thread.
//! 2. is enabled after `t`, for the same reasons.
//! 3. reads and writes the same with `t` before it as after it. Counters add up, and the hash of what was read does not depend on the
//!    order.
//! 4. starts and ends the same launches and iterations together with `t`, in either order, if no launch can be lost. Both wait only for
//!    counts and for workers to finish, which stay true; so each happens as soon as all of its reasons are there. Only the end of
//!    an iteration before one of its launches would undo something. If that is possible, nothing is reduced (`Races::of` is `None`).
//!
//! If no `ui` is `t`, then `t` is still enabled at the end by 1, which contradicts that the state is final. So `t` is some `uk`, and by 1 to
//! 4 it can be moved to the front, one place at a time: `t u1 ... uk-1 uk+1 ... un` is an execution with the same final state. ∎
//!
//! Each transition happens at most once, so executions are finite, and by induction all final states are found. If no enabled transition
//! can be taken alone, all of them are tried. What may happen before `t` is overestimated (`network.rs`), which costs states but hides
//! nothing.

use super::model::{Machine, Phase, Word, transition};
use std::collections::{HashMap, HashSet};

/// What a transition does to memory that other threads see.
#[derive(Clone, Default)]
struct Footprint {
    reads: Vec<Word>,
    writes: Vec<Word>,
}

/// For each transition, those that race with it: with writes that are visible at once, and with `lazy`.
pub struct Races([Vec<Vec<usize>>; 2]);

impl Races {
    /// `None` if a launch may be lost.
    pub fn of(machine: &Machine) -> Option<Races> {
        let network = machine.network();
        if network.may_lose_a_launch() {
            return None;
        }
        let conflicts = [false, true].map(|lazy| conflicts(&machine.footprints(lazy)));
        let mut races = [Vec::new(), Vec::new()];
        for t in 0..3 * machine.nodes.len() {
            let alone = conflicts.iter().all(|c| c[t].is_empty());
            let before = if alone { Vec::new() } else { network.fired_without(t) };
            for (races, conflicts) in races.iter_mut().zip(&conflicts) {
                races.push(conflicts[t].iter().copied().filter(|&u| before[u]).collect());
            }
        }
        Some(Races(races))
    }

    /// The transitions that may happen both before and after one that conflicts with them.
    pub fn unordered(&self, lazy: bool) -> impl Iterator<Item = usize> {
        let all = &self.0[usize::from(lazy)];
        (0..all.len()).filter(|&t| all[t].iter().any(|&u| all[u].contains(&t)))
    }

    pub fn with(&self, transition: usize, lazy: bool) -> &[usize] {
        &self.0[usize::from(lazy)][transition]
    }
}

/// For each footprint, the others that conflict with it.
fn conflicts(footprints: &[Footprint]) -> Vec<Vec<usize>> {
    let mut by_word: HashMap<Word, (HashSet<usize>, HashSet<usize>)> = HashMap::new();
    for (t, footprint) in footprints.iter().enumerate() {
        for &word in &footprint.reads {
            by_word.entry(word).or_default().0.insert(t);
        }
        for &word in &footprint.writes {
            by_word.entry(word).or_default().1.insert(t);
        }
    }
    let of = |(t, footprint): (usize, &Footprint)| {
        let mut found = HashSet::new();
        for word in &footprint.reads {
            found.extend(&by_word[word].1);
        }
        for word in &footprint.writes {
            found.extend(&by_word[word].0);
            found.extend(&by_word[word].1);
        }
        found.remove(&t);
        found.into_iter().collect()
    };
    footprints.iter().enumerate().map(of).collect()
}

impl Machine {
    fn footprints(&self, lazy: bool) -> Vec<Footprint> {
        let mut found = vec![Footprint::default(); 3 * self.nodes.len()];
        let threads = self.lists.iter().flatten().flatten().cloned();
        let launched = self.launches.iter().flatten().flatten();
        for list in threads.chain(launched.flat_map(|nodes| nodes.clone().map(|node| node..node + 1))) {
            // Words that the thread has written, and that others do not see yet.
            let mut hidden = Vec::new();
            let last = list.end;
            for node in list {
                let step = self.step(node);
                let [issue, read, write] =
                    [Phase::Issue, Phase::Read, Phase::Write].map(|phase| transition(node, phase));
                found[read].reads = step.reads.iter().map(|(word, _)| *word).collect();
                if step.put {
                    found[issue].reads = step.reads.iter().filter(|(_, n)| *n > 0).map(|(w, _)| *w).collect();
                    found[issue].writes = std::mem::take(&mut hidden);
                    found[write].writes = step.writes.iter().map(|(word, _)| *word).collect();
                    continue;
                }
                for &(word, flagged) in &step.writes {
                    let seen = if lazy && flagged == 0 { &mut hidden } else { &mut found[write].writes };
                    seen.push(word);
                }
                if step.trigger.is_some() || node + 1 == last {
                    found[write].writes.append(&mut hidden);
                }
            }
        }
        found
    }
}
