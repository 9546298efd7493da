//! Messages between callers and the engine's thread apart from requests: runs of user graphs, and the end.

use crate::engine::error::{Error, ErrorKind};
use crate::engine::user_graph::GraphRun;
use distributed::Stop;
use std::collections::VecDeque;
use std::sync::mpsc::Sender;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A run of a user graph.
pub(crate) struct GraphJob {
    pub iterations: u32,
    pub reply: Sender<Result<GraphRun, Error>>,
}

/// What the engine's thread does next, if it runs user graphs.
pub(crate) enum Next {
    Graph(GraphJob),
    /// End with this status on all ranks.
    End(i32),
    /// Nothing was asked for within the time limit.
    Nothing,
}

#[derive(Default)]
struct State {
    graphs: VecDeque<GraphJob>,
    /// The thread ends once its work is done, with this status on all ranks.
    stopping: Option<i32>,
    /// The thread has ended, with this result.
    ended: Option<Result<(), Error>>,
}

/// Shared by callers and the engine's thread.
#[derive(Default)]
pub(crate) struct Life {
    state: Mutex<State>,
    changed: Condvar,
    /// Tells this engine's kernel to end at once. Other engines of the process go on.
    pub kernel: Stop,
}

impl Life {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn put_graph(&self, job: GraphJob) -> Result<(), Error> {
        let mut state = self.lock();
        match &state.ended {
            Some(Err(error)) => return Err(error.clone()),
            None if state.stopping.is_none() => {}
            _ => return Err(stopped()),
        }
        state.graphs.push_back(job);
        self.changed.notify_all();
        Ok(())
    }

    /// Called by the engine's thread. Waits up to `limit` for a graph or for the end.
    pub fn next(&self, limit: Duration) -> Next {
        let end = Instant::now() + limit;
        let mut state = self.lock();
        loop {
            if let Some(job) = state.graphs.pop_front() {
                return Next::Graph(job);
            }
            if let Some(status) = state.stopping {
                return Next::End(status);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Next::Nothing;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Asks the engine's thread to end once its work is done. The first status counts.
    pub fn stop(&self, status: i32) {
        self.lock().stopping.get_or_insert(status);
        self.changed.notify_all();
    }

    /// The status that [`Life::stop`] set.
    pub fn status(&self) -> i32 {
        self.lock().stopping.unwrap_or(0)
    }

    /// Records how the engine's thread ended.
    pub fn close(&self, result: Result<(), Error>) {
        let mut state = self.lock();
        let error = result.as_ref().err().cloned().unwrap_or_else(stopped);
        for job in state.graphs.drain(..) {
            // The caller may be gone.
            let _ = job.reply.send(Err(error.clone()));
        }
        state.ended.get_or_insert(result);
        self.changed.notify_all();
    }

    /// The result of the engine's thread, if it has ended.
    pub fn ended(&self) -> Option<Result<(), Error>> {
        self.lock().ended.clone()
    }

    /// Waits up to `limit` until the engine's thread has ended. Returns its result.
    pub fn wait_ended(&self, limit: Option<Duration>) -> Option<Result<(), Error>> {
        let end = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut state = self.lock();
        loop {
            if let Some(result) = &state.ended {
                return Some(result.clone());
            }
            state = match end.map(|end| end.saturating_duration_since(Instant::now())) {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(left) if left.is_zero() => return None,
                Some(left) => {
                    self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

/// The error for a request after the end.
pub(crate) fn stopped() -> Error {
    Error::new(ErrorKind::Stopped, "the engine accepts no more requests because it is shutting down")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_stopping_engine_finishes_its_work_and_accepts_no_more() {
        let life = Life::default();
        let job = |reply| GraphJob { iterations: 3, reply };
        let (reply, _answer) = mpsc::channel();
        life.put_graph(job(reply)).unwrap();
        life.stop(3);
        life.stop(0);
        let (reply, answer) = mpsc::channel();
        assert_eq!(life.put_graph(job(reply)).unwrap_err().kind(), ErrorKind::Stopped);
        assert!(answer.recv().is_err());
        assert!(matches!(life.next(Duration::ZERO), Next::Graph(GraphJob { iterations: 3, .. })));
        assert!(matches!(life.next(Duration::ZERO), Next::End(3)));
        assert!(life.wait_ended(Some(Duration::from_millis(1))).is_none());
        life.close(Err(Error::new(ErrorKind::Failed, "lost")));
        life.close(Ok(()));
        assert_eq!(life.wait_ended(None).unwrap().unwrap_err().message(), "lost");
    }

    #[test]
    fn an_engine_that_fails_fails_its_graphs() {
        let life = Life::default();
        let (reply, answer) = mpsc::channel();
        life.put_graph(GraphJob { iterations: 1, reply }).unwrap();
        life.close(Err(Error::new(ErrorKind::Failed, "lost")));
        assert_eq!(answer.recv().unwrap().unwrap_err().message(), "lost");
    }
}
