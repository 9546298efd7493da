//! Where the tokens of a request go.

use crate::plan::Finish;
use std::task::Waker;

/// A new token.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: i32,
    /// Its log-probability. `None` if the plan wants none, or if no graph computes it and the token is not among the best.
    pub logprob: Option<f32>,
    /// The best tokens at this place with their log-probabilities, highest first; as many as the plan wants.
    pub logprobs: Vec<(i32, f32)>,
}

/// The end of a request.
#[derive(Clone, Debug, PartialEq)]
pub enum End {
    /// The request has ended normally.
    Finished(Finish),
    /// The run has failed.
    Lost(String),
}

/// Where the tokens of a request go. It is called on the thread that takes the tokens of all requests, so it must not wait. That
/// is the host's thread, or the [`Reader`](super::Reader)'s if there is one. [`Sink::end`] is always called on the host's thread.
/// The caller holds the lock of the results, so a sink must not ask the client for statistics or for a reader.
pub trait Sink: Send {
    /// Called before the first token with the number of prompt tokens that were not computed, because the prefix cache had them.
    fn cached(&mut self, tokens: u32);

    /// Takes the next token. Returns false if no more are wanted; the request is then cancelled.
    fn token(&mut self, token: Token) -> bool;

    /// Called after the new tokens of all requests: readers may be notified now. A reader that is woken at each token of an
    /// iteration takes the core from this thread, or from a worker, each time. Returns the waker of a reader that is a task. It is woken
    /// once the lock of the results is released, because a waker may run any code.
    fn tell(&mut self) -> Option<Waker> {
        None
    }

    /// The end: nothing follows.
    fn end(self: Box<Self>, end: End);
}
