//! Requests on their way to the engine's thread, and what callers can see of it.

use crate::engine::error::{Error, ErrorKind};
use crate::engine::handle::{Channel, Ended, FinishReason};
use crate::engine::request::Request;
use crate::engine::stats::Counters;
use crate::engine::user_graph::GraphRun;
use std::collections::VecDeque;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A request that waits for its turn.
pub(crate) struct Pending {
    pub id: u64,
    pub prompt: Vec<u32>,
    /// As many as there is room for.
    pub max_new_tokens: u32,
    pub request: Request,
    pub channel: Arc<Channel>,
}

/// A run of a user's own graph.
pub(crate) struct GraphJob {
    pub iterations: u32,
    pub reply: Sender<Result<GraphRun, Error>>,
}

/// What the engine's thread does next.
pub(crate) enum Next {
    /// Runs these requests, all with the same `ignore_eos`.
    Requests(Vec<Pending>),
    Graph(GraphJob),
    /// Ends, all ranks with this status.
    End(i32),
    /// There was nothing to do for a while.
    Nothing,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Pending>,
    graphs: VecDeque<GraphJob>,
    last_id: u64,
    /// Channels of the requests that run.
    running: Vec<Arc<Channel>>,
    /// The engine's thread has something in hand.
    busy: bool,
    /// It ends when there is nothing left to do, all ranks with this status.
    stopping: Option<i32>,
    /// It has ended.
    ended: Option<Result<(), Error>>,
}

/// Shared by callers and the engine's thread.
pub(crate) struct Queue {
    state: Mutex<State>,
    /// Something has come for the engine's thread.
    work: Condvar,
    /// It has become idle, or has ended.
    done: Condvar,
    most_waiting: usize,
    pub ended: Arc<Ended>,
    pub counters: Counters,
}

/// Prompt and new tokens of one launch must fit 31 bits each.
const MOST_TOKENS: u64 = i32::MAX as u64;

impl Queue {
    pub fn new(most_waiting: usize) -> Queue {
        Queue {
            state: Mutex::default(),
            work: Condvar::new(),
            done: Condvar::new(),
            most_waiting,
            ended: Arc::default(),
            counters: Counters::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts all of them into the queue or none; they get numbers in their order.
    pub fn put(&self, mut requests: Vec<Pending>) -> Result<Vec<u64>, Error> {
        let mut state = self.lock();
        state.refuses()?;
        state.waiting.retain(|pending| !pending.channel.is_over());
        if requests.len() > self.most_waiting.saturating_sub(state.waiting.len()) {
            let message = format!("{} requests wait already", state.waiting.len());
            let help = format!("try again later, or raise the limit of {}", self.most_waiting);
            return Err(Error::new(ErrorKind::Full, message).with_help(help));
        }
        for pending in &mut requests {
            state.last_id += 1;
            pending.id = state.last_id;
        }
        let ids = requests.iter().map(|pending| pending.id).collect();
        state.waiting.extend(requests);
        self.work.notify_all();
        Ok(ids)
    }

    pub fn put_graph(&self, job: GraphJob) -> Result<(), Error> {
        let mut state = self.lock();
        state.refuses()?;
        state.graphs.push_back(job);
        self.work.notify_all();
        Ok(())
    }

    /// For the engine's thread: waits for work, for no longer than `limit`.
    pub fn next(&self, limit: Duration) -> Next {
        let mut state = self.lock();
        if std::mem::take(&mut state.busy) {
            state.running.clear();
            self.done.notify_all();
        }
        let end = Instant::now() + limit;
        loop {
            state.waiting.retain(|pending| !pending.channel.is_over());
            if let Some(job) = state.graphs.pop_front() {
                state.busy = true;
                return Next::Graph(job);
            }
            if !state.waiting.is_empty() {
                return Next::Requests(state.take());
            }
            if let Some(status) = state.stopping {
                return Next::End(status);
            }
            // All that waited may have been cancelled.
            self.done.notify_all();
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Next::Nothing;
            }
            state = self.work.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Requests that wait and requests that run.
    pub fn lengths(&self) -> (usize, usize) {
        let state = self.lock();
        (state.waiting.len(), state.running.iter().filter(|channel| !channel.is_over()).count())
    }

    /// Waits until nothing waits and nothing runs.
    pub fn wait_idle(&self) {
        let mut state = self.lock();
        loop {
            state.waiting.retain(|pending| !pending.channel.is_over());
            let idle = !state.busy && state.waiting.is_empty() && state.graphs.is_empty();
            if idle || state.ended.is_some() {
                return;
            }
            state = self.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// No further request is taken; the engine's thread ends when it has done what there is.
    pub fn stop(&self, status: i32) {
        let mut state = self.lock();
        state.stopping.get_or_insert(status);
        self.work.notify_all();
    }

    /// Ends all requests, those that run too.
    pub fn cancel_all(&self) {
        let mut state = self.lock();
        let State { waiting, running, .. } = &mut *state;
        let waiting = waiting.drain(..).map(|pending| pending.channel);
        waiting.chain(running.drain(..)).for_each(|c| c.end(FinishReason::Cancelled, String::new(), None));
        self.work.notify_all();
    }

    /// The engine's thread has ended: every request that has not ended fails.
    pub fn close(&self, result: Result<(), Error>) {
        let mut state = self.lock();
        let error = result.as_ref().err().cloned();
        let error = error.unwrap_or_else(|| Error::new(ErrorKind::Stopped, "the engine has ended"));
        let State { waiting, running, graphs, .. } = &mut *state;
        let waiting = waiting.drain(..).map(|pending| pending.channel);
        for channel in waiting.chain(running.drain(..)) {
            channel.end(FinishReason::Error, String::new(), Some(error.clone()));
        }
        for job in graphs.drain(..) {
            // Who asked may be gone.
            let _ = job.reply.send(Err(error.clone()));
        }
        state.ended.get_or_insert(result);
        self.done.notify_all();
    }

    /// Waits until the engine's thread has ended, for no longer than `limit`: how it ended.
    pub fn wait_ended(&self, limit: Option<Duration>) -> Option<Result<(), Error>> {
        let end = limit.map(|limit| Instant::now() + limit);
        let mut state = self.lock();
        loop {
            if let Some(result) = &state.ended {
                return Some(result.clone());
            }
            state = match end.map(|end| end.saturating_duration_since(Instant::now())) {
                None => self.done.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(left) if left.is_zero() => return None,
                Some(left) => self.done.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }
}

impl State {
    fn refuses(&self) -> Result<(), Error> {
        match &self.ended {
            Some(Err(error)) => return Err(error.clone()),
            None if self.stopping.is_none() => return Ok(()),
            _ => {}
        }
        Err(Error::new(ErrorKind::Stopped, "the engine takes no more requests: it is shutting down"))
    }

    /// The first requests that can run in one launch.
    fn take(&mut self) -> Vec<Pending> {
        let (mut prompt, mut new) = (0, 0);
        let ignore_eos = self.waiting.front().is_some_and(|pending| pending.request.ignore_eos);
        let fits = |pending: &&Pending| {
            prompt += pending.prompt.len() as u64;
            new += u64::from(pending.max_new_tokens);
            pending.request.ignore_eos == ignore_eos && prompt <= MOST_TOKENS && new <= MOST_TOKENS
        };
        // One request alone always fits.
        let count = self.waiting.iter().take_while(fits).count().max(1);
        let taken: Vec<Pending> = self.waiting.drain(..count).collect();
        self.running = taken.iter().map(|pending| pending.channel.clone()).collect();
        self.busy = true;
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::handle::Handle;

    fn pending(queue: &Queue, ignore_eos: bool) -> (Pending, Handle) {
        let channel = Arc::new(Channel::new(queue.ended.clone()));
        let request = Request { ignore_eos, ..Request::tokens([1], 4) };
        let pending =
            Pending { id: 0, prompt: vec![1], max_new_tokens: 4, request, channel: channel.clone() };
        (pending, Handle::new(0, vec![1], channel))
    }

    fn taken(queue: &Queue) -> Vec<u64> {
        match queue.next(Duration::ZERO) {
            Next::Requests(requests) => requests.iter().map(|pending| pending.id).collect(),
            _ => Vec::new(),
        }
    }

    #[test]
    fn the_queue_has_an_end_and_all_or_none_go_in() {
        let queue = Queue::new(2);
        let (requests, handles): (Vec<_>, Vec<_>) = (0..3).map(|_| pending(&queue, false)).unzip();
        let error = queue.put(requests).unwrap_err();
        assert!(error.kind() == ErrorKind::Full && error.help().unwrap().contains('2'), "{error}");
        assert_eq!(queue.lengths(), (0, 0));
        drop(handles);
        let (two, handles): (Vec<_>, Vec<_>) = (0..2).map(|_| pending(&queue, false)).unzip();
        assert_eq!(queue.put(two).unwrap(), [1, 2]);
        let (third, kept) = pending(&queue, false);
        assert!(queue.put(vec![third]).is_err());
        // A cancelled request makes room.
        handles[0].cancel();
        let (fourth, also_kept) = pending(&queue, false);
        assert_eq!(queue.put(vec![fourth]).unwrap(), [3]);
        assert_eq!(taken(&queue), [2, 3]);
        drop((kept, also_kept));
    }

    #[test]
    fn requests_that_differ_in_their_end_run_one_after_another() {
        let queue = Queue::new(9);
        let (requests, _handles): (Vec<_>, Vec<_>) =
            [false, false, true, false].into_iter().map(|ignore| pending(&queue, ignore)).unzip();
        queue.put(requests).unwrap();
        assert_eq!([taken(&queue), taken(&queue), taken(&queue), taken(&queue)].concat(), [1, 2, 3, 4]);
        assert_eq!(queue.lengths(), (0, 0));
    }

    #[test]
    fn an_engine_that_stops_does_what_it_has_and_takes_no_more() {
        let queue = Queue::new(9);
        let (first, handle) = pending(&queue, false);
        queue.put(vec![first]).unwrap();
        queue.stop(3);
        let (second, _other) = pending(&queue, false);
        assert_eq!(queue.put(vec![second]).unwrap_err().kind(), ErrorKind::Stopped);
        assert_eq!(taken(&queue), [1]);
        assert!(matches!(queue.next(Duration::ZERO), Next::End(3)));
        queue.close(Err(Error::new(ErrorKind::Failed, "lost")));
        assert_eq!(queue.wait_ended(None).unwrap().unwrap_err().message(), "lost");
        drop(handle);
    }

    #[test]
    fn an_engine_that_fails_fails_its_requests() {
        let queue = Queue::new(9);
        let (requests, handles): (Vec<_>, Vec<_>) =
            [false, true].into_iter().map(|ignore| pending(&queue, ignore)).unzip();
        queue.put(requests).unwrap();
        assert_eq!(taken(&queue), [1]);
        queue.close(Err(Error::new(ErrorKind::Failed, "lost")));
        for handle in handles {
            let all = handle.wait();
            assert_eq!((all.reason, all.error.unwrap().message()), (FinishReason::Error, "lost"));
        }
    }
}
