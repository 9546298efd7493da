//! Lets a thread other than the host's take tokens.

use super::client::{Client, Shared};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::task::Waker;

/// Lets a thread take tokens itself, in place of rank 0's host. On the CPU target the kernel wakes it directly, through an event
/// ([`AsFd`]) that becomes readable with each new token. The event need not be read: wait for its edges, and call
/// [`Reader::take`] after each. A GPU's kernel cannot write to the event, so there the host takes the tokens, as without a
/// reader.
pub struct Reader {
    shared: Arc<Shared>,
    event: Arc<OwnedFd>,
}

impl Reader {
    /// Passes new tokens to their sinks. Never waits.
    pub fn take(&self) {
        let mut wakers = Vec::new();
        let unwanted = self.shared.results().take(&mut wakers);
        // Without the lock.
        wakers.into_iter().for_each(Waker::wake);
        if unwanted {
            // The host cancels.
            self.shared.lock().ring();
        }
    }
}

impl AsFd for Reader {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl AsRawFd for Reader {
    fn as_raw_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.shared.results().set_event(None);
        // The host takes the tokens that the event announced last.
        self.shared.lock().ring();
    }
}

impl std::fmt::Debug for Reader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reader").finish_non_exhaustive()
    }
}

impl Client {
    /// A reader for another thread than the host's. `None` if there is one already, or if the system cannot create an event.
    pub fn reader(&self) -> Option<Reader> {
        let shared = &self.0;
        let mut results = shared.results();
        if results.has_event() {
            return None;
        }
        let event = match shared.event.get() {
            Some(event) => Arc::clone(event),
            None => {
                let event = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok()?);
                // It stays open as long as a kernel may write to it: until the end of the service, not only of the reader.
                shared.event.set(Arc::clone(&event)).ok()?;
                event
            }
        };
        results.set_event(Some(event.as_raw_fd()));
        drop(results);
        Some(Reader { shared: Arc::clone(shared), event })
    }
}
