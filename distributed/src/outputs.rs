//! The results of requests. The kernel writes them, and the host reads them while it runs.

use crate::error::Result;
use crate::image::Image;
use crate::memory::Layout;
use crate::plan::{BatchPlan, Figures, Finish, Mode};
use kernels_cu::abi;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// `mpk_batch_output` and the arrays that it points to, in memory that both host and kernel see.
pub(crate) struct Outputs {
    image: Image,
    /// Number of request numbers, and number of places in the output arrays.
    numbers: usize,
    total: usize,
    top_k: usize,
    num_admissions_at: u64,
    bell_at: u64,
    requests_at: u64,
    tokens_at: u64,
    top_tokens_at: u64,
    top_logprobs_at: u64,
    token_logprobs_at: u64,
}

impl Outputs {
    /// Creates the outputs for `plan` in zeroed memory from `allocate`, which gets the size.
    pub fn new(plan: &BatchPlan, allocate: impl FnOnce(u64) -> Result<Image>) -> Result<Outputs> {
        let (numbers, total) = match plan.mode {
            Mode::Serve(serve) => (serve.requests as usize, serve.tokens as usize),
            Mode::Fixed { .. } => (1, 0),
        };
        let top_k = plan.top_k as usize;
        let mut layout = Layout::default();
        layout.reserve(size_of::<abi::mpk_batch_output>() as u64, 64);
        let num_admissions_at = layout.reserve(4, 64);
        let bell_at = layout.reserve(4, 64);
        let requests_at = layout.reserve((numbers * size_of::<abi::mpk_request_output>()) as u64, 64);
        let mut words = |count: usize| layout.reserve(count.max(1) as u64 * 4, 64);
        let tokens_at = words(total);
        let top_tokens_at = words(total * top_k);
        let top_logprobs_at = words(total * top_k);
        let token_logprobs_at = words(total * top_k.min(1));
        let mut image = allocate(layout.bytes())?;
        let header = abi::mpk_batch_output {
            requests: image.address(requests_at) as *mut _,
            tokens: image.address(tokens_at) as *mut _,
            top_tokens: image.address(top_tokens_at) as *mut _,
            top_logprobs: image.address(top_logprobs_at) as *mut _,
            token_logprobs: image.address(token_logprobs_at) as *mut _,
            ..Default::default()
        };
        image.put(0, &[header]);
        Ok(Outputs {
            image,
            numbers,
            total,
            top_k,
            num_admissions_at,
            bell_at,
            requests_at,
            tokens_at,
            top_tokens_at,
            top_logprobs_at,
            token_logprobs_at,
        })
    }

    /// The kernel's address of the counter of entries that this host has written to the admission ring.
    pub fn num_admissions(&self) -> u64 {
        self.image.address(self.num_admissions_at)
    }

    /// A word for the host's own use. Its thread sleeps on it if the kernel has no such word.
    pub fn bell(&self) -> NonNull<u32> {
        NonNull::new(self.image.host::<u32>(self.bell_at, 1)).unwrap_or(NonNull::dangling())
    }

    /// The event that the kernel of a CPU target signals for new tokens. `None`: it rings the bell for them.
    pub fn set_reader(&self, event: Option<std::os::fd::RawFd>) {
        let header = self.image.host::<abi::mpk_batch_output>(0, 1);
        // SAFETY: a live word, only accessed atomically. Relaxed: no other memory is read because of it.
        unsafe { AtomicI32::from_ptr(&raw mut (*header).reader) }
            .store(event.unwrap_or(0), Ordering::Relaxed);
    }

    /// Lets the kernel see the admission ring's entries up to this total number (modulo 2^30), with everything that they refer
    /// to.
    pub fn count_entries(&self, entries: u32) {
        let word = self.image.host::<u32>(self.num_admissions_at, 1);
        // SAFETY: a live word that host and kernel only access atomically. Release: pairs with the batch step's acquire
        // (entries_here).
        unsafe {
            AtomicU32::from_ptr(word).store(entries & abi::MPK_ENTRY_COUNT_MASK, Ordering::Release);
            abi::mpk_cpu_wake(word);
        }
    }

    /// Number of entries of the admission ring that are in effect, modulo 2^30.
    pub fn entries_taken(&self) -> u32 {
        let header = self.image.host::<abi::mpk_batch_output>(0, 1);
        // SAFETY: a live word, only accessed atomically. Acquire: pairs with hand_out; those entries are not read any more.
        unsafe { AtomicU32::from_ptr(&raw mut (*header).entries_taken).load(Ordering::Acquire) }
    }

    /// Number of requests that have ended so far.
    pub fn finished(&self) -> u64 {
        let header = self.image.host::<abi::mpk_batch_output>(0, 1);
        // SAFETY: a live word, only accessed atomically. Acquire: pairs with hand_out; the memory of these requests is not accessed
        // any more.
        unsafe { AtomicU64::from_ptr(&raw mut (*header).finished).load(Ordering::Acquire) }
    }

    /// Statistics of the batch step. They may have been read at slightly different times.
    pub fn figures(&self) -> Figures {
        let header = self.image.host::<abi::mpk_batch_output>(0, 1);
        // SAFETY: live words that the kernel stores atomically. Relaxed: no other memory is read because of them.
        let word = |word: *mut u32| unsafe { AtomicU32::from_ptr(word).load(Ordering::Relaxed) };
        // SAFETY: as above.
        let long = |word: *mut u64| unsafe { AtomicU64::from_ptr(word).load(Ordering::Relaxed) };
        // SAFETY: only takes the addresses of the fields.
        unsafe {
            Figures {
                running: word(&raw mut (*header).running),
                waiting: word(&raw mut (*header).waiting),
                free_pages: word(&raw mut (*header).free_pages),
                preemptions: long(&raw mut (*header).preemptions),
                prefix_queries: long(&raw mut (*header).prefix_queries),
                prefix_hits: long(&raw mut (*header).prefix_hits),
                evictions: long(&raw mut (*header).evictions),
                prefill: Duration::from_nanos(long(&raw mut (*header).prefill_ns)),
                decode: Duration::from_nanos(long(&raw mut (*header).decode_ns)),
                prefill_iterations: long(&raw mut (*header).prefill_iterations),
                decode_steps: long(&raw mut (*header).decode_steps),
                full: Duration::from_nanos(long(&raw mut (*header).full_ns)),
                full_steps: long(&raw mut (*header).full_steps),
            }
        }
    }

    /// Clears the results of number `number` before a request gets it.
    pub fn clear(&self, number: u32) {
        let output = self.request(number as usize);
        // SAFETY: a live struct whose words are only accessed atomically. The kernel does not write it before it sees the request.
        // Relaxed: `count_entries` releases it.
        unsafe {
            AtomicU32::from_ptr(&raw mut (*output).num_tokens).store(0, Ordering::Relaxed);
            AtomicU32::from_ptr(&raw mut (*output).cached_tokens).store(0, Ordering::Relaxed);
            AtomicU32::from_ptr(&raw mut (*output).finish).store(abi::MPK_RUNNING, Ordering::Relaxed);
        }
    }

    /// The number of tokens of the request with number `number`, and the reason of its end if it has ended.
    pub fn progress(&self, number: u32) -> (usize, Option<Finish>) {
        let output = self.request(number as usize);
        // SAFETY: a live struct whose words are only accessed atomically. The kernel releases the tokens, then `num_tokens`, then
        // `finish`. They are read in the opposite order with acquire.
        unsafe {
            let finish = AtomicU32::from_ptr(&raw mut (*output).finish).load(Ordering::Acquire);
            let count = AtomicU32::from_ptr(&raw mut (*output).num_tokens).load(Ordering::Acquire);
            (count as usize, finish_of(finish))
        }
    }

    /// Number of prompt tokens that the request with number `number` found in the prefix cache. The caller has seen its first token
    /// or its end.
    pub fn cached_tokens(&self, number: u32) -> u32 {
        let output = self.request(number as usize);
        // SAFETY: a live word. Relaxed: the kernel releases it with the first token, which the caller has acquired.
        unsafe { AtomicU32::from_ptr(&raw mut (*output).cached_tokens).load(Ordering::Relaxed) }
    }

    /// The token at `place` of the output arrays, its log-probability, and the highest ones, for a request that wants `logprobs` of them.
    /// The caller has seen that it is present.
    pub fn token(&self, place: usize, logprobs: u32) -> (i32, Option<f32>, Vec<(i32, f32)>) {
        assert!(place < self.total);
        let token = self.image.host::<i32>(self.tokens_at + 4 * place as u64, 1);
        let at = 4 * (place * self.top_k) as u64;
        let ids = self.image.host::<i32>(self.top_tokens_at + at, self.top_k);
        let values = self.image.host::<f32>(self.top_logprobs_at + at, self.top_k);
        // The kernel writes no others.
        let wanted = self.top_k.min(logprobs as usize);
        let own = (wanted > 0).then(|| self.image.host::<f32>(self.token_logprobs_at + 4 * place as u64, 1));
        // SAFETY: inside the arrays, as asserted here and by `host`. The kernel released it with the count that the caller acquired,
        // and does not write it again while the request has its number.
        unsafe {
            let own = own.map(|value| *value).filter(|logprob| !logprob.is_nan());
            (*token, own, (0..wanted).map(|k| (*ids.add(k), *values.add(k))).collect())
        }
    }

    fn request(&self, number: usize) -> *mut abi::mpk_request_output {
        assert!(number < self.numbers);
        let requests = self.image.host::<abi::mpk_request_output>(self.requests_at, self.numbers);
        // SAFETY: inside the array, as asserted.
        unsafe { requests.add(number) }
    }

    /// The kernel's address of `mpk_batch_output`.
    pub fn address(&self) -> u64 {
        self.image.address(0)
    }
}

fn finish_of(finish: u32) -> Option<Finish> {
    match finish {
        abi::MPK_FINISH_LENGTH => Some(Finish::Length),
        abi::MPK_FINISH_EOS => Some(Finish::Eos),
        abi::MPK_FINISH_CANCELLED => Some(Finish::Cancelled),
        _ => None,
    }
}
