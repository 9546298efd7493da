//! What a launch is asked to do.

use std::time::Duration;

/// One request: a prompt and how many tokens are wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Token ids; at least one.
    pub prompt: Vec<i32>,
    /// New tokens at most.
    pub max_new_tokens: u32,
}

/// What the batch step is told before the launch.
#[derive(Clone, Debug, PartialEq, Eq)]
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
    /// End-of-sequence ids; empty where they are ignored.
    pub eos: Vec<i32>,
    /// In order of arrival.
    pub requests: Vec<Request>,
    /// What to run.
    pub mode: Mode,
}

/// What a launch runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// All requests until they are finished.
    Generate,
    /// This many iterations of graph 0, on one slot with all its rows in use: a user's own op graph. The tokens of
    /// the rows are the first request's prompt.
    Fixed(u32),
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

/// What a request has yielded so far.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestOutput {
    /// New tokens.
    pub tokens: Vec<i32>,
    /// For each new token the `top_k` best tokens with their log-probabilities, highest first.
    pub logprobs: Vec<Vec<(i32, f32)>>,
    /// Set once it has ended.
    pub finish: Option<Finish>,
}

/// Time spent inside the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timing {
    /// In iterations with any prompt row.
    pub prefill: Duration,
    /// In the others.
    pub decode: Duration,
    /// Number of the others.
    pub decode_steps: u64,
}
