//! SIGTERM and SIGINT of a program that serves: a thread takes them, and nothing else does.

use std::mem::MaybeUninit;
use std::ptr;

/// The run failed.
const STATUS: libc::c_int = 4;

/// What follows from a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing more.
    Handled,
    /// What it does by default: it ends the process.
    ByDefault,
    /// The process ends with status 4.
    Exit,
}

/// The two signals, kept from every thread.
pub struct Signals(libc::sigset_t);

impl Signals {
    /// From now on the signals wait. Call it before there are other threads: they inherit it, and so no handler that a
    /// library sets is called.
    pub fn hold() -> Signals {
        let mut set = MaybeUninit::uninit();
        // SAFETY: sigemptyset makes the set valid, the others get valid pointers.
        unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            libc::sigaddset(set.as_mut_ptr(), libc::SIGTERM);
            libc::sigaddset(set.as_mut_ptr(), libc::SIGINT);
            libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), ptr::null_mut());
            Signals(set.assume_init())
        }
    }

    /// Waits for signals on a thread of its own. `first` hears of the first one and tells whether the program now ends by
    /// itself; otherwise, and at the second one, the process ends at once.
    pub fn watch(self, first: impl FnOnce() -> bool + Send + 'static) {
        let mut first = Some(first);
        self.watch_each(move || match first.take().map(|first| first()) {
            Some(true) => Next::Handled,
            Some(false) => Next::ByDefault,
            None => Next::Exit,
        });
    }

    /// Waits for signals on a thread of its own, and does what `each` says.
    pub fn watch_each(self, mut each: impl FnMut() -> Next + Send + 'static) {
        let body = move || loop {
            let signal = self.wait();
            match each() {
                Next::Handled => {}
                Next::ByDefault => self.end_by(signal),
                // SAFETY: ends the process; nothing of it is used any more.
                Next::Exit => unsafe { libc::_exit(STATUS) },
            }
        };
        // Without the thread the signals would be lost: then they do what they do by default.
        if std::thread::Builder::new().name("signals".into()).spawn(body).is_err() {
            Signals::hold().release();
        }
    }

    fn wait(&self) -> libc::c_int {
        let mut signal = 0;
        // SAFETY: the set is valid, and the out-pointer is.
        while unsafe { libc::sigwait(&raw const self.0, &raw mut signal) } != 0 {}
        signal
    }

    fn release(&self) {
        // SAFETY: the set is valid.
        unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const self.0, ptr::null_mut()) };
    }

    /// Ends the process as the signal does by default.
    fn end_by(&self, signal: libc::c_int) {
        // SAFETY: the default action of a signal that is no longer held, and is sent to this thread.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
        self.release();
        // SAFETY: as above.
        unsafe { libc::raise(signal) };
    }
}
