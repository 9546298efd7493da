//! What requests have yielded: written by the kernel, read by the host while it runs.

use crate::error::Result;
use crate::image::Image;
use crate::memory::Layout;
use crate::plan::{BatchPlan, Finish, RequestOutput, Timing};
use kernels_cu::abi;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// `mpk_batch_output` and the arrays it points to, in memory that host and kernel both see.
pub(crate) struct Outputs {
    image: Image,
    /// Where each request's tokens begin in the output arrays.
    first: Vec<usize>,
    room: Vec<usize>,
    top_k: usize,
    requests_at: u64,
    tokens_at: u64,
    top_tokens_at: u64,
    top_logprobs_at: u64,
}

impl Outputs {
    /// For the requests of `plan`, in zeroed memory of the size given to `allocate`.
    pub fn new(plan: &BatchPlan, allocate: impl FnOnce(u64) -> Result<Image>) -> Result<Outputs> {
        let room: Vec<usize> = plan.requests.iter().map(|r| r.max_new_tokens as usize).collect();
        let mut total = 0;
        let first = room
            .iter()
            .map(|&n| {
                total += n;
                total - n
            })
            .collect();
        let top_k = plan.top_k as usize;
        let mut layout = Layout::default();
        layout.reserve(size_of::<abi::mpk_batch_output>() as u64, 64);
        let requests_at =
            layout.reserve((room.len().max(1) * size_of::<abi::mpk_request_output>()) as u64, 64);
        let mut words = |count: usize| layout.reserve(count.max(1) as u64 * 4, 64);
        let tokens_at = words(total);
        let top_tokens_at = words(total * top_k);
        let top_logprobs_at = words(total * top_k);
        let mut image = allocate(layout.bytes())?;
        let header = abi::mpk_batch_output {
            requests: image.address(requests_at) as *mut _,
            tokens: image.address(tokens_at) as *mut _,
            top_tokens: image.address(top_tokens_at) as *mut _,
            top_logprobs: image.address(top_logprobs_at) as *mut _,
            prefill_ns: 0,
            decode_ns: 0,
            prefill_iterations: 0,
            decode_steps: 0,
        };
        image.put(0, &[header]);
        Ok(Outputs { image, first, room, top_k, requests_at, tokens_at, top_tokens_at, top_logprobs_at })
    }

    /// The kernel's address of `mpk_batch_output`.
    pub fn address(&self) -> u64 {
        self.image.address(0)
    }

    /// Index in the output arrays of the first token of request `index`.
    pub fn first(&self, index: usize) -> usize {
        self.first[index]
    }

    /// Tokens that request `index` has yielded so far, from number `from` on, and why it ended if it has.
    pub fn tokens(&self, index: usize, from: usize) -> (&[i32], Option<Finish>) {
        let requests = self.image.host::<abi::mpk_request_output>(self.requests_at, self.first.len());
        assert!(index < self.first.len());
        // SAFETY: `index` was checked. The kernel releases `finish` after `num_tokens` after the tokens: read in the
        // opposite order with acquire. Tokens below the count are not written any more.
        unsafe {
            let output = requests.add(index);
            let finish = AtomicU32::from_ptr(&raw mut (*output).finish).load(Ordering::Acquire);
            let count = AtomicU32::from_ptr(&raw mut (*output).num_tokens).load(Ordering::Acquire) as usize;
            let count = count.min(self.room[index]);
            let finish = match finish {
                abi::MPK_FINISH_LENGTH => Some(Finish::Length),
                abi::MPK_FINISH_EOS => Some(Finish::Eos),
                abi::MPK_FINISH_CANCELLED => Some(Finish::Cancelled),
                _ => None,
            };
            let from = from.min(count);
            let first =
                self.image.host::<i32>(self.tokens_at + 4 * (self.first[index] + from) as u64, count - from);
            (std::slice::from_raw_parts(first, count - from), finish)
        }
    }

    /// The `most` best tokens, highest first, of each of these tokens of request `index`, which `tokens` has shown.
    pub fn logprobs(&self, index: usize, tokens: Range<usize>, most: usize) -> Vec<Vec<(u32, f32)>> {
        let most = most.min(self.top_k);
        if most == 0 {
            return Vec::new();
        }
        assert!(tokens.end <= self.room[index]);
        let at = 4 * ((self.first[index] + tokens.start) * self.top_k) as u64;
        let count = tokens.len() * self.top_k;
        let ids = self.image.host::<i32>(self.top_tokens_at + at, count);
        let values = self.image.host::<f32>(self.top_logprobs_at + at, count);
        // SAFETY: released by the kernel together with the tokens, whose count the caller has seen.
        let pair = |place: usize| unsafe { (*ids.add(place) as u32, *values.add(place)) };
        (0..tokens.len()).map(|t| (0..most).map(|k| pair(t * self.top_k + k)).collect()).collect()
    }

    /// Everything that request `index` has yielded.
    pub fn request_output(&self, index: usize) -> RequestOutput {
        let (tokens, finish) = self.tokens(index, 0);
        let top = self.top_k;
        let mut logprobs = Vec::new();
        if top > 0 {
            let at = 4 * (self.first[index] * top) as u64;
            let ids = self.image.host::<i32>(self.top_tokens_at + at, tokens.len() * top);
            let values = self.image.host::<f32>(self.top_logprobs_at + at, tokens.len() * top);
            // SAFETY: released by the kernel together with the tokens, whose count was acquired above.
            let pair = |place: usize| unsafe { (*ids.add(place), *values.add(place)) };
            logprobs = (0..tokens.len()).map(|s| (0..top).map(|k| pair(s * top + k)).collect()).collect();
        }
        RequestOutput { tokens: tokens.to_vec(), logprobs, finish }
    }

    /// Time inside the kernel, after a run.
    pub fn timing(&self) -> Timing {
        // SAFETY: the header lies at the start of the image; outside of a run nobody writes it.
        let output = unsafe { &*self.image.host::<abi::mpk_batch_output>(0, 1) };
        Timing {
            prefill: Duration::from_nanos(output.prefill_ns),
            decode: Duration::from_nanos(output.decode_ns),
            decode_steps: output.decode_steps,
        }
    }
}
