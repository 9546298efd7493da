//! The word that a host's thread sleeps on. Others change it when there is something new for the host.

use kernels_cu::abi;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// A word that is only accessed atomically. On the CPU target it is `mpk_control.bell`: the rank's kernel rings it after it has handed
/// out results, and rank 0's host after it has sent a message (through the proxies, if it is on another node). For a GPU's rank it is in memory that the hosts of a node share: the
/// hosts ring it, and results are polled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bell {
    word: NonNull<u32>,
    /// True if the rank's kernel rings it.
    pub of_kernel: bool,
}

// SAFETY: the word is only accessed atomically, and by futex calls.
unsafe impl Send for Bell {}

impl Bell {
    /// A word that is never freed and that no kernel rings.
    pub fn of_hosts(word: &'static AtomicU32) -> Bell {
        Bell { word: NonNull::from(word).cast(), of_kernel: false }
    }

    /// # Safety
    /// The word lives as long as this value and its copies are used, and is only accessed atomically.
    pub unsafe fn new(word: NonNull<u32>, of_kernel: bool) -> Bell {
        Bell { word, of_kernel }
    }

    /// Called before a check for news. Acquire: pairs with the release of the thread that rings, so that everything before the ring is
    /// visible.
    pub fn listen(self) -> u32 {
        // SAFETY: a live word (`new`).
        unsafe { AtomicU32::from_ptr(self.word.as_ptr()) }.load(Ordering::Acquire)
    }

    /// Sleeps until the bell has been rung since `heard`, at most `longest`.
    pub fn sleep(self, heard: u32, longest: Duration) {
        // SAFETY: a live word (`new`); the call reads it atomically and sleeps for a bounded time.
        unsafe { abi::mpk_cpu_sleep(self.word.as_ptr(), heard, longest.as_nanos() as u64) };
    }

    /// How long a host sleeps between two checks while it waits for something that does not ring this bell: messages of other hosts, and
    /// results of a GPU. A GPU's token waits half of this time for its reader on average; a GPU's host has its own core.
    pub fn short(self) -> Duration {
        Duration::from_micros(if self.of_kernel { 100 } else { 30 })
    }

    /// Signals news.
    pub fn ring(self) {
        // SAFETY: a live word (`new`); the call adds to it atomically and wakes the threads that sleep on it.
        unsafe { abi::mpk_cpu_ring(self.word.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn a_ring_ends_the_sleep_even_if_it_came_first() {
        let mut word = Box::new(0u32);
        // SAFETY: the box outlives the threads below.
        let bell = unsafe { Bell::new(NonNull::from(word.as_mut()), true) };
        let heard = bell.listen();
        let begin = Instant::now();
        bell.sleep(heard, Duration::from_millis(5));
        assert!(begin.elapsed() >= Duration::from_millis(4));
        bell.ring();
        bell.sleep(heard, Duration::from_secs(60));
        let heard = bell.listen();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(5));
                bell.ring();
            });
            while bell.listen() == heard {
                bell.sleep(heard, Duration::from_secs(60));
            }
        });
        assert!(begin.elapsed() < Duration::from_secs(30));
    }
}
