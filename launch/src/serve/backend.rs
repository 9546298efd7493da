//! The interface between the HTTP layer and an engine.

use crate::engine::Reader;
/// How tokens are chosen: the engine's own type. The default is greedy.
pub use crate::engine::SamplingParams as Sampling;
use futures_util::Stream;
use std::pin::Pin;

/// An engine as the HTTP layer sees it: it accepts requests of token ids and returns streams of tokens.
pub trait Backend: Send + Sync + 'static {
    /// A request is about to be submitted, unless it is refused.
    fn expect(&self) {}

    /// Submits requests that start together: either all are accepted or none. Dropping a stream cancels its request.
    ///
    /// # Errors
    /// The engine accepts no requests now, or one of them can never run.
    fn submit(&self, requests: Vec<Submission>) -> Result<Vec<Events>, Refusal>;

    /// The engine's current statistics.
    fn stats(&self) -> Stats;

    /// Ids that end a sequence. Their text is left out, except with [`Submission::ignore_eos`].
    fn eos(&self) -> &[u32] {
        &[]
    }

    /// A way to take tokens from the engine in the thread that sends them to clients. Without one the engine hands them over.
    fn reader(&self) -> Option<Reader> {
        None
    }
}

/// The tokens of one request as they arrive. [`Event::End`] is the last event.
///
/// A stream that ends without it means that the engine is lost.
pub type Events = Pin<Box<dyn Stream<Item = Event> + Send>>;

/// One request, checked against [`ModelInfo`] and [`Capabilities`].
#[derive(Clone, Debug, PartialEq)]
pub struct Submission {
    /// At least one id, each in the vocabulary.
    pub prompt: Vec<u32>,
    /// Maximum number of new tokens; at least 1, and with the prompt at most [`ModelInfo::max_seq_len`].
    pub max_new_tokens: u32,
    /// An end of sequence counts only after this many new tokens.
    pub min_new_tokens: u32,
    /// Continue after an end-of-sequence token.
    pub ignore_eos: bool,
    /// Strings that end the answer. They are not part of its text.
    pub stop: Vec<String>,
    /// Further token ids that end the answer.
    pub stop_token_ids: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Return the log-probability of the chosen token and of this many of the best tokens; `None` returns none.
    pub logprobs: Option<u32>,
    /// Nobody reads the tokens one by one: the stream may yield all tokens but the first together with the end.
    pub whole: bool,
}

/// An event of a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A new token.
    Token(Token),
    /// The end: the text that was held back, the reason, and the number of prompt tokens from the prefix cache.
    End(String, Finish, u32),
}

/// A new token.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// Text that has become final: whole characters, and never part of a stop string. Often empty.
    pub text: String,
    /// Its natural log-probability, if requested.
    pub logprob: Option<f32>,
    /// The best tokens with their log-probabilities, best first.
    pub top: Vec<(u32, f32)>,
}

/// Why a request has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    /// It has `max_new_tokens` tokens.
    Length,
    /// The last token ends the sequence.
    Eos,
    /// A stop string appeared, or the last token is one of `stop_token_ids`.
    Stop,
    /// It was cancelled.
    Cancelled,
    /// It failed, for this reason.
    Error(String),
}

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The queue is full. Try again later.
    Full,
    /// The engine accepts no more requests, for this reason.
    Closed(String),
    /// This request can never run, for this reason.
    Invalid(String),
}

/// The current state of the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Requests in a slot.
    pub running: u64,
    /// Requests that wait for a slot.
    pub waiting: u64,
    /// Share of the KV cache's pages in use, from 0 to 1.
    pub kv_usage: f64,
    /// Tokens of all prompts so far, if there is a prefix cache.
    pub prefix_queries: u64,
    /// Those of them that it had.
    pub prefix_hits: u64,
    /// Number of times that a request was put back to make room.
    pub preemptions: u64,
}

/// The facts about the model that requests are checked against.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelInfo {
    /// The name that requests use.
    pub name: String,
    /// Maximum number of tokens of a request, prompt and answer together.
    pub max_seq_len: u32,
    /// Token ids are below this.
    pub vocab_size: u32,
    /// Maximum number of requests that run at once.
    pub max_batch: u32,
    /// Defaults for fields that a request leaves out.
    pub defaults: Sampling,
}

/// What the engine supports. Anything else is refused by name, never ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Temperature, top_p, top_k, min_p, seed.
    pub sampling: bool,
    /// Presence, frequency and repetition penalties.
    pub penalties: bool,
    /// `min_tokens`.
    pub min_tokens: bool,
    /// `ignore_eos` of a single request.
    pub ignore_eos: bool,
    /// Maximum number of log-probabilities per token; `None` if there are none.
    pub logprobs: Option<u32>,
}
