//! Read errors of memory-mapped files. The system reports them by a signal (SIGBUS), which ends the process without a
//! message by default.

use std::path::Path;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The exit status; the same as for files that are read without mapping.
const STATUS: libc::c_int = 2;

/// The text that the handler prints. It is never freed, because the handler may be reading it.
static TEXT: AtomicPtr<Vec<u8>> = AtomicPtr::new(std::ptr::null_mut());

extern "C" fn on_read_error(_signal: libc::c_int) {
    // Pairs with the release in `Reads::of`.
    let text = TEXT.load(Ordering::Acquire);
    // SAFETY: the text is never freed; write and _exit may be called in a signal handler.
    unsafe {
        if let Some(text) = text.as_ref() {
            libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len());
        }
        libc::_exit(STATUS);
    }
}

/// While this value lives, a read error of a mapped file ends the process with a message.
#[derive(Debug)]
pub(crate) struct Reads(libc::sighandler_t);

impl Reads {
    /// Installs the handler while rank `rank` reads the files of `folder`.
    pub(crate) fn of(folder: &Path, rank: u32) -> Reads {
        let text = format!(
            "mpk-run: error: rank {rank} cannot read {}: a file in it has become shorter, or the disk has failed; check the files (`sha256sum`) and the disk (`dmesg`)\n",
            folder.display()
        );
        TEXT.store(Box::into_raw(Box::new(text.into_bytes())), Ordering::Release);
        let handler = on_read_error as extern "C" fn(libc::c_int) as libc::sighandler_t;
        // SAFETY: the handler calls only functions that are allowed in a signal handler.
        Reads(unsafe { libc::signal(libc::SIGBUS, handler) })
    }
}

impl Drop for Reads {
    fn drop(&mut self) {
        // SAFETY: restores the previous handler.
        unsafe { libc::signal(libc::SIGBUS, self.0) };
    }
}
