//! The work of a launch.

use crate::probe::Probe;
use kernels_cu::abi;
use kernels_cu::tasks::sample_partial::MOST_LISTED;
use std::sync::Arc;
use std::time::Duration;

/// One request: a prompt and the number of tokens to generate.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Token ids; at least one.
    pub prompt: Vec<i32>,
    /// Maximum number of new tokens.
    pub max_new_tokens: u32,
    /// An end-of-sequence token ends the request only after this many new tokens; [`u32::MAX`]: never.
    pub min_new_tokens: u32,
    /// How its tokens are chosen.
    pub sampling: Sampling,
    /// Number of highest log-probabilities to compute for each new token, at most [`BatchPlan::top_k`]. Above 0, the token's own one is
    /// computed, too.
    pub logprobs: u32,
    /// Its sink needs only the first token before the end. The others may arrive late and many at a time.
    pub quiet: bool,
}

/// How a request's tokens are chosen. Order: penalties, temperature, min-p, top-k, top-p, noise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the highest logit without noise.
    pub temperature: f32,
    /// Keep this many of the highest logits; 0 keeps all.
    pub top_k: u32,
    /// Keep the fewest tokens whose probabilities add up to at least this; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens that have at least this share of the highest probability; 0 keeps all.
    pub min_p: f32,
    /// Divides positive logits of tokens in the prompt and the answer, and multiplies negative ones; 1 changes nothing.
    pub repetition_penalty: f32,
    /// Subtracted once from the logit of every token that is in the answer.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit for each time that it is in the answer.
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
    /// True if a penalty changes logits.
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// True if the token is always the one with the model's highest logit.
    pub fn is_greedy(&self) -> bool {
        self.temperature <= 0.0 && !self.has_penalties()
    }

    /// The reason if the kernels do not support these values.
    pub fn problem(&self) -> Option<String> {
        (self.top_k > MOST_LISTED && self.top_p < 1.0).then(|| {
            format!("{} is more than {MOST_LISTED}, the maximum together with a top-p below 1", self.top_k)
        })
    }

    /// The form that the kernels read, for a request with this many prompt tokens and log-probabilities.
    pub fn to_abi(&self, num_prompt_tokens: u32, logprobs: u32) -> abi::mpk_sampling {
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
            logprobs,
            reserved: 0,
        }
    }
}

/// What the batch step needs to know before the launch.
#[derive(Clone, Debug, PartialEq)]
pub struct BatchPlan {
    /// Slots.
    pub max_batch: u32,
    /// Maximum number of tokens of a request, prompt and answer together.
    pub max_seq_len: u32,
    /// Tokens of a KV page, a power of two.
    pub page_size: u32,
    /// Pages of the pool.
    pub num_pages: u32,
    /// Maximum number of log-probabilities per token that a request can want.
    pub top_k: u32,
    /// End-of-sequence ids.
    pub eos: Vec<i32>,
    /// What to run.
    pub mode: Mode,
}

/// What a launch runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A number of iterations of graph 0 with all its rows in use: a user graph.
    Fixed {
        /// Number of iterations.
        iterations: u32,
        /// Number of rows of each sequence, which add up to the graph's rows. Each has a slot, and begins at position 0.
        sequences: Vec<u32>,
        /// Tokens of its rows. Further rows have token 0.
        tokens: Vec<i32>,
    },
    /// Requests that are added and cancelled while the kernel runs.
    Serve(ServePlan),
}

/// Capacity for requests that are added and cancelled while the kernel runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServePlan {
    /// Maximum number of requests that the kernel knows: those in slots and those that wait for one.
    pub requests: u32,
    /// Maximum number of tokens of all these requests together: prompts and requested new tokens.
    pub tokens: u32,
    /// The kernel ends after this time without work; `None`: it keeps polling.
    pub idle_exit: Option<Duration>,
    /// Maximum number of prompt rows in an iteration in which other requests generate; 0 means no limit.
    pub prefill_rows: u32,
    /// A slot takes KV pages when it needs them. If none is left, the youngest request gives its pages back. Otherwise a request gets
    /// all the pages that it may need together with its slot.
    pub kv_on_demand: bool,
    /// Keep full pages of prompts, so that a later prompt that begins with the same tokens does not compute them again. A request with
    /// penalties computes its whole prompt.
    pub prefix_cache: bool,
}

impl ServePlan {
    /// For `max_batch` slots with sequences of `max_seq_len` tokens, and as many waiting requests.
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

/// A deliberate delay, to show that timing never changes a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall {
    /// Rank that is delayed.
    pub rank: u32,
    /// Worker 0 sleeps before each task of this operator.
    pub op: u32,
    /// Length of the delay.
    pub time: Duration,
}

/// How to run it.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// A wait without progress for this long ends the run.
    pub deadline: Duration,
    /// Record the times of every task.
    pub trace: bool,
    /// Debug delay.
    pub stall: Option<Stall>,
    /// Additional kernels on a GPU.
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

/// Statistics of the batch step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Requests in slots.
    pub running: u32,
    /// Requests that wait for a slot.
    pub waiting: u32,
    /// KV pages without a slot, including those that the prefix cache keeps. 0 before the first iteration.
    pub free_pages: u32,
    /// Number of times that a request had to give its pages back.
    pub preemptions: u64,
    /// Prompt tokens that were looked up in the prefix cache, for all requests without penalties.
    pub prefix_queries: u64,
    /// Those that were found.
    pub prefix_hits: u64,
    /// Pages that the prefix cache gave up for other uses.
    pub evictions: u64,
    /// Time in iterations with any prompt row.
    pub prefill: Duration,
    /// Time in the other iterations, the decode steps.
    pub decode: Duration,
    /// Number of iterations with any prompt row.
    pub prefill_iterations: u64,
    /// Number of decode steps.
    pub decode_steps: u64,
    /// Time in those decode steps in which every slot generated.
    pub full: Duration,
    /// Number of these steps.
    pub full_steps: u64,
}
