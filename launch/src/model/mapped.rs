//! Read errors of files that are mapped into memory. The system tells of them by a signal (SIGBUS), whose default is to
//! end the process without a word.

use std::path::Path;
use std::sync::atomic::{AtomicPtr, Ordering};

/// As for files that are read in the usual way.
const STATUS: libc::c_int = 2;

/// What the handler prints. A text that was made for it is never freed: the handler may be reading it.
static TEXT: AtomicPtr<Vec<u8>> = AtomicPtr::new(std::ptr::null_mut());

extern "C" fn on_read_error(_signal: libc::c_int) {
    // Pairs with the release in `Reads::of`.
    let text = TEXT.load(Ordering::Acquire);
    // SAFETY: a text that lives for ever; write and _exit may be called in a signal handler.
    unsafe {
        if let Some(text) = text.as_ref() {
            libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len());
        }
        libc::_exit(STATUS);
    }
}

/// As long as it lives, a read error of a mapped file ends the process with a message.
#[derive(Debug)]
pub(crate) struct Reads(libc::sighandler_t);

impl Reads {
    /// The files of `folder` are read, by rank `rank`.
    pub(crate) fn of(folder: &Path, rank: u32) -> Reads {
        let text = format!(
            "mpk-run: error: rank {rank} cannot read {}: a file of it has become shorter, or the disk has failed; check the files (`sha256sum`) and the disk (`dmesg`)\n",
            folder.display()
        );
        TEXT.store(Box::into_raw(Box::new(text.into_bytes())), Ordering::Release);
        let handler = on_read_error as extern "C" fn(libc::c_int) as libc::sighandler_t;
        // SAFETY: the handler only calls what a signal handler may.
        Reads(unsafe { libc::signal(libc::SIGBUS, handler) })
    }
}

impl Drop for Reads {
    fn drop(&mut self) {
        // SAFETY: what was there before.
        unsafe { libc::signal(libc::SIGBUS, self.0) };
    }
}
