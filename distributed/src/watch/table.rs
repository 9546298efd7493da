//! The table in which the ranks of a node note where they stand: memory that all of them map.
//!
//! A word of a slot is written by the slot's rank alone, and read by all. Where a rank stands is for messages and for
//! waits of seconds, so a reader may see a slot's words of two moments, a few instructions apart.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Longest name of a phase, bytes.
const NAME_WORDS: usize = 4;

/// What a rank is doing, as far as waiting for others goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum State {
    /// Something of its own, which ends by itself.
    Works = 0,
    /// It waits for the other ranks' messages.
    Waits = 1,
    /// It is in a call of a library that all ranks make together.
    Calls = 2,
    /// It runs the kernel, which has its own watch.
    Runs = 3,
    /// It has done everything, and ends.
    Left = 4,
    /// It has given the job up.
    Ended = 5,
}

impl State {
    fn of(word: u32) -> State {
        [State::Works, State::Waits, State::Calls, State::Runs, State::Left]
            .into_iter()
            .find(|&state| state as u32 == word)
            .unwrap_or(State::Ended)
    }

    /// Waits for other ranks, and goes on only if they do.
    pub(crate) fn awaits(self) -> bool {
        matches!(self, State::Waits | State::Calls)
    }
}

/// One rank's entry, on cache lines of its own.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub(crate) struct Slot {
    /// Its process; 0: it has not come yet. Written last (release), so that who sees it (acquire) sees the rank too.
    pid: AtomicU32,
    rank: AtomicU32,
    /// Its process is one of these: process numbers of another namespace say nothing here.
    pid_namespace: AtomicU64,
    state: AtomicU32,
    /// How many times it has come to wait for the others; the same on all ranks at the same place.
    step: AtomicU64,
    /// Messages and pieces of messages that it has had.
    moves: AtomicU64,
    /// Grows as long as the process runs.
    beats: AtomicU64,
    phase: [AtomicU64; NAME_WORDS],
    /// Rung by the hosts of other ranks when there is a message for this rank's host ([`crate::online`]).
    bell: AtomicU32,
}

/// Where a rank stands, as read at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub pid: u32,
    pub pid_namespace: u64,
    pub rank: u32,
    pub state: State,
    pub step: u64,
    pub moves: u64,
    pub beats: u64,
    pub phase: String,
    /// Its node, where that is another one.
    pub node: Option<String>,
}

impl Slot {
    /// The rank comes.
    pub(crate) fn take(&self, rank: u32, pid: u32, pid_namespace: u64) {
        self.rank.store(rank, Ordering::Relaxed);
        self.pid_namespace.store(pid_namespace, Ordering::Relaxed);
        self.pid.store(pid, Ordering::Release);
    }

    pub(crate) fn bell(&self) -> &AtomicU32 {
        &self.bell
    }

    pub(crate) fn set_state(&self, state: State) {
        self.state.store(state as u32, Ordering::Relaxed);
    }

    pub(crate) fn state(&self) -> State {
        State::of(self.state.load(Ordering::Relaxed))
    }

    /// Begins the next step; gives its number.
    pub(crate) fn next_step(&self) -> u64 {
        self.step.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(crate) fn step(&self) -> u64 {
        self.step.load(Ordering::Relaxed)
    }

    pub(crate) fn moved(&self) {
        self.moves.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn beat(&self) {
        self.beats.fetch_add(1, Ordering::Relaxed);
    }

    /// Names the phase; of a longer name the beginning.
    pub(crate) fn set_phase(&self, name: &str) {
        let mut bytes = [0; NAME_WORDS * 8];
        let length = name.len().min(bytes.len());
        bytes[..length].copy_from_slice(&name.as_bytes()[..length]);
        for (word, bytes) in self.phase.iter().zip(bytes.as_chunks().0) {
            word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
        }
    }

    pub(crate) fn phase(&self) -> String {
        let bytes: Vec<u8> = self
            .phase
            .iter()
            .flat_map(|w| w.load(Ordering::Relaxed).to_ne_bytes())
            .take_while(|&b| b != 0)
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Where the rank stands; `None` where it has not come yet.
    pub(crate) fn look(&self) -> Option<Seen> {
        let pid = self.pid.load(Ordering::Acquire);
        (pid != 0).then(|| Seen {
            pid,
            pid_namespace: self.pid_namespace.load(Ordering::Relaxed),
            rank: self.rank.load(Ordering::Relaxed),
            state: self.state(),
            step: self.step(),
            moves: self.moves.load(Ordering::Relaxed),
            beats: self.beats.load(Ordering::Relaxed),
            phase: self.phase(),
            node: None,
        })
    }

    /// What it says, for other nodes.
    pub(crate) fn words(&self) -> [u64; 4 + NAME_WORDS] {
        let mut words = [
            self.state() as u64,
            self.step(),
            self.moves.load(Ordering::Relaxed),
            self.beats.load(Ordering::Relaxed),
            0,
            0,
            0,
            0,
        ];
        for (to, from) in words[4..].iter_mut().zip(&self.phase) {
            *to = from.load(Ordering::Relaxed);
        }
        words
    }

    /// What another rank's slot said; nothing, if these are not its words.
    pub(crate) fn set_words(&self, words: &[u64]) {
        let [state, step, moves, beats, phase @ ..] = words else { return };
        self.set_state(State::of(*state as u32));
        self.step.store(*step, Ordering::Relaxed);
        self.moves.store(*moves, Ordering::Relaxed);
        self.beats.store(*beats, Ordering::Relaxed);
        for (to, from) in self.phase.iter().zip(phase) {
            to.store(*from, Ordering::Relaxed);
        }
    }

    /// Takes over what `other`, this rank's slot elsewhere, says.
    pub(crate) fn copy(&self, other: &Slot) {
        self.set_state(other.state());
        self.step.store(other.step(), Ordering::Relaxed);
        self.moves.store(other.moves.load(Ordering::Relaxed), Ordering::Relaxed);
        self.beats.store(other.beats.load(Ordering::Relaxed), Ordering::Relaxed);
        for (to, from) in self.phase.iter().zip(&other.phase) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}

/// What stands before the slots.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Header {
    /// The rank that tells why the job ends, plus 1; 0: nobody yet.
    teller: AtomicU32,
}

impl Header {
    /// Whether `rank` is the one to tell why the job ends: the first that asks.
    pub(crate) fn tells(&self, rank: u32) -> bool {
        self.teller.compare_exchange(0, rank + 1, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_says_what_was_noted() {
        let (own, shared) = (Slot::default(), Slot::default());
        assert_eq!(shared.look(), None);
        own.set_phase("MPI start-up");
        own.set_state(State::Calls);
        assert_eq!((own.next_step(), own.next_step()), (1, 2));
        own.moved();
        shared.take(3, 77, 5);
        shared.copy(&own);
        let seen = shared.look().expect("the rank has come");
        assert_eq!((seen.rank, seen.pid, seen.step, seen.moves, seen.state), (3, 77, 2, 1, State::Calls));
        assert_eq!(seen.phase, "MPI start-up");
        own.set_phase("a name that is longer than there is room for it");
        assert_eq!(own.phase(), "a name that is longer than there");
        for state in [State::Works, State::Waits, State::Calls, State::Runs, State::Left, State::Ended] {
            own.set_state(state);
            assert_eq!(own.state(), state);
        }
    }
}
