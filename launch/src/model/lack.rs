//! Errors of the system which say that the environment lacks something.

use std::io::{Error, ErrorKind};

/// How to get what the environment lacks, if that is what `error` says.
pub fn fix(error: &Error) -> Option<&'static str> {
    match error.raw_os_error() {
        Some(libc::EMFILE | libc::ENFILE) => Some("raise the limit of open files (`ulimit -n 4096`)"),
        Some(libc::ENOSPC | libc::EDQUOT) => Some("free some space there, or write elsewhere"),
        Some(libc::EFBIG) => Some("raise the limit of a file's size (`ulimit -f unlimited`)"),
        _ if error.kind() == ErrorKind::OutOfMemory => {
            Some("free some memory, or raise its limit (`ulimit -v unlimited`)")
        }
        _ => None,
    }
}
