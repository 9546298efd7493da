//! The table in which the ranks of a node publish their states. All of them map its memory.
//!
//! Each word of a slot is written only by the slot's rank and read by all. States are used for messages and for waits of seconds,
//! so a reader may see words of two moments that are a few instructions apart.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Maximum length of the name of a phase, in words.
const NAME_WORDS: usize = 8;

/// What a rank is doing. Other ranks judge from it whether their waits can end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum State {
    /// Its own work, which ends by itself.
    Works = 0,
    /// It waits for the other ranks' messages.
    Waits = 1,
    /// It is in a call of a library that all ranks make together.
    Calls = 2,
    /// It runs the kernel, which has its own deadline.
    Runs = 3,
    /// It has finished and is ending.
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

    /// True if it waits for other ranks and continues only if they do.
    pub(crate) fn awaits(self) -> bool {
        matches!(self, State::Waits | State::Calls)
    }
}

/// One rank's entry, on its own cache lines.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub(crate) struct Slot {
    /// Its process; 0: it has not started yet. Written last (release), so that a reader who sees it (acquire) sees the rank too.
    pid: AtomicU32,
    rank: AtomicU32,
    /// The namespace of its process number. A number from another namespace means nothing here.
    pid_namespace: AtomicU64,
    state: AtomicU32,
    /// How many times it has waited for the others. At the same place, the number is the same on all ranks.
    step: AtomicU64,
    /// Number of messages, and pieces of messages, that it has sent or received.
    moves: AtomicU64,
    /// Counts up as long as the process runs.
    beats: AtomicU64,
    phase: [AtomicU64; NAME_WORDS],
    /// Rung by the hosts of other ranks if there is a message for this rank's host ([`crate::online`]).
    bell: AtomicU32,
}

/// The state of a rank, read at one moment.
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
    /// Its node, if it is another one.
    pub node: Option<String>,
}

impl Slot {
    /// The rank starts.
    pub(crate) fn take(&self, rank: u32, pid: u32, pid_namespace: u64) {
        self.rank.store(rank, Ordering::Relaxed);
        self.pid_namespace.store(pid_namespace, Ordering::Relaxed);
        self.pid.store(pid, Ordering::Release);
    }

    /// The rank, if it has started.
    pub(crate) fn rank(&self) -> Option<u32> {
        (self.pid.load(Ordering::Acquire) != 0).then(|| self.rank.load(Ordering::Relaxed))
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

    /// Starts the next step. Returns its number.
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

    /// Names the phase. A longer name is cut.
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

    /// The state of the rank; `None` if it has not started yet.
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

    /// The words that other nodes get.
    pub(crate) fn words(&self) -> [u64; 4 + NAME_WORDS] {
        let mut words = [0; 4 + NAME_WORDS];
        words[..4].copy_from_slice(&[
            self.state() as u64,
            self.step(),
            self.moves.load(Ordering::Relaxed),
            self.beats.load(Ordering::Relaxed),
        ]);
        for (to, from) in words[4..].iter_mut().zip(&self.phase) {
            *to = from.load(Ordering::Relaxed);
        }
        words
    }

    /// Sets the words that another rank sent. Ignores them if they have the wrong length.
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

    /// Copies the words of `other`, this rank's slot elsewhere.
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

/// The header before the slots.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Header {
    /// The rank that reports why the job ends, plus 1; 0 if there is none yet.
    teller: AtomicU32,
}

impl Header {
    /// True if `rank` is the one to report why the job ends: the first that asks.
    pub(crate) fn tells(&self, rank: u32) -> bool {
        self.teller.compare_exchange(0, rank + 1, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_returns_the_recorded_state() {
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
        own.set_phase(&"a name ".repeat(20));
        assert_eq!(own.phase(), "a name ".repeat(20)[..8 * NAME_WORDS]);
        for state in [State::Works, State::Waits, State::Calls, State::Runs, State::Left, State::Ended] {
            own.set_state(state);
            assert_eq!(own.state(), state);
        }
    }
}
