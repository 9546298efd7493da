//! What a launch is asked to do.

use crate::probe::Probe;
use kernels_cu::abi;
use kernels_cu::tasks::sample_partial::MOST_LISTED;
use std::sync::Arc;
use std::time::Duration;

/// One request: a prompt and how many tokens are wanted.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Token ids; at least one.
    pub prompt: Vec<i32>,
    /// New tokens at most.
    pub max_new_tokens: u32,
    /// An end-of-sequence token ends it only after so many new tokens; [`u32::MAX`]: never.
    pub min_new_tokens: u32,
    /// How its tokens are chosen.
    pub sampling: Sampling,
    /// Its sink needs no token before the end but the first one. The others may come late, many at a time.
    pub quiet: bool,
}

/// How a request's tokens are chosen. The order: penalties, temperature, min-p, top-k, top-p, noise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by it; 0: the highest one is taken, without noise.
    pub temperature: f32,
    /// The highest logits that stay; 0: all.
    pub top_k: u32,
    /// The fewest tokens stay whose probability is at least this; 1: all.
    pub top_p: f32,
    /// Tokens stay that have at least this share of the highest probability; 0: all.
    pub min_p: f32,
    /// Logits of tokens of the prompt and of new ones are divided by it, or multiplied where below 0; 1: none.
    pub repetition_penalty: f32,
    /// Subtracted from the logit of every new token that has come.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a new token for each time that it has come.
    pub frequency_penalty: f32,
    /// Key of the noise.
    pub seed: u64,
}

impl Default for Sampling {
    /// Greedy.
    fn default() -> Self {
        Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
        }
    }
}

impl Sampling {
    /// Whether some penalty changes logits.
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Whether the token is always the one with the highest logit, as the model gives it.
    pub fn is_greedy(&self) -> bool {
        self.temperature <= 0.0 && !self.has_penalties()
    }

    /// What the kernels can't do of it, if anything.
    pub fn problem(&self) -> Option<String> {
        (self.top_k > MOST_LISTED && self.top_p < 1.0).then(|| {
            format!("{} is more than {MOST_LISTED}, the most together with a top-p below 1", self.top_k)
        })
    }

    /// As the kernels read it, for a request with this many prompt tokens.
    pub fn to_abi(&self, num_prompt_tokens: u32) -> abi::mpk_sampling {
        let noise = self.temperature > 0.0;
        let flag = |set: bool, flag: u32| if set { flag } else { 0 };
        abi::mpk_sampling {
            seed: self.seed,
            flags: flag(!self.is_greedy(), abi::MPK_SAMPLING_ON)
                | flag(noise, abi::MPK_SAMPLING_NOISE)
                | flag(self.has_penalties(), abi::MPK_SAMPLING_PENALTIES),
            top_k: self.top_k,
            inverse_temperature: if noise { (1.0 / self.temperature).min(1e6) } else { 1.0 },
            top_p: self.top_p,
            log_min_p: self.min_p.ln(),
            repetition: self.repetition_penalty,
            inverse_repetition: 1.0 / self.repetition_penalty,
            presence: self.presence_penalty,
            frequency: self.frequency_penalty,
            num_prompt_tokens,
        }
    }
}

/// What the batch step is told before the launch.
#[derive(Clone, Debug, PartialEq)]
pub struct BatchPlan {
    /// Slots.
    pub max_batch: u32,
    /// Prompt and new tokens of a request together.
    pub max_seq_len: u32,
    /// Tokens of a KV page, a power of two.
    pub page_size: u32,
    /// Pages of the pool.
    pub num_pages: u32,
    /// Log-probabilities wanted for each token.
    pub top_k: u32,
    /// End-of-sequence ids.
    pub eos: Vec<i32>,
    /// What to run.
    pub mode: Mode,
}

/// What a launch runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    /// So many iterations of graph 0, on one slot with all its rows in use: a user's own op graph.
    Fixed {
        /// How often it runs.
        iterations: u32,
        /// Tokens of its rows; the rest are 0.
        tokens: Vec<i32>,
    },
    /// Requests that come and go while the kernel runs.
    Serve(ServePlan),
}

/// What is made room for when requests come and go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServePlan {
    /// Requests that the kernel knows of at most: those in slots and those that wait for one.
    pub requests: u32,
    /// Tokens of all of them together at most, prompts and the new ones that they ask for.
    pub tokens: u32,
    /// The kernel ends after so long without work; `None`: it goes on polling.
    pub idle_exit: Option<Duration>,
    /// Prompt rows at most in an iteration that also generates; 0: as many as there is room for.
    pub prefill_rows: u32,
    /// A slot takes KV pages when it needs them, and the youngest request gives its own back where none is left. Otherwise a
    /// request gets all that it can need when it gets its slot.
    pub kv_on_demand: bool,
    /// Full pages of prompts are kept, and a later prompt that begins with the same tokens does not compute them again. A request with
    /// penalties computes its whole prompt.
    pub prefix_cache: bool,
}

impl ServePlan {
    /// For `max_batch` slots with sequences of `max_seq_len` tokens, and as many requests again that wait.
    pub fn new(max_batch: u32, max_seq_len: u32) -> ServePlan {
        ServePlan {
            requests: max_batch.saturating_mul(2),
            tokens: max_batch.saturating_mul(2).saturating_mul(max_seq_len),
            idle_exit: Some(Duration::from_secs(2)),
            prefill_rows: 0,
            kv_on_demand: false,
            prefix_cache: false,
        }
    }
}

/// A delay put into the run on purpose, to show that timing never changes a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall {
    /// Rank that is delayed.
    pub rank: u32,
    /// Operator before whose tasks worker 0 sleeps.
    pub op: u32,
    /// How long.
    pub time: Duration,
}

/// How to run it.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// A wait without progress for this long ends the run.
    pub deadline: Duration,
    /// Record every task's times.
    pub trace: bool,
    /// Debug delay.
    pub stall: Option<Stall>,
    /// Kernels beside the ordinary one, on a GPU.
    pub probe: Option<Arc<Probe>>,
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// `max_new_tokens` or `max_seq_len` was reached.
    Length,
    /// An end-of-sequence token, which is the last of the tokens.
    Eos,
    /// It was cancelled.
    Cancelled,
}

/// How the batch step stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Requests in slots.
    pub running: u32,
    /// Requests that wait for a slot.
    pub waiting: u32,
    /// KV pages that no slot has; those that the prefix cache keeps are counted too. 0 before the first iteration.
    pub free_pages: u32,
    /// Requests that had to give their pages back, ever.
    pub preemptions: u64,
    /// Prompt tokens that were looked up in the prefix cache, ever: those of all requests but the ones with penalties.
    pub prefix_queries: u64,
    /// Those of them that were found.
    pub prefix_hits: u64,
    /// Pages that the prefix cache gave up for others, ever.
    pub evictions: u64,
    /// Time in iterations with any prompt row.
    pub prefill: Duration,
    /// Time in the others.
    pub decode: Duration,
    /// Number of the first.
    pub prefill_iterations: u64,
    /// Number of the others.
    pub decode_steps: u64,
    /// Time in those decode steps in which every slot generated.
    pub full: Duration,
    /// Their number.
    pub full_steps: u64,
}
