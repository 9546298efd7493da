//! Ctrl-C and the like while nvcc runs: nvcc is ended and its pieces are removed before the signal ends this process.

use std::sync::atomic::{AtomicI32, Ordering};

/// Those that end a program and can be noted.
const SIGNALS: [libc::c_int; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];

/// The signal that has come; 0: none.
static SIGNAL: AtomicI32 = AtomicI32::new(0);

extern "C" fn on_signal(signal: libc::c_int) {
    SIGNAL.store(signal, Ordering::Relaxed);
}

/// One of the signals has come while they were held.
pub(super) fn requested() -> bool {
    SIGNAL.load(Ordering::Relaxed) != 0
}

/// As long as it lives, the signals are noted; then one that has come does what it would have done. A signal that is
/// ignored or that somebody else handles is left alone.
#[derive(Debug)]
pub(super) struct Held(Vec<libc::c_int>);

impl Held {
    pub(super) fn new() -> Self {
        Held(SIGNALS.into_iter().filter(|&signal| note(signal)).collect())
    }
}

/// Notes `signal` from now on, where it would end the process.
fn note(signal: libc::c_int) -> bool {
    // SAFETY: sigaction is plain data; the handler only stores to an atomic.
    unsafe {
        let mut before: libc::sigaction = std::mem::zeroed();
        let known = libc::sigaction(signal, std::ptr::null(), &mut before) == 0;
        let ends = known && before.sa_sigaction == libc::SIG_DFL;
        let handler = on_signal as extern "C" fn(libc::c_int) as libc::sighandler_t;
        ends && libc::signal(signal, handler) != libc::SIG_ERR
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        for &signal in &self.0 {
            // SAFETY: the default action needs nothing of ours.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        let signal = SIGNAL.load(Ordering::Relaxed);
        if self.0.contains(&signal) {
            // SAFETY: raise has no preconditions.
            unsafe { libc::raise(signal) };
        }
    }
}
