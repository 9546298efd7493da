//! Figures of an engine.

use crate::engine::handle::{Ended, FinishReason};
use distributed::plan::Timing;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// What a start took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Start {
    /// Until the weights were in place.
    pub load: Duration,
    /// On a GPU: from the task graphs to the loaded cubin.
    pub compile: Option<Duration>,
    /// To bring the weights to their place.
    pub weights: Duration,
    /// Weights and constants of all ranks.
    pub weights_bytes: u64,
}

/// Figures of an engine, as they are now. Those of rank 0; times are known when a round has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Requests that wait.
    pub waiting: u64,
    /// Requests that run.
    pub running: u64,
    /// Requests that have ended, by reason.
    pub finished: Finished,
    /// Prompt tokens of the requests that have begun.
    pub prompt_tokens: u64,
    /// New tokens.
    pub new_tokens: u64,
    /// Launches of the kernel.
    pub rounds: u64,
    /// In iterations with any prompt row.
    pub prefill: Duration,
    /// In the others.
    pub decode: Duration,
    /// Number of the others.
    pub decode_steps: u64,
}

/// Requests that have ended, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Finished {
    /// With all their tokens.
    pub length: u64,
    /// At an end-of-sequence token.
    pub eos: u64,
    /// At a stop string or stop token.
    pub stop: u64,
    /// Cancelled.
    pub cancelled: u64,
    /// Failed.
    pub error: u64,
}

impl Finished {
    pub(crate) fn of(ended: &Ended) -> Finished {
        // Relaxed: figures.
        let count =
            |reason: FinishReason| ended.0[reason as usize].load(std::sync::atomic::Ordering::Relaxed);
        Finished {
            length: count(FinishReason::Length),
            eos: count(FinishReason::Eos),
            stop: count(FinishReason::Stop),
            cancelled: count(FinishReason::Cancelled),
            error: count(FinishReason::Error),
        }
    }

    /// All of them.
    pub fn total(&self) -> u64 {
        self.length + self.eos + self.stop + self.cancelled + self.error
    }
}

/// What the engine's thread adds up.
#[derive(Debug, Default)]
pub(crate) struct Counters(Mutex<Stats>);

impl Counters {
    /// Figures without those that the queue knows.
    pub fn now(&self) -> Stats {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn change(&self, change: impl FnOnce(&mut Stats)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub fn round(&self, timing: Timing, new_tokens: u64) {
        self.change(|stats| {
            stats.new_tokens += new_tokens;
            stats.rounds += 1;
            stats.prefill += timing.prefill;
            stats.decode += timing.decode;
            stats.decode_steps += timing.decode_steps;
        });
    }
}
