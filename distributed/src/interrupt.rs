//! Ctrl-C and SIGTERM while the kernel runs: the first is a flag that the watching host looks at, the second ends the
//! process. At other times they do what they do by default: they end it.

use std::sync::atomic::{AtomicBool, Ordering};

/// The run failed.
const STATUS: libc::c_int = 4;

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn on_interrupt(_signal: libc::c_int) {
    if INTERRUPTED.swap(true, Ordering::Relaxed) {
        // SAFETY: may be called in a signal handler, and ends the process.
        unsafe { libc::_exit(STATUS) };
    }
}

/// As long as it lives, the first of the signals is noted.
pub(crate) struct Noted([libc::sighandler_t; 2]);

const SIGNALS: [libc::c_int; 2] = [libc::SIGINT, libc::SIGTERM];

/// From now on, until the result goes, the first of the signals is noted.
pub(crate) fn note() -> Noted {
    let handler = on_interrupt as extern "C" fn(libc::c_int) as libc::sighandler_t;
    // SAFETY: the handler only touches an atomic and ends the process.
    Noted(SIGNALS.map(|signal| unsafe { libc::signal(signal, handler) }))
}

impl Drop for Noted {
    fn drop(&mut self) {
        for (signal, before) in SIGNALS.into_iter().zip(self.0) {
            // SAFETY: what was there before.
            unsafe { libc::signal(signal, before) };
        }
    }
}

extern "C" fn on_signal_at_the_end(_signal: libc::c_int) {
    // SAFETY: may be called in a signal handler, and ends the process.
    unsafe { libc::_exit(STATUS) };
}

/// The run has failed, and why has been told: from now on a signal, such as that of a launcher which ends the job, ends this process
/// with the status of that.
pub fn end_on_signal() {
    let handler = on_signal_at_the_end as extern "C" fn(libc::c_int) as libc::sighandler_t;
    for signal in SIGNALS {
        // SAFETY: the handler ends the process and does nothing else.
        unsafe { libc::signal(signal, handler) };
    }
}

/// A kernel that runs is told to end, as by Ctrl-C, and so is any later one.
pub fn stop_kernel() {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// One of them has come.
pub(crate) fn requested() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}
