//! What a host's thread sleeps on: a word that others change when there is something new for it.

use kernels_cu::abi;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// A word that is only ever accessed atomically. On the CPU target it is `mpk_control.bell`, which the rank's kernel rings when it
/// has handed out results, and rank 0's host when it has sent a message. On a GPU it is a word of the host, and results are polled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bell {
    word: NonNull<u32>,
    /// The rank's kernel rings it.
    pub of_kernel: bool,
}

// SAFETY: the word is only accessed atomically, and by futex calls.
unsafe impl Send for Bell {}

impl Bell {
    /// # Safety
    /// The word lives as long as this and its copies are used, and is only accessed atomically.
    pub unsafe fn new(word: NonNull<u32>, of_kernel: bool) -> Bell {
        Bell { word, of_kernel }
    }

    /// Before a look at what there is. Acquire: pairs with the release of whoever rings, so that what came before the ring is seen.
    pub fn listen(self) -> u32 {
        // SAFETY: a live word (`new`).
        unsafe { AtomicU32::from_ptr(self.word.as_ptr()) }.load(Ordering::Acquire)
    }

    /// Until somebody has rung since `heard`, at most `longest`.
    pub fn sleep(self, heard: u32, longest: Duration) {
        // SAFETY: a live word (`new`); the call reads it atomically and sleeps for a bounded time.
        unsafe { abi::mpk_cpu_sleep(self.word.as_ptr(), heard, longest.as_nanos() as u64) };
    }

    /// There is something new.
    pub fn ring(self) {
        // SAFETY: a live word (`new`); the call adds to it atomically and wakes who sleeps on it.
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
