//! Ctrl-C and SIGTERM as a flag that the watching host looks at.

use std::sync::atomic::{AtomicBool, Ordering};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn on_interrupt(_signal: libc::c_int) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// From now on the signals are noted, and end the process no more.
pub(crate) fn watch() {
    // SAFETY: the handler only stores to an atomic.
    unsafe {
        let handler = on_interrupt as extern "C" fn(libc::c_int) as libc::sighandler_t;
        libc::signal(libc::SIGINT, handler);
        libc::signal(libc::SIGTERM, handler);
    }
}

/// One of them has come.
pub(crate) fn requested() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}
