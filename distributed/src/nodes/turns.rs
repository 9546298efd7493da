//! The turns of a rank's proxy, by its own thread and by workers that wait. A worker that shares its core with the
//! proxy takes the turns itself, because switching to the proxy's thread and back would take longer than the turn.

use super::carrying::Thread;
use super::link::Link;
use super::shared::Shared;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// While a kernel runs: number of turns without work in which the thread only yields its core. After that it pauses between turns.
const YIELDS: u32 = 2000;
/// The same number if threads share cores, because others need them.
const YIELDS_SHARED: u32 = 20;
/// Number of turns without work per yield. A yield takes longer than a turn, because it switches to the worker and back. A message that
/// arrives meanwhile waits.
const TURNS_PER_YIELD: u32 = 2;
const SHORTEST_PAUSE: Duration = Duration::from_micros(5);
const LONGEST_PAUSE: Duration = Duration::from_micros(100);
/// The pause if no kernel runs, if the kernel has been idle for long, or if workers take the turns.
const IDLE_PAUSE: Duration = Duration::from_millis(1);
/// This many pauses in a row count as long.
const IDLE_AFTER: u32 = 2000;

pub(super) struct Turns<L> {
    shared: Arc<Shared>,
    thread: Mutex<Thread<L>>,
    /// Number of turns that workers have taken.
    helped: AtomicU64,
}

impl<L: Link> Turns<L> {
    pub fn new(shared: Arc<Shared>, thread: Thread<L>) -> Turns<L> {
        Turns { shared, thread: Mutex::new(thread), helped: AtomicU64::new(0) }
    }

    /// Takes turns until all peers have said goodbye, or something has failed.
    pub fn run(&self) {
        // SAFETY: a call without pointers. Makes short pauses as short as requested.
        unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1000_u64) };
        let (mut idle, mut helped) = (0_u32, 0);
        loop {
            self.shared.watch.note_turn();
            let worked = {
                let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
                let worked = thread.take_turn();
                if thread.is_over() {
                    return;
                }
                worked
            };
            idle = if worked { 0 } else { idle.saturating_add(1) };
            // Relaxed: only a hint.
            let now = self.helped.load(Ordering::Relaxed);
            if now == helped {
                self.pause(idle);
            } else {
                helped = now;
                std::thread::sleep(IDLE_PAUSE);
            }
        }
    }

    fn pause(&self, idle: u32) {
        let runs = self.shared.begun.load(Ordering::Relaxed) != self.shared.over.load(Ordering::Relaxed);
        let shares = self.shared.shared_cores.load(Ordering::Relaxed);
        let (yields, turns) = if shares { (YIELDS_SHARED, 1) } else { (YIELDS, TURNS_PER_YIELD) };
        if idle == 0 {
            // The thread that waits for this may need this very core.
            std::thread::yield_now();
        } else if !runs || idle > yields + IDLE_AFTER {
            std::thread::sleep(IDLE_PAUSE);
        } else if idle <= yields {
            if idle.is_multiple_of(turns) {
                std::thread::yield_now();
            }
        } else {
            std::thread::sleep((SHORTEST_PAUSE * (idle - yields)).min(LONGEST_PAUSE));
        }
    }

    /// Takes one turn, unless another thread is taking one. False if it has not.
    pub fn help(&self) -> bool {
        // A poisoned lock is left to the proxy's own thread.
        let Ok(mut thread) = self.thread.try_lock() else { return false };
        thread.take_turn();
        // Relaxed: only a hint for `run`.
        self.helped.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// [`Turns::help`] for `mpk_proxy.help`.
    ///
    /// # Safety
    /// `turns` points to a live value of this type.
    pub unsafe extern "C" fn help_of(turns: *mut c_void) -> i32 {
        // SAFETY: the caller's.
        unsafe { &*turns.cast::<Turns<L>>() }.help().into()
    }
}

#[cfg(test)]
#[path = "turns_test.rs"]
mod tests;
