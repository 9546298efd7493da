//! The answer to a request: a stream of tokens that ends with a reason.

use crate::engine::error::Error;
use distributed::online::Client;
use futures_core::Stream;
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// A wait without a limit looks again after this time.
const LONG: Duration = Duration::from_secs(3600);

/// A new token.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// The text that has become final with this token. It is often empty, because a character may span tokens and a stop string
    /// may have begun.
    pub text: String,
    /// Its natural log-probability, if the request asked for log-probabilities: of the model's own distribution, before penalties,
    /// temperature and filters. `None` too if your own model family does not compute it and the token is not among the highest.
    pub logprob: Option<f32>,
    /// The tokens with the highest log-probabilities, highest first, as many as requested.
    pub logprobs: Vec<(u32, f32)>,
}

/// Why a request has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// It has as many tokens as requested, or as there is room for.
    Length,
    /// The last token ends the sequence.
    Eos,
    /// A stop string appeared, or the last token is one of `stop_token_ids`.
    Stop,
    /// It was cancelled.
    Cancelled,
    /// The engine failed; see [`End::error`].
    Error,
}

impl FinishReason {
    /// Its name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            FinishReason::Length => "length",
            FinishReason::Eos => "eos",
            FinishReason::Stop => "stop",
            FinishReason::Cancelled => "cancelled",
            FinishReason::Error => "error",
        }
    }
}

/// The end of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct End {
    /// Why it has ended.
    pub reason: FinishReason,
    /// Text that was held back and is final now.
    pub text: String,
    /// Prompt tokens that were not computed because the prefix cache had them.
    pub cached_tokens: u32,
    /// With [`FinishReason::Error`]: the error.
    pub error: Option<Error>,
}

/// What a [`Handle`] yields.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A new token.
    Token(Token),
    /// The end, always the last event.
    End(End),
}

/// Everything that a request yielded.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// New tokens.
    pub tokens: Vec<u32>,
    /// The text of the tokens; empty without a tokenizer.
    pub text: String,
    /// The log-probability of each token ([`Token::logprob`]), if requested.
    pub token_logprobs: Vec<Option<f32>>,
    /// For each token, the tokens with the highest log-probabilities, if requested.
    pub logprobs: Vec<Vec<(u32, f32)>>,
    /// Why it has ended.
    pub reason: FinishReason,
    /// Prompt tokens that were not computed because the prefix cache had them.
    pub cached_tokens: u32,
    /// With [`FinishReason::Error`]: the error.
    pub error: Option<Error>,
}

/// The stream of tokens that answers a request.
///
/// It can be read from any thread: with [`recv`](Handle::recv) or as an iterator, which block, or as a `futures` stream, which
/// does not. It need not be read at all: it holds at most the requested number of tokens. Dropping it cancels the request.
#[derive(Debug)]
pub struct Handle {
    id: u64,
    prompt_tokens: Vec<u32>,
    channel: Arc<Channel>,
    /// Receives the cancel.
    client: Option<Client>,
}

impl Handle {
    pub(crate) fn new(
        id: u64,
        prompt_tokens: Vec<u32>,
        channel: Arc<Channel>,
        client: Option<Client>,
    ) -> Handle {
        Handle { id, prompt_tokens, channel, client }
    }

    /// The request's number, from 1.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The prompt as token ids.
    pub fn prompt_tokens(&self) -> &[u32] {
        &self.prompt_tokens
    }

    /// Waits for the next event. Returns `None` after the end.
    pub fn recv(&self) -> Option<Event> {
        let mut state = self.channel.lock();
        loop {
            match state.next() {
                Poll::Ready(event) => return event,
                Poll::Pending => {
                    state.readers += 1;
                    state = self.channel.ready.wait(state).unwrap_or_else(PoisonError::into_inner);
                    state.readers -= 1;
                }
            }
        }
    }

    /// Like [`Handle::recv`], but waits no longer than `limit`. Returns [`Poll::Pending`] if no event has arrived by then.
    pub fn recv_timeout(&self, limit: Duration) -> Poll<Option<Event>> {
        // `None`: never.
        let end = Instant::now().checked_add(limit);
        let mut state = self.channel.lock();
        loop {
            let next = state.next();
            let left = end.map_or(LONG, |end| end.saturating_duration_since(Instant::now()));
            if next.is_ready() || left.is_zero() {
                return next;
            }
            state.readers += 1;
            state = self.channel.ready.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            state.readers -= 1;
        }
    }

    /// The next event, if there is one already.
    pub fn try_recv(&self) -> Poll<Option<Event>> {
        self.channel.lock().next()
    }

    /// Cancels the request: no further token arrives, and its slot is free one iteration later. Tokens that have arrived can still
    /// be read.
    pub fn cancel(&self) {
        if self.channel.end_quietly(FinishReason::Cancelled, String::new(), None) {
            self.channel.wake();
            if let Some(client) = &self.client {
                client.cancel(self.id);
            }
        }
    }

    /// Waits for the end and returns everything that has not been read yet.
    pub fn wait(self) -> Completion {
        let mut all = Completion {
            tokens: Vec::new(),
            text: String::new(),
            token_logprobs: Vec::new(),
            logprobs: Vec::new(),
            reason: FinishReason::Cancelled,
            cached_tokens: 0,
            error: None,
        };
        while let Some(event) = self.recv() {
            match event {
                Event::Token(token) => {
                    all.tokens.push(token.id);
                    all.text.push_str(&token.text);
                    if !token.logprobs.is_empty() {
                        all.token_logprobs.push(token.logprob);
                        all.logprobs.push(token.logprobs);
                    }
                }
                Event::End(end) => {
                    all.text.push_str(&end.text);
                    (all.reason, all.cached_tokens, all.error) = (end.reason, end.cached_tokens, end.error);
                }
            }
        }
        all
    }
}

impl Iterator for Handle {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        self.recv()
    }
}

impl Stream for Handle {
    type Item = Event;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Event>> {
        let mut state = self.channel.lock();
        let next = state.next();
        if next.is_pending() && !state.waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
            let old = state.waker.replace(context.waker().clone());
            // The end of a waker may run any code, so the lock is released first.
            drop(state);
            drop(old);
        }
        next
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.cancel();
        let mut state = self.channel.lock();
        let (events, waker) = (std::mem::take(&mut state.events), state.waker.take());
        drop(state);
        // Outside the lock, as in `poll_next`.
        drop((events, waker));
    }
}

/// The events on their way to a [`Handle`].
#[derive(Debug)]
pub(crate) struct Channel {
    state: Mutex<State>,
    ready: Condvar,
    counters: Arc<Ended>,
    /// [`crate::engine::Request::whole`].
    whole: bool,
}

/// Number of requests that have ended, by reason.
#[derive(Debug, Default)]
pub(crate) struct Ended(pub [AtomicU64; 5]);

#[derive(Debug, Default)]
struct State {
    events: VecDeque<Event>,
    /// Prompt tokens from the prefix cache.
    cached_tokens: u32,
    /// The end is among the events; nothing follows it.
    over: bool,
    /// The first token has arrived.
    begun: bool,
    waker: Option<Waker>,
    /// Threads that wait in [`Handle::recv`]. A notification without a waiting thread would still cost a system call per token.
    readers: usize,
}

impl State {
    fn next(&mut self) -> Poll<Option<Event>> {
        match self.events.pop_front() {
            Some(event) => Poll::Ready(Some(event)),
            None if self.over => Poll::Ready(None),
            None => Poll::Pending,
        }
    }
}

impl Channel {
    pub fn new(counters: Arc<Ended>, whole: bool) -> Channel {
        Channel { state: Mutex::default(), ready: Condvar::new(), counters, whole }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if no more events are wanted, or none will arrive.
    pub fn is_over(&self) -> bool {
        self.lock().over
    }

    /// Sets the number of prompt tokens that came from the prefix cache. Called before the end.
    pub fn cached(&self, tokens: u32) {
        self.lock().cached_tokens = tokens;
    }

    /// Adds a token. Returns true if the reader must be notified ([`Channel::tell`]).
    #[must_use]
    pub fn token(&self, token: Token) -> bool {
        let mut state = self.lock();
        if state.over {
            return false;
        }
        state.events.push_back(Event::Token(token));
        let first = !std::mem::replace(&mut state.begun, true);
        first || !self.whole
    }

    /// Notifies threads that wait for an event. Returns the waker of a task that waits. The caller wakes it while it holds no lock,
    /// because a waker may run any code.
    #[must_use]
    pub fn tell(&self) -> Option<Waker> {
        let mut state = self.lock();
        let (waker, readers) = (state.waker.take(), state.readers);
        drop(state);
        if readers > 0 {
            self.ready.notify_all();
        }
        waker
    }

    /// Notifies all readers. The caller holds no lock.
    pub fn wake(&self) {
        if let Some(waker) = self.tell() {
            waker.wake();
        }
    }

    /// Ends the request. Only the first end counts. Returns true if this was the first: then the reader must be notified.
    #[must_use]
    pub fn end_quietly(&self, reason: FinishReason, text: String, error: Option<Error>) -> bool {
        let mut state = self.lock();
        let first = !state.over;
        if first {
            state.over = true;
            // Counted before a reader can see the end. Relaxed: the lock orders it.
            self.counters.0[reason as usize].fetch_add(1, Ordering::Relaxed);
            let cached_tokens = state.cached_tokens;
            state.events.push_back(Event::End(End { reason, text, cached_tokens, error }));
        }
        first
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;

    fn pair() -> (Handle, Arc<Channel>) {
        let channel = Arc::new(Channel::new(Arc::default(), false));
        (Handle::new(1, vec![7], channel.clone(), None), channel)
    }

    fn token(id: u32, text: &str) -> Token {
        Token { id, text: text.into(), ..Token::default() }
    }

    fn put(channel: &Channel, token: Token) {
        if channel.token(token) {
            channel.wake();
        }
    }

    fn end(channel: &Channel, reason: FinishReason, text: &str) {
        if channel.end_quietly(reason, text.into(), None) {
            channel.wake();
        }
    }

    #[test]
    fn tokens_come_in_order_and_end_once() {
        let (handle, channel) = pair();
        let writer = std::thread::spawn(move || {
            put(&channel, token(1, "a"));
            put(&channel, token(2, "b"));
            end(&channel, FinishReason::Eos, "c");
            put(&channel, token(3, "never"));
            end(&channel, FinishReason::Length, "never");
        });
        let all = handle.wait();
        writer.join().unwrap();
        assert_eq!((all.tokens, all.text.as_str(), all.reason), (vec![1, 2], "abc", FinishReason::Eos));
    }

    #[test]
    fn a_cancelled_request_keeps_its_tokens() {
        let (handle, channel) = pair();
        put(&channel, token(1, "a"));
        handle.cancel();
        assert!(channel.is_over());
        put(&channel, token(2, "b"));
        let all = handle.wait();
        assert_eq!((all.tokens, all.reason), (vec![1], FinishReason::Cancelled));
    }

    #[test]
    fn a_dropped_handle_cancels_and_holds_nothing() {
        let (handle, channel) = pair();
        put(&channel, token(1, "a"));
        drop(handle);
        put(&channel, token(2, "b"));
        assert!(channel.is_over() && channel.lock().events.is_empty());
    }

    #[test]
    fn waits_end_in_time() {
        let (handle, channel) = pair();
        assert!(handle.try_recv().is_pending());
        assert!(handle.recv_timeout(Duration::from_millis(5)).is_pending());
        put(&channel, token(1, "a"));
        assert_eq!(
            handle.recv_timeout(Duration::from_secs(9)),
            Poll::Ready(Some(Event::Token(token(1, "a"))))
        );
        put(&channel, token(2, "b"));
        assert_eq!(handle.recv_timeout(Duration::MAX), Poll::Ready(Some(Event::Token(token(2, "b")))));
    }

    struct Count(AtomicUsize);
    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_whole_answer_wakes_its_reader_by_its_first_token_and_its_end() {
        let channel = Arc::new(Channel::new(Arc::default(), true));
        let mut handle = Handle::new(1, vec![7], channel.clone(), None);
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(count.clone());
        let mut next = move || Pin::new(&mut handle).poll_next(&mut Context::from_waker(&waker));
        assert!(next().is_pending());
        put(&channel, token(1, "a"));
        assert_eq!(
            (count.0.load(Ordering::Relaxed), next()),
            (1, Poll::Ready(Some(Event::Token(token(1, "a")))))
        );
        assert!(next().is_pending());
        put(&channel, token(2, "b"));
        put(&channel, token(3, "c"));
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        end(&channel, FinishReason::Length, "");
        assert_eq!(count.0.load(Ordering::Relaxed), 2);
        assert_eq!(next(), Poll::Ready(Some(Event::Token(token(2, "b")))));
        assert_eq!(next(), Poll::Ready(Some(Event::Token(token(3, "c")))));
        assert!(matches!(next(), Poll::Ready(Some(Event::End(_)))));
    }

    /// A waker that looks at the channel when it wakes and when it ends, as the one of a task may that owns other handles.
    struct Curious(Arc<Channel>, Arc<AtomicUsize>);
    impl Curious {
        fn look(&self) {
            // Waits forever if the caller holds the lock of the channel.
            self.0.is_over();
            self.1.fetch_add(1, Ordering::Relaxed);
        }
    }
    impl Wake for Curious {
        fn wake(self: Arc<Self>) {
            self.look();
        }
    }
    impl Drop for Curious {
        fn drop(&mut self) {
            self.look();
        }
    }

    #[test]
    fn wakers_run_without_the_lock_of_the_channel() {
        let (mut handle, channel) = pair();
        let looks = Arc::new(AtomicUsize::new(0));
        let poll = |handle: &mut Handle| {
            let waker = Waker::from(Arc::new(Curious(channel.clone(), looks.clone())));
            assert!(Pin::new(handle).poll_next(&mut Context::from_waker(&waker)).is_pending());
        };
        poll(&mut handle);
        // The second waker replaces the first, which ends.
        poll(&mut handle);
        assert_eq!(looks.load(Ordering::Relaxed), 1);
        // The second one wakes, and ends.
        drop(handle);
        assert_eq!(looks.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn a_task_that_waits_is_woken() {
        let (mut handle, channel) = pair();
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(count.clone());
        let mut context = Context::from_waker(&waker);
        assert!(Pin::new(&mut handle).poll_next(&mut context).is_pending());
        end(&channel, FinishReason::Length, "");
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        assert!(matches!(Pin::new(&mut handle).poll_next(&mut context), Poll::Ready(Some(Event::End(_)))));
        assert_eq!(Pin::new(&mut handle).poll_next(&mut context), Poll::Ready(None));
    }
}
