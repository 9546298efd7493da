//! What the HTTP layer needs of an engine, and nothing more.

use crate::engine::Reader;
use futures_util::Stream;
use std::pin::Pin;

/// An engine as the HTTP layer sees it: it takes requests of token ids and gives streams of tokens.
pub trait Backend: Send + Sync + 'static {
    /// Hands over requests that begin together, all or none. Dropping a stream cancels its request.
    ///
    /// # Errors
    /// The engine takes none now, or one of them can never run.
    fn submit(&self, requests: Vec<Submission>) -> Result<Vec<Events>, Refusal>;

    /// What goes on at this moment.
    fn stats(&self) -> Stats;

    /// A way to take tokens from the engine in the thread that sends them to clients. Without one the engine hands them over.
    fn reader(&self) -> Option<Reader> {
        None
    }
}

/// The tokens of one request as they come; [`Event::End`] is the last.
///
/// A stream that ends without it means that the engine is lost.
pub type Events = Pin<Box<dyn Stream<Item = Event> + Send>>;

/// One request, checked against [`ModelInfo`] and [`Capabilities`].
#[derive(Clone, Debug, PartialEq)]
pub struct Submission {
    /// At least one id, each in the vocabulary.
    pub prompt: Vec<u32>,
    /// New tokens after which it ends; at least 1, and with the prompt at most [`ModelInfo::max_seq_len`].
    pub max_new_tokens: u32,
    /// No end of sequence before this many new tokens.
    pub min_new_tokens: u32,
    /// Go on after an end-of-sequence token.
    pub ignore_eos: bool,
    /// Strings that end it, and are not part of its text.
    pub stop: Vec<String>,
    /// Further ids that end it.
    pub stop_token_ids: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Log-probabilities: of the chosen token and this many of the best; `None` for none at all.
    pub logprobs: Option<u32>,
    /// Nobody reads the tokens one by one: the stream may yield all but the first one together with the end.
    pub whole: bool,
}

/// How tokens are chosen. The default is greedy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// Share of the probability that is kept, above 0 and at most 1.
    pub top_p: f32,
    /// Number of tokens that are kept; 0 keeps all.
    pub top_k: u32,
    /// Least probability relative to the best token's.
    pub min_p: f32,
    /// Makes a run repeatable; chosen by the engine if absent.
    pub seed: Option<u64>,
    /// Subtracted from logits of tokens that have occurred.
    pub presence_penalty: f32,
    /// Subtracted for each occurrence.
    pub frequency_penalty: f32,
    /// Divides positive logits of tokens that have occurred in prompt or answer; 1 changes nothing.
    pub repetition_penalty: f32,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            seed: None,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
        }
    }
}

/// What happens to a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A new token.
    Token(Token),
    /// Its end: the text that was held back, the reason, and how many tokens of the prompt came from the prefix cache.
    End(String, Finish, u32),
}

/// A new token.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// Text that is certain with it: whole characters, and never a part of a stop string. Often empty.
    pub text: String,
    /// Its natural log-probability, where that was asked for.
    pub logprob: Option<f32>,
    /// The best tokens with theirs, best first.
    pub top: Vec<(u32, f32)>,
}

/// Why a request has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    /// `max_new_tokens` have come.
    Length,
    /// The last token ends the sequence.
    Eos,
    /// A stop string has come, or the last token is one of `stop_token_ids`.
    Stop,
    /// It was cancelled.
    Cancelled,
    /// It failed, for this reason.
    Error(String),
}

/// Why a request is not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The queue is full: later.
    Full,
    /// The engine takes no more requests; the reason.
    Closed(String),
    /// This request can never run; the reason.
    Invalid(String),
}

/// What goes on in the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Requests in a slot.
    pub running: u64,
    /// Requests that wait for one.
    pub waiting: u64,
    /// Share of the KV cache's pages in use, from 0 to 1.
    pub kv_usage: f64,
    /// Prompt tokens that were looked up in the prefix cache, so far.
    pub prefix_queries: u64,
    /// Those found there.
    pub prefix_hits: u64,
    /// Requests that were put back to make room, so far.
    pub preemptions: u64,
}

/// The model, as far as requests are checked against it.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelInfo {
    /// The name that requests give.
    pub name: String,
    /// Prompt and new tokens of a request.
    pub max_seq_len: u32,
    /// Token ids are below this.
    pub vocab_size: u32,
    /// Requests that run at once.
    pub max_batch: u32,
    /// Used where a request leaves them out.
    pub defaults: Sampling,
}

/// What the engine can do. The rest is refused by name, never ignored.
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
    /// Most log-probabilities of a token; `None` where there are none at all.
    pub logprobs: Option<u32>,
}
