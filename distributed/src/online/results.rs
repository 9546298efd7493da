//! The tokens of requests, from the kernel's results to their sinks: taken by rank 0's host, or by a reader (`reader.rs`).

use super::sink::{Sink, Token};
use crate::outputs::Outputs;
use crate::plan::Finish;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::task::Waker;

/// Requests that the kernel has, or is about to get.
#[derive(Default)]
pub(super) struct Results {
    /// While rank 0 serves.
    outputs: Option<Arc<Outputs>>,
    /// By number.
    active: Vec<Option<Active>>,
    /// Total number of tokens taken so far.
    pub tokens: u64,
    /// The event that a reader sleeps on.
    event: Option<RawFd>,
}

/// A request that the kernel has, or is about to get.
pub(super) struct Active {
    pub id: u64,
    pub sink: Box<dyn Sink>,
    /// The sink wants more tokens.
    wanted: bool,
    /// The entry is in this rank's ring. Before that, the words of the results belong to the previous request with this number.
    written: bool,
    cancelled: bool,
    /// All its tokens have been taken, and this was its end.
    finish: Option<Finish>,
    /// Place and number of its tokens. The prompt's come first.
    pub first: u32,
    pub room: u32,
    first_output: usize,
    taken: usize,
    logprobs: u32,
}

impl Active {
    /// A request whose tokens have `room` places from `first` on, after `prompt` of its prompt, and `logprobs` log-probabilities each.
    pub fn new(id: u64, sink: Box<dyn Sink>, first: u32, prompt: u32, room: u32, logprobs: u32) -> Active {
        let first_output = (first + prompt) as usize;
        Active {
            id,
            sink,
            wanted: true,
            written: false,
            cancelled: false,
            finish: None,
            first,
            room,
            first_output,
            taken: 0,
            logprobs,
        }
    }
}

impl Results {
    /// From now on, rank 0 serves requests with numbers below `requests`.
    pub fn begin(&mut self, outputs: &Arc<Outputs>, requests: u32) {
        outputs.set_reader(self.event);
        self.outputs = Some(Arc::clone(outputs));
        self.active = (0..requests).map(|_| None).collect();
    }

    /// Rank 0 no longer serves. The kernel has ended.
    pub fn close(&mut self) {
        self.outputs = None;
    }

    /// The event that the kernel signals for new tokens, if it can. `None`: it only rings the bell.
    pub fn set_event(&mut self, event: Option<RawFd>) {
        self.event = event;
        if let Some(outputs) = &self.outputs {
            outputs.set_reader(event);
        }
    }

    /// There is a reader.
    pub fn has_event(&self) -> bool {
        self.event.is_some()
    }

    pub fn put(&mut self, number: u32, active: Active) {
        self.active[number as usize] = Some(active);
    }

    /// The entry of the request is in this rank's ring.
    pub fn written(&mut self, number: u32) {
        if let Some(active) = &mut self.active[number as usize] {
            tracing::debug!("request {} is written for the kernel", active.id);
            active.written = true;
        }
    }

    /// True if the request is to be cancelled, and was not before.
    pub fn cancel(&mut self, number: u32) -> bool {
        self.active[number as usize]
            .as_mut()
            .is_some_and(|active| !std::mem::replace(&mut active.cancelled, true))
    }

    /// Numbers of the requests that are `chosen`.
    pub fn numbers(&self, chosen: impl Fn(&Active) -> bool) -> Vec<u32> {
        let all = (0..).zip(&self.active);
        all.filter(|(_, active)| active.as_ref().is_some_and(&chosen)).map(|(number, _)| number).collect()
    }

    /// Numbers of requests that are no longer wanted and have not been cancelled.
    pub fn unwanted(&self) -> Vec<u32> {
        self.numbers(|active| !active.wanted && !active.cancelled && active.finish.is_none())
    }

    /// Takes out the requests that have ended.
    pub fn take_ended(&mut self) -> Vec<(u32, Active, Finish)> {
        let finish = |active: &mut Option<Active>| {
            let finish = active.as_ref()?.finish?;
            Some((active.take()?, finish))
        };
        let all = (0..).zip(&mut self.active);
        all.filter_map(|(number, place)| finish(place).map(|(active, finish)| (number, active, finish)))
            .collect()
    }

    /// Takes out all requests.
    pub fn drain(&mut self) -> impl Iterator<Item = Active> {
        self.active.iter_mut().filter_map(Option::take)
    }

    pub fn is_empty(&self) -> bool {
        self.active.iter().all(Option::is_none)
    }

    /// Passes everything that the kernel has handed out to the sinks, then notifies their readers. The kernel never waits for
    /// them. Adds the wakers of readers to `wakers`; the caller wakes them after it has released the lock. Returns true if some sink
    /// wants no more tokens.
    pub fn take(&mut self, wakers: &mut Vec<Waker>) -> bool {
        let Some(outputs) = &self.outputs else { return false };
        let (before, mut unwanted) = (self.tokens, false);
        for (number, place) in (0..).zip(&mut self.active) {
            let Some(active) = place.as_mut().filter(|active| active.written) else { continue };
            let (count, finish) = outputs.progress(number);
            if active.taken == 0 && count > 0 {
                tracing::debug!("the kernel has a first token of request {}", active.id);
                active.sink.cached(outputs.cached_tokens(number));
            }
            for place in active.first_output + active.taken..active.first_output + count {
                if active.wanted {
                    let (id, logprob, logprobs) = outputs.token(place, active.logprobs);
                    active.wanted = active.sink.token(Token { id, logprob, logprobs });
                    unwanted |= !active.wanted;
                }
            }
            self.tokens += (count - active.taken) as u64;
            active.taken = count;
            active.finish = finish;
        }
        if self.tokens != before {
            wakers.extend(self.active.iter_mut().flatten().filter_map(|active| active.sink.tell()));
        }
        unwanted
    }
}
