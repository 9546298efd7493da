//! The launch: one thread for each worker and scheduler, while the host watches.

use crate::affinity::bind;
use crate::error::{Error, Result};
use crate::plan::{Finish, RequestOutput, Timing};
use crate::rank::CpuRank;
use crate::report::report;
use crate::world::World;
use kernels_cu::abi;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

/// Set by the SIGINT and SIGTERM handler.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn on_interrupt(_signal: libc::c_int) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// How often the host looks at outputs and signals. It sleeps in between, so as not to take a worker's core.
const LOOK: Duration = Duration::from_millis(2);

/// An `mpk_rank` that the loops share.
#[derive(Clone, Copy)]
struct Shared(*mut abi::mpk_rank);
// SAFETY: the protocol orders all access to what the struct points to; the struct itself is constant in a run.
unsafe impl Send for Shared {}

impl CpuRank {
    /// Collective: runs the graphs until the batch step says stop. `look` is called now and then on the calling
    /// thread, and once at the end, to follow the outputs. Ends within the deadline in any case; an early end is
    /// an [`Error::Aborted`] with this rank's report.
    pub fn run(&mut self, world: &World, mut look: impl FnMut(&CpuRank)) -> Result<()> {
        // SAFETY: the handler only stores to an atomic.
        unsafe {
            let handler = on_interrupt as extern "C" fn(libc::c_int) as libc::sighandler_t;
            libc::signal(libc::SIGINT, handler);
            libc::signal(libc::SIGTERM, handler);
        }
        let shared = Shared(self.rank.as_ptr());
        // SAFETY: the rank is complete and no loop runs yet.
        let code = unsafe { abi::mpk_cpu_begin(shared.0) };
        if code != 0 {
            self.abort(code as u32);
        }
        // Every rank's memory is set up before the first put.
        world.barrier();
        let (workers, schedulers) =
            (self.header().num_workers as usize, self.header().num_schedulers as usize);
        let mut handles = Vec::new();
        for index in 0..workers + schedulers {
            let core = self.cores.own[index % self.cores.own.len()];
            let body = move || {
                let shared = shared;
                bind(&[core]);
                // SAFETY: the rank outlives the thread (joined below); each index runs once.
                unsafe {
                    if index < workers {
                        abi::mpk_cpu_worker(shared.0, index as u32);
                    } else {
                        abi::mpk_cpu_scheduler(shared.0, (index - workers) as u32);
                    }
                }
            };
            let name = if index < workers { format!("worker {index}") } else { "scheduler".to_string() };
            match std::thread::Builder::new().name(name.clone()).spawn(body) {
                Ok(handle) => handles.push(handle),
                Err(error) => {
                    self.abort(abi::MPK_ABORT_KERNEL);
                    handles.into_iter().for_each(|h: std::thread::JoinHandle<()>| drop(h.join()));
                    return Err(Error::Thread { rank: world.rank(), what: name, reason: error.to_string() });
                }
            }
        }
        while !handles.iter().all(|h| h.is_finished()) {
            std::thread::sleep(LOOK);
            look(self);
            if INTERRUPTED.load(Ordering::Relaxed) {
                self.abort(abi::MPK_ABORT_INTERRUPT);
            }
        }
        for handle in handles {
            if handle.join().is_err() {
                self.abort(abi::MPK_ABORT_KERNEL);
            }
        }
        look(self);
        let (code, first) = self.abort_state();
        if code != 0 {
            let text = report(world.rank(), code, first, &self.graphs, &self.statuses, workers as u32);
            return Err(Error::Aborted(text));
        }
        Ok(())
    }

    fn abort(&self, code: u32) {
        // SAFETY: the rank is live; the call only sets abort words, atomically.
        unsafe { abi::mpk_cpu_abort(self.rank.as_ptr(), code) };
    }

    /// The arrays of request outputs and tokens; the pointers themselves never change.
    fn output_arrays(&self) -> (*mut abi::mpk_request_output, *mut i32) {
        let output = self.batch_output.as_ptr();
        // SAFETY: live as long as `self`; reads two fields that nobody writes, without a reference to the others.
        unsafe { ((*output).requests, (*output).tokens) }
    }

    fn abort_state(&self) -> (u32, u32) {
        // SAFETY: the control block lies in the live heap; both words are only ever accessed atomically.
        unsafe {
            let control = self.header().control;
            let code = AtomicU32::from_ptr(&raw mut (*control).abort).load(Ordering::Acquire);
            (code, AtomicU32::from_ptr(&raw mut (*control).abort_rank).load(Ordering::Relaxed))
        }
    }

    /// Tokens that request `index` has yielded so far, from number `from` on, and why it ended if it has.
    pub fn tokens(&self, index: usize, from: usize) -> (&[i32], Option<Finish>) {
        // SAFETY: `index` is checked against the plan below; the array has an entry for each request. The kernel
        // releases `finish` after `num_tokens` after the tokens: read in the opposite order with acquire.
        unsafe {
            assert!(index < self.plan.requests.len());
            let (requests, tokens) = self.output_arrays();
            let output = requests.add(index);
            let finish = AtomicU32::from_ptr(&raw mut (*output).finish).load(Ordering::Acquire);
            let count = AtomicU32::from_ptr(&raw mut (*output).num_tokens).load(Ordering::Acquire) as usize;
            let first = tokens.add(self.first_output[index]);
            let finish = match finish {
                abi::MPK_FINISH_LENGTH => Some(Finish::Length),
                abi::MPK_FINISH_EOS => Some(Finish::Eos),
                abi::MPK_FINISH_CANCELLED => Some(Finish::Cancelled),
                _ => None,
            };
            let from = from.min(count);
            (std::slice::from_raw_parts(first.add(from), count - from), finish)
        }
    }

    /// Everything that request `index` has yielded.
    pub fn request_output(&self, index: usize) -> RequestOutput {
        let (tokens, finish) = self.tokens(index, 0);
        let top = self.plan.top_k as usize;
        let at = self.first_output[index] * top;
        let pair = |step: usize, k: usize| {
            // SAFETY: released by the kernel together with token `step`, whose count was acquired above.
            unsafe {
                let place = at + step * top + k;
                let output = self.batch_output.as_ptr();
                (*(*output).top_tokens.add(place), *(*output).top_logprobs.add(place))
            }
        };
        let logprobs = if top == 0 {
            Vec::new()
        } else {
            (0..tokens.len()).map(|step| (0..top).map(|k| pair(step, k)).collect()).collect()
        };
        RequestOutput { tokens: tokens.to_vec(), logprobs, finish }
    }

    /// Time inside the kernel, after a run.
    pub fn timing(&self) -> Timing {
        // SAFETY: live as long as `self`; outside of `run` no loop writes it.
        let output = unsafe { &*self.batch_output.as_ptr() };
        Timing {
            prefill: Duration::from_nanos(output.prefill_ns),
            decode: Duration::from_nanos(output.decode_ns),
            decode_steps: output.decode_steps,
        }
    }
}
