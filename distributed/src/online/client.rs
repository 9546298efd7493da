//! What the rest of rank 0's process sees: requests are submitted and cancelled from any thread, and yield their tokens.

use super::arena::Arena;
use crate::plan::{BatchPlan, Figures, Finish, Mode, Request};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// Why a request was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// There is no room now; there will be when another request has ended.
    #[error("all {requests} places for requests, or the room for their tokens, are taken; try again later")]
    Full {
        /// Places.
        requests: u32,
    },
    /// It can never fit.
    #[error(
        "the prompt has {prompt} tokens, but {most} are the most that leave room for a new one; use a shorter prompt, or a larger max_seq_len"
    )]
    TooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// The longest that is possible.
        most: usize,
    },
    /// There is nothing to do.
    #[error("a request needs at least one token of prompt and one new token")]
    Empty,
    /// [`Client::shutdown`] was called.
    #[error("no more requests are taken: the engine is ending")]
    Ending,
    /// The run has failed.
    #[error("the engine has failed: {0}")]
    Lost(String),
}

/// A new token.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: i32,
    /// The best tokens at this place with their log-probabilities, highest first; as many as the plan wants.
    pub logprobs: Vec<(i32, f32)>,
}

/// What a request yields.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The next token.
    Token(Token),
    /// The end: nothing follows.
    Finished(Finish),
    /// The run has failed: nothing follows.
    Lost(String),
}

/// How things stand.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    /// Requests that were taken, ever.
    pub submitted: u64,
    /// Requests that have ended, ever.
    pub ended: u64,
    /// New tokens, ever.
    pub tokens: u64,
    /// How often the kernel was started.
    pub launches: u64,
    /// The kernel runs (it may be parked).
    pub kernel_runs: bool,
    /// KV pages in all.
    pub pages: u32,
    /// The batch step's own figures.
    pub figures: Figures,
}

/// Rank 0's end for submitting requests; a copy is the same end.
#[derive(Clone, Debug)]
pub struct Client(Arc<Shared>);

/// The place of requests between the threads of rank 0's process.
#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
    /// A command has come.
    wake: Condvar,
}

#[derive(Debug)]
pub(super) struct State {
    limits: Limits,
    pub free_numbers: Vec<u32>,
    pub arena: Arena,
    pub commands: VecDeque<Command>,
    pub ending: bool,
    lost: Option<String>,
    pub stats: Stats,
}

#[derive(Clone, Copy, Debug)]
struct Limits {
    requests: u32,
    /// Tokens of a sequence.
    tokens: u32,
}

#[derive(Debug)]
pub(super) enum Command {
    Add(Add),
    Cancel(Arc<Stream>),
}

/// A request that has its place.
#[derive(Debug)]
pub(super) struct Add {
    pub number: u32,
    /// First place of its tokens.
    pub first: u32,
    pub request: Request,
    pub stream: Arc<Stream>,
}

impl Add {
    /// Places of its tokens.
    pub fn room(&self) -> u32 {
        self.request.prompt.len() as u32 + self.request.max_new_tokens
    }
}

/// From the host's thread to the holder of a [`Handle`]. It never holds more than the request's new tokens and its end, so a slow
/// reader stops nobody.
#[derive(Debug, Default)]
pub(super) struct Stream {
    state: Mutex<StreamState>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct StreamState {
    events: VecDeque<Event>,
    ended: bool,
    waker: Option<Waker>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Stream {
    pub fn push(&self, events: impl IntoIterator<Item = Event>) {
        let mut state = lock(&self.state);
        for event in events {
            state.ended |= !matches!(event, Event::Token(_));
            state.events.push_back(event);
        }
        let waker = state.waker.take();
        drop(state);
        self.wake.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Shared {
    pub fn new(plan: &BatchPlan) -> Option<Arc<Shared>> {
        let Mode::Serve(serve) = plan.mode else { return None };
        let pages = u64::from(plan.num_pages) * u64::from(plan.page_size);
        let tokens = u64::from(plan.max_seq_len).min(pages).min(u64::from(serve.tokens)) as u32;
        let state = State {
            limits: Limits { requests: serve.requests, tokens },
            free_numbers: (0..serve.requests).rev().collect(),
            arena: Arena::new(serve.tokens),
            commands: VecDeque::new(),
            ending: false,
            lost: None,
            stats: Stats { pages: plan.num_pages, ..Stats::default() },
        };
        Some(Arc::new(Shared { state: Mutex::new(state), wake: Condvar::new() }))
    }

    /// Numbers that requests may have.
    pub fn numbers(&self) -> u32 {
        self.lock().limits.requests
    }

    pub fn client(self: &Arc<Self>) -> Client {
        Client(self.clone())
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Until a command comes, at most `longest`.
    pub fn wait(&self, longest: Duration) {
        let state = self.lock();
        if state.commands.is_empty() {
            drop(self.wake.wait_timeout(state, longest));
        }
    }

    /// Nothing more is served; requests whose command was not taken yet hear of it.
    pub fn close(&self, reason: &str) {
        let mut state = self.lock();
        state.lost.get_or_insert_with(|| reason.to_string());
        for command in state.commands.drain(..) {
            if let Command::Add(add) = command {
                add.stream.push([Event::Lost(reason.to_string())]);
            }
        }
    }
}

impl Client {
    /// Takes a request, or says why not. Never waits.
    ///
    /// # Errors
    /// There is no room, now or ever, or the engine ends.
    pub fn submit(&self, mut request: Request) -> Result<Handle, SubmitError> {
        let mut state = self.0.lock();
        if let Some(reason) = &state.lost {
            return Err(SubmitError::Lost(reason.clone()));
        }
        if state.ending {
            return Err(SubmitError::Ending);
        }
        let limits = state.limits;
        let prompt = request.prompt.len();
        if prompt == 0 || request.max_new_tokens == 0 {
            return Err(SubmitError::Empty);
        }
        if prompt >= limits.tokens as usize {
            return Err(SubmitError::TooLong { prompt, most: (limits.tokens as usize).saturating_sub(1) });
        }
        request.max_new_tokens = request.max_new_tokens.min(limits.tokens - prompt as u32);
        let full = SubmitError::Full { requests: limits.requests };
        let number = state.free_numbers.last().copied().ok_or(full.clone())?;
        let first = state.arena.take(prompt as u32 + request.max_new_tokens).ok_or(full)?;
        state.free_numbers.pop();
        state.stats.submitted += 1;
        let stream = Arc::new(Stream::default());
        let handle = Handle { stream: stream.clone(), shared: self.0.clone(), ended: false };
        state.commands.push_back(Command::Add(Add { number, first, request, stream }));
        drop(state);
        self.0.wake.notify_all();
        Ok(handle)
    }

    /// How things stand.
    pub fn stats(&self) -> Stats {
        self.0.lock().stats.clone()
    }

    /// From now on no requests are taken. When the last one has ended, the kernel ends on all ranks, and with it
    /// [`crate::Rank::lead`] and [`crate::Rank::follow`]. Cancel the handles to have that soon.
    pub fn shutdown(&self) {
        self.0.lock().ending = true;
        self.0.wake.notify_all();
    }

    /// Ctrl-C or SIGTERM has come since the ranks began to serve. The second one ends the process.
    pub fn is_interrupted(&self) -> bool {
        crate::interrupt::requested()
    }
}

/// A request that was taken: its tokens as they come. Dropping it cancels the request.
#[derive(Debug)]
pub struct Handle {
    stream: Arc<Stream>,
    shared: Arc<Shared>,
    ended: bool,
}

impl Handle {
    fn taken(&mut self, event: Option<Event>) -> Option<Event> {
        self.ended |= matches!(event, Some(Event::Finished(_) | Event::Lost(_)));
        event
    }

    /// The next event if it is there. After the end there is none.
    pub fn try_next(&mut self) -> Option<Event> {
        let event = lock(&self.stream.state).events.pop_front();
        self.taken(event)
    }

    /// Waits for the next event. `None` after the end.
    pub fn wait_next(&mut self) -> Option<Event> {
        while !self.ended {
            if let Some(event) = self.next_within(Duration::from_secs(1)) {
                return Some(event);
            }
        }
        None
    }

    /// Waits for the next event, at most `longest`.
    pub fn next_within(&mut self, longest: Duration) -> Option<Event> {
        let until = Instant::now() + longest;
        let mut state = lock(&self.stream.state);
        while state.events.is_empty() && !self.ended {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.stream.wake.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let event = state.events.pop_front();
        drop(state);
        self.taken(event)
    }

    /// For asynchronous callers: as the `poll_next` of a stream. One task at a time may wait.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let mut state = lock(&self.stream.state);
        match state.events.pop_front() {
            Some(event) => {
                drop(state);
                Poll::Ready(self.taken(Some(event)))
            }
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }

    /// Asks for the request's end. Its stream ends with [`Finish::Cancelled`], unless another end came first.
    pub fn cancel(&self) {
        // A request that has ended is cancelled in vain, and one that is cancelled twice is cancelled once.
        if lock(&self.stream.state).ended {
            return;
        }
        self.shared.lock().commands.push_back(Command::Cancel(self.stream.clone()));
        self.shared.wake.notify_all();
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.ended {
            self.cancel();
        }
    }
}
