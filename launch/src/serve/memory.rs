//! The memory that bodies and answers take, for all clients together.

use super::limits::Limits;
use super::state::Shared;
use axum::body::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::sync::{AcquireError, OwnedSemaphorePermit, TryAcquireError};

/// Estimated bytes of a list or an object with one entry.
const COLLECTION: usize = 400;
/// Estimated bytes of a further entry, and of a name.
const ENTRY: usize = 80;

/// Maximum bytes of a piece of an [`Unsent`] answer.
const PIECE: usize = 64 << 10;

/// Estimates the size of parsed JSON from its text, which may come in pieces.
#[derive(Default)]
pub struct Estimate {
    /// The estimate so far.
    pub bytes: usize,
    in_string: bool,
    escaped: bool,
}

impl Estimate {
    /// Adds the next piece of the text.
    pub fn add(&mut self, text: &[u8]) {
        self.bytes += text.len();
        for &byte in text {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = self.in_string,
                b'"' => self.in_string = !self.in_string,
                b'[' | b'{' if !self.in_string => self.bytes += COLLECTION,
                b',' | b':' if !self.in_string => self.bytes += ENTRY,
                _ => {}
            }
        }
    }
}

/// A request's share of the memory. Dropping it gives the share back.
#[derive(Default)]
pub struct Memory {
    /// For its body, and then for its answer.
    bytes: Option<OwnedSemaphorePermit>,
    /// For the values of its body, if they are large.
    values: Option<OwnedSemaphorePermit>,
}

/// Gives freed memory back to the system. The allocator would keep most of what many small allocations took.
pub fn give_back_free() {
    // SAFETY: it changes only free memory, and takes the allocator's own locks.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0)
    };
}

fn kib(bytes: usize) -> usize {
    bytes.div_ceil(1024)
}

impl Memory {
    /// Makes the share large enough for `bytes` bytes of a body or an answer. Does not wait.
    ///
    /// # Errors
    /// Others have the memory.
    pub fn grow(&mut self, app: &Shared, bytes: usize) -> Result<(), TryAcquireError> {
        let held = self.bytes.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let more = kib(bytes).saturating_sub(held);
        if more > 0 {
            let more = Arc::clone(&app.bodies).try_acquire_many_owned(more as u32)?;
            match &mut self.bytes {
                Some(held) => held.merge(more),
                None => self.bytes = Some(more),
            }
        }
        Ok(())
    }

    /// Waits until there is room for parsed values of about `bytes` bytes. Values larger than all the memory wait until
    /// they have it alone.
    ///
    /// Small values take no share, so that ordinary requests never wait for large ones: values exist only in the jobs
    /// of [`super::prompts::beside`], and the number of these jobs is limited.
    ///
    /// # Errors
    /// None in practice: the semaphore is never closed.
    pub async fn reserve_values(&mut self, app: &Shared, bytes: usize) -> Result<(), AcquireError> {
        let Limits { all_bodies_bytes, encoders, .. } = app.limits;
        if bytes > all_bodies_bytes / encoders.max(1) {
            let permits = kib(bytes.min(all_bodies_bytes)) as u32;
            self.values = Some(Arc::clone(&app.values).acquire_many_owned(permits).await?);
        }
        Ok(())
    }

    /// Gives back the share for values.
    pub fn drop_values(&mut self) {
        drop(self.values.take());
    }
}

/// An answer that keeps its memory until its last piece is sent.
pub struct Unsent {
    text: String,
    sent: usize,
    _memory: Memory,
}

impl Unsent {
    /// An answer of `text`.
    ///
    /// # Errors
    /// Others have the memory.
    pub fn new(app: &Shared, mut memory: Memory, text: String) -> Result<Self, TryAcquireError> {
        memory.drop_values();
        // An answer can be many times longer than its body, and longer than all the memory.
        memory.grow(app, text.len().min(app.limits.all_bodies_bytes / 4))?;
        Ok(Unsent::held(memory, text))
    }

    /// An answer of `text` that keeps `memory`, which needs to be no larger.
    pub fn held(memory: Memory, text: String) -> Self {
        Unsent { text, sent: 0, _memory: memory }
    }
}

impl Body for Unsent {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        let rest = &this.text.as_bytes()[this.sent..];
        if rest.is_empty() {
            return Poll::Ready(None);
        }
        // A copy: the connection may hold the last pieces after the text and its memory are given back.
        let piece = Bytes::copy_from_slice(&rest[..rest.len().min(PIECE)]);
        this.sent += piece.len();
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.sent == self.text.len()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact((self.text.len() - self.sent) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::state::App;
    use futures_util::{FutureExt, StreamExt};

    fn app() -> App {
        Shared::new(Limits { all_bodies_bytes: 1 << 20, encoders: 4, ..Limits::default() }, None)
    }

    fn estimate(pieces: &[&str]) -> usize {
        let mut estimate = Estimate::default();
        pieces.iter().for_each(|piece| estimate.add(piece.as_bytes()));
        estimate.bytes
    }

    #[test]
    fn values_are_estimated_from_the_text() {
        assert_eq!(estimate(&[""]), 0);
        assert_eq!(estimate(&["[1,2]"]), 5 + COLLECTION + ENTRY);
        assert_eq!(estimate(&["{\"a\":[1,2]}"]), 11 + 2 * COLLECTION + 2 * ENTRY);
        // Text counts once, whatever it says.
        for text in ["\"a, b: [c] {d}\"", "\"\\\"[,\"", "\"\\\\\\\"[,:\""] {
            assert_eq!(estimate(&[text]), text.len(), "{text}");
        }
        assert_eq!(estimate(&["\"\\\\\"[]"]), 6 + COLLECTION);
        // Pieces change nothing, even within an escape.
        assert_eq!(estimate(&["[\"\\", "\"[", "\",", "2]"]), estimate(&["[\"\\\"[\",2]"]));
    }

    /// The costs follow from the size of a value.
    #[test]
    fn the_estimate_covers_the_values() {
        let value = size_of::<serde_json::Value>();
        assert!(value <= ENTRY, "{value}");
        // A list begins with room for four entries.
        assert!(4 * value <= COLLECTION, "{value}");
    }

    #[test]
    fn large_values_wait_and_small_ones_do_not() {
        let app = app();
        let mut first = Memory::default();
        first.reserve_values(&app, 100 << 20).now_or_never().unwrap().unwrap();
        assert_eq!(app.values.available_permits(), 0);
        let mut second = Memory::default();
        assert!(second.reserve_values(&app, 300 << 10).now_or_never().is_none());
        let mut small = Memory::default();
        small.reserve_values(&app, 256 << 10).now_or_never().unwrap().unwrap();
        drop(first);
        second.reserve_values(&app, 300 << 10).now_or_never().unwrap().unwrap();
        assert_eq!(app.values.available_permits(), 1024 - 300);
    }

    #[test]
    fn an_answer_keeps_its_memory_until_it_is_sent() {
        let app = app();
        let text = "x".repeat(200_000);
        let mut memory = Memory::default();
        memory.grow(&app, 1000).unwrap();
        memory.reserve_values(&app, 1 << 20).now_or_never().unwrap().unwrap();
        let answer = Unsent::new(&app, memory, text.clone()).unwrap();
        assert_eq!(answer.size_hint().exact(), Some(200_000));
        assert_eq!(app.values.available_permits(), 1024);
        let mut stream = axum::body::Body::new(answer).into_data_stream();
        let mut sent = Vec::new();
        while let Some(piece) = stream.next().now_or_never().unwrap() {
            let piece = piece.unwrap();
            assert!(piece.len() <= PIECE);
            assert_eq!(app.bodies.available_permits(), 1024 - 196);
            sent.extend_from_slice(&piece);
        }
        assert_eq!(sent, text.as_bytes());
        drop(stream);
        assert_eq!(app.bodies.available_permits(), 1024);
        // A long answer needs a quarter of the memory.
        let mut others = Memory::default();
        others.grow(&app, 768 << 10).unwrap();
        drop(Unsent::new(&app, Memory::default(), "x".repeat(2 << 20)).unwrap());
        others.grow(&app, 769 << 10).unwrap();
        assert!(Unsent::new(&app, Memory::default(), "x".repeat(2 << 20)).is_err());
    }
}
