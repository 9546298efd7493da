//! The interface for the other threads of rank 0's process: any thread submits and cancels requests, and their tokens go to sinks.

use super::prefix::PageKeys;
use super::results::Results;
use super::sink::{End, Sink};
use crate::bell::Bell;
use crate::plan::{BatchPlan, Figures, Mode, Request};
use kernels_cu::abi;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use taskgraph::words::counted;

/// Why a request was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// There is no room now. There will be when other requests have started.
    #[error("the queue already holds {}", counted(*.waiting, "request"))]
    Full {
        /// Requests that wait.
        waiting: usize,
    },
    /// The request can never fit.
    #[error(
        "the prompt has {}, but at most {most} leave room for a new one; use a shorter prompt, or a larger max_seq_len",
        counted(*.prompt, "token")
    )]
    TooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// The longest that is possible.
        most: usize,
    },
    /// The request asks for nothing.
    #[error("a request needs at least one token of prompt and one new token")]
    Empty,
    /// [`Client::shutdown`] was called.
    #[error("the engine accepts no more requests because it is shutting down")]
    Ending,
    /// The run has failed.
    #[error("the engine has failed: {0}")]
    Lost(String),
}

/// A request with its sink.
pub struct Submission {
    /// The request.
    pub request: Request,
    /// Where its tokens go.
    pub sink: Box<dyn Sink>,
}

/// The current statistics.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    /// Requests that wait, on the host or in the kernel.
    pub waiting: usize,
    /// Requests in slots.
    pub running: usize,
    /// Prompt tokens of the requests that the kernel has received so far.
    pub prompt_tokens: u64,
    /// New tokens so far.
    pub tokens: u64,
    /// Number of launches of the kernel.
    pub launches: u64,
    /// True while the kernel runs, even if it is parked.
    pub kernel_runs: bool,
    /// Total number of KV pages.
    pub pages: u32,
    /// Statistics of the batch step.
    pub figures: Figures,
}

/// Rank 0's handle for submitting requests. A clone is the same handle.
#[derive(Clone)]
pub struct Client(pub(super) Arc<Shared>);

/// Requests that are shared between the threads of rank 0's process.
pub(super) struct Shared {
    state: Mutex<State>,
    /// Signalled when nothing is left to do, or when serving has ended.
    idle: Condvar,
    plan: BatchPlan,
    /// `None` without a prefix cache.
    keys: Option<PageKeys>,
    /// Never locked by a thread that holds the lock of `state`.
    results: Mutex<Results>,
    /// A reader's, from the first one on.
    pub event: OnceLock<Arc<OwnedFd>>,
}

pub(super) struct State {
    pub limits: Limits,
    most_waiting: usize,
    /// In the order of their numbers.
    pub waiting: VecDeque<Waiting>,
    pub cancels: Vec<u64>,
    pub cancel_all: bool,
    last_id: u64,
    /// Accepted requests whose sinks have not received the end yet.
    pub unsettled: usize,
    /// Requests that the kernel has received and that have not ended.
    pub in_kernel: usize,
    pub ending: bool,
    lost: Option<String>,
    pub stats: Stats,
    /// The bell of the serving thread, while it serves.
    pub bell: Option<Bell>,
    /// Bells of the node's other hosts, if hosts that are woken early check without pauses until the request is there.
    pub ahead: Option<Vec<Bell>>,
}

#[derive(Clone, Copy)]
pub(super) struct Limits {
    /// Number of request numbers.
    pub requests: u32,
    /// Maximum number of tokens of a sequence.
    tokens: u32,
    /// Maximum number of tokens of all requests that have a number.
    pub all_tokens: u32,
}

/// A request that the kernel has not received yet.
pub(super) struct Waiting {
    pub id: u64,
    pub request: Request,
    /// Keys of its prompt's pages.
    pub keys: Vec<abi::mpk_page_key>,
    pub sink: Box<dyn Sink>,
}

impl Waiting {
    /// Number of places that its tokens need.
    pub fn room(&self) -> u32 {
        self.request.prompt.len() as u32 + self.request.max_new_tokens
    }
}

impl State {
    pub fn ring(&self) {
        if let Some(bell) = self.bell {
            bell.ring();
        }
    }

    /// The bells to ring early, if the engine has no request. Otherwise the next iteration takes longer than a wake-up.
    fn idle_hosts(&self) -> Option<Vec<Bell>> {
        self.ahead.clone().filter(|_| self.unsettled == 0)
    }
}

impl Shared {
    pub fn new(plan: &BatchPlan, most_waiting: usize) -> Option<Arc<Shared>> {
        let Mode::Serve(serve) = plan.mode else { return None };
        let pages = u64::from(plan.num_pages) * u64::from(plan.page_size);
        let tokens = u64::from(plan.max_seq_len).min(pages).min(u64::from(serve.tokens)) as u32;
        let state = State {
            limits: Limits { requests: serve.requests, tokens, all_tokens: serve.tokens },
            most_waiting,
            waiting: VecDeque::new(),
            cancels: Vec::new(),
            cancel_all: false,
            last_id: 0,
            unsettled: 0,
            in_kernel: 0,
            ending: false,
            lost: None,
            stats: Stats { pages: plan.num_pages, ..Stats::default() },
            bell: None,
            ahead: None,
        };
        let keys = serve.prefix_cache.then(|| PageKeys::new(plan.page_size.max(1)));
        Some(Arc::new(Shared {
            state: Mutex::new(state),
            idle: Condvar::new(),
            plan: plan.clone(),
            keys,
            results: Mutex::default(),
            event: OnceLock::new(),
        }))
    }

    pub fn client(self: &Arc<Self>) -> Client {
        Client(self.clone())
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn results(&self) -> MutexGuard<'_, Results> {
        self.results.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sinks of this many requests have received the end.
    pub fn settle(&self, count: usize) {
        let mut state = self.lock();
        state.unsettled -= count;
        if state.unsettled == 0 {
            self.idle.notify_all();
        }
    }

    /// Ends serving. Waiting requests get this reason.
    pub fn close(&self, reason: &str) {
        self.results().close();
        let mut state = self.lock();
        let reason = state.lost.get_or_insert_with(|| reason.to_string()).clone();
        state.bell = None;
        state.ahead = None;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(|waiting| waiting.sink.end(End::Lost(reason.clone())));
        self.idle.notify_all();
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("plan", &self.plan).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl Client {
    /// A request is about to be submitted. On GPUs, wakes the hosts of an idle engine now, so that the request need not wait for that.
    /// It may never come.
    pub fn expect(&self) {
        let state = self.0.lock();
        if let Some(others) = state.idle_hosts() {
            state.ring();
            drop(state);
            others.into_iter().for_each(Bell::ring);
        }
    }

    /// Accepts all of the requests or none. Returns their numbers, counted from 1. Those for which the kernel has room
    /// start together. Never waits.
    ///
    /// # Errors
    /// There is no room now or ever, or the engine is ending.
    pub fn submit(&self, mut submissions: Vec<Submission>) -> Result<Vec<u64>, SubmitError> {
        // Computed in the caller's thread, without holding the lock.
        let keys_of = |prompt: &[i32]| self.0.keys.as_ref().map_or(Vec::new(), |keys| keys.of(prompt));
        let keys: Vec<_> = submissions.iter().map(|submission| keys_of(&submission.request.prompt)).collect();
        let mut state = self.0.lock();
        if let Some(reason) = &state.lost {
            return Err(SubmitError::Lost(reason.clone()));
        }
        if state.ending {
            return Err(SubmitError::Ending);
        }
        let limit = state.limits.tokens;
        for Submission { request, .. } in &mut submissions {
            let prompt = request.prompt.len();
            if prompt == 0 || request.max_new_tokens == 0 {
                return Err(SubmitError::Empty);
            }
            if prompt >= limit as usize {
                return Err(SubmitError::TooLong { prompt, most: (limit as usize).saturating_sub(1) });
            }
            request.max_new_tokens = request.max_new_tokens.min(limit - prompt as u32);
        }
        if submissions.len() > state.most_waiting.saturating_sub(state.waiting.len()) {
            return Err(SubmitError::Full { waiting: state.waiting.len() });
        }
        let others = state.idle_hosts();
        let first = state.last_id + 1;
        state.unsettled += submissions.len();
        for (Submission { request, sink }, keys) in submissions.into_iter().zip(keys) {
            state.last_id += 1;
            let id = state.last_id;
            state.waiting.push_back(Waiting { id, request, keys, sink });
        }
        state.ring();
        let last = state.last_id;
        drop(state);
        // They wake up while rank 0's host does.
        others.into_iter().flatten().for_each(Bell::ring);
        Ok((first..=last).collect())
    }

    /// Asks for the end of the request with this number. Its sink gets the end, unless it has ended before.
    pub fn cancel(&self, id: u64) {
        let mut state = self.0.lock();
        state.cancels.push(id);
        state.ring();
    }

    /// Asks for the end of all requests.
    pub fn cancel_all(&self) {
        let mut state = self.0.lock();
        state.cancel_all = true;
        state.ring();
    }

    /// The current statistics.
    pub fn stats(&self) -> Stats {
        let tokens = self.0.results().tokens;
        let state = self.0.lock();
        let running = state.in_kernel.min(state.stats.figures.running as usize);
        let waiting = state.waiting.len() + state.in_kernel - running;
        Stats { waiting, running, tokens, ..state.stats.clone() }
    }

    /// Waits until all requests have ended. After that, the statistics include all of them.
    pub fn wait_idle(&self) {
        let mut state = self.0.lock();
        while state.unsettled > 0 && state.lost.is_none() {
            state = self.0.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Accepts no more requests. After the last one has ended, the kernel ends on all ranks, and [`crate::Rank::lead`] and
    /// [`crate::Rank::follow`] return. [`Client::cancel_all`] makes that happen soon.
    pub fn shutdown(&self) {
        let mut state = self.0.lock();
        state.ending = true;
        state.ring();
    }
}

#[cfg(test)]
mod tests {
    use super::super::sink::Token;
    use super::*;
    use crate::plan::{Sampling, ServePlan};
    use std::sync::atomic::{AtomicU32, Ordering};

    struct Nobody;

    impl Sink for Nobody {
        fn cached(&mut self, _: u32) {}

        fn token(&mut self, _: Token) -> bool {
            true
        }

        fn end(self: Box<Self>, _: End) {}
    }

    #[test]
    fn only_the_hosts_of_an_idle_engine_are_woken_early() {
        static RINGS: [AtomicU32; 2] = [AtomicU32::new(0), AtomicU32::new(0)];
        let rings = || RINGS.each_ref().map(|rings| rings.load(Ordering::Relaxed));
        let serve = ServePlan {
            requests: 4,
            tokens: 64,
            idle_exit: None,
            prefill_rows: 0,
            kv_on_demand: false,
            prefix_cache: false,
        };
        let plan = BatchPlan {
            max_batch: 2,
            max_seq_len: 16,
            page_size: 4,
            num_pages: 8,
            top_k: 0,
            eos: Vec::new(),
            mode: Mode::Serve(serve),
        };
        let shared = Shared::new(&plan, 8).expect("it serves");
        let client = shared.client();
        let submit = || {
            let request = Request {
                prompt: vec![1],
                max_new_tokens: 1,
                min_new_tokens: 0,
                sampling: Sampling::default(),
                logprobs: 0,
                quiet: false,
            };
            client.submit(vec![Submission { request, sink: Box::new(Nobody) }]).expect("there is room");
        };
        // Hosts that would only fall asleep again are not woken.
        shared.lock().bell = Some(Bell::of_hosts(&RINGS[0]));
        client.expect();
        assert_eq!(rings(), [0, 0]);
        shared.lock().ahead = Some(vec![Bell::of_hosts(&RINGS[1])]);
        client.expect();
        assert_eq!(rings(), [1, 1]);
        submit();
        assert_eq!(rings(), [2, 2]);
        // The engine is busy now: only rank 0's host has something to do.
        client.expect();
        submit();
        assert_eq!(rings(), [3, 2]);
        shared.settle(2);
        client.expect();
        assert_eq!(rings(), [4, 3]);
    }
}
