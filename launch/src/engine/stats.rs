//! Statistics of an engine.

use crate::engine::handle::{Ended, FinishReason};
use distributed::online;
use std::time::Duration;

/// Times of the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Start {
    /// Until the weights were in place.
    pub load: Duration,
    /// On a GPU: from the task graphs to the loaded cubin.
    pub compile: Option<Duration>,
    /// Time to load the weights.
    pub weights: Duration,
    /// Bytes of weights and constants of all ranks.
    pub weights_bytes: u64,
}

/// The current statistics of an engine, on rank 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Requests that wait for a slot.
    pub waiting: u64,
    /// Requests in slots.
    pub running: u64,
    /// Requests that have ended, by reason.
    pub finished: Finished,
    /// Prompt tokens of the requests that the kernel has received.
    pub prompt_tokens: u64,
    /// New tokens.
    pub new_tokens: u64,
    /// Launches of the kernel.
    pub launches: u64,
    /// True while the kernel runs. It may be waiting for requests.
    pub kernel_runs: bool,
    /// Time in iterations with any prompt row.
    pub prefill: Duration,
    /// Time in the other iterations, the decode steps.
    pub decode: Duration,
    /// Number of decode steps.
    pub decode_steps: u64,
    /// The part of the decode time with a full batch, in which every slot generated.
    pub full_batch: Duration,
    /// Number of steps with a full batch.
    pub full_batch_steps: u64,
    /// Pages of the KV cache.
    pub kv_pages: u32,
    /// Pages in use.
    pub kv_pages_used: u32,
    /// Number of times that a request had to give its pages back and continue later.
    pub preemptions: u64,
    /// Prompt tokens that were looked up in the prefix cache, since the start.
    pub prefix_queries: u64,
    /// Those that were found.
    pub prefix_hits: u64,
    /// Pages that the prefix cache gave up for other uses, since the start.
    pub prefix_evictions: u64,
}

impl Stats {
    pub(crate) fn new(online: &online::Stats, ended: &Ended) -> Stats {
        let figures = online.figures;
        Stats {
            waiting: online.waiting as u64,
            running: online.running as u64,
            finished: Finished::of(ended),
            prompt_tokens: online.prompt_tokens,
            new_tokens: online.tokens,
            launches: online.launches,
            kernel_runs: online.kernel_runs,
            prefill: figures.prefill,
            decode: figures.decode,
            decode_steps: figures.decode_steps,
            full_batch: figures.full,
            full_batch_steps: figures.full_steps,
            kv_pages: online.pages,
            // Before the first iteration, the batch step does not know of any pages.
            kv_pages_used: match figures.prefill_iterations + figures.decode_steps {
                0 => 0,
                _ => online.pages.saturating_sub(figures.free_pages),
            },
            preemptions: figures.preemptions,
            prefix_queries: figures.prefix_queries,
            prefix_hits: figures.prefix_hits,
            prefix_evictions: figures.evictions,
        }
    }
}

/// Number of requests that have ended, by reason.
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
        // Relaxed: these are only statistics.
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

    /// The sum over all reasons.
    pub fn total(&self) -> u64 {
        self.length + self.eos + self.stop + self.cancelled + self.error
    }
}
