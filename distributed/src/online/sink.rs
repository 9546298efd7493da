//! Where the tokens of a request go.

use crate::plan::Finish;

/// A new token.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: i32,
    /// The best tokens at this place with their log-probabilities, highest first; as many as the plan wants.
    pub logprobs: Vec<(i32, f32)>,
}

/// The end of a request.
#[derive(Clone, Debug, PartialEq)]
pub enum End {
    /// It has come to its end.
    Finished(Finish),
    /// The run has failed.
    Lost(String),
}

/// Where the tokens of a request go. It is called on the thread that takes the tokens of all requests, so it must not wait: the
/// host's, or the [`Reader`](super::Reader)'s where there is one. [`Sink::end`] is always called on the host's. The caller holds the lock of
/// the results: a sink must not ask the client for its numbers or for a reader.
pub trait Sink: Send {
    /// Before the first token: so many tokens of the prompt were not computed, since the prefix cache had them.
    fn cached(&mut self, tokens: u32);

    /// The next token. False: no more are wanted, and the request is cancelled.
    fn token(&mut self, token: Token) -> bool;

    /// After the new tokens of all requests: readers may be woken. One that is woken at each token of an iteration takes the core from this
    /// thread, or from a worker, as often.
    fn tell(&mut self) {}

    /// The end: nothing follows.
    fn end(self: Box<Self>, end: End);
}
