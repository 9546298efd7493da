//! Operating-system errors that mean that the environment lacks something.

use std::io::{Error, ErrorKind};

/// How to get what the environment lacks, if `error` means that.
pub fn fix(error: &Error) -> Option<&'static str> {
    match error.raw_os_error() {
        Some(libc::EMFILE | libc::ENFILE) => Some("raise the limit of open files with `ulimit -n 4096`"),
        Some(libc::ENOSPC | libc::EDQUOT) => Some("free disk space, or write to another disk"),
        Some(libc::EFBIG) => Some("raise the limit of file sizes with `ulimit -f unlimited`"),
        _ if error.kind() == ErrorKind::OutOfMemory => {
            Some("free memory, or raise the limit with `ulimit -v unlimited`")
        }
        _ => None,
    }
}
