//! The process's standard output and standard error.

use crate::model::app_error::AppError;
use crate::model::files;
use rustix::stdio::dup2_stdout;
use std::fmt::Display;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::fd::AsFd;
use std::sync::OnceLock;

/// Standard output as the process was given it, once [`keep_stdout_for_results`] has been called.
static KEPT: OnceLock<File> = OnceLock::new();

/// From now on only this module writes to standard output; what libraries print there, such as NVSHMEM with
/// NVSHMEM_DEBUG, goes to standard error.
pub fn keep_stdout_for_results() {
    // Without a free descriptor all stays as it is.
    let Ok(own) = std::io::stdout().as_fd().try_clone_to_owned() else { return };
    if KEPT.set(own.into()).is_ok() {
        let _ = dup2_stdout(std::io::stderr());
    }
}

/// Prints `text` to standard output at once. False where nobody reads it any more, which is no error.
///
/// # Errors
/// It can't be written.
pub fn print(text: &str) -> Result<bool, AppError> {
    let written = match KEPT.get() {
        Some(mut kept) => kept.write_all(text.as_bytes()),
        None => {
            let mut stdout = std::io::stdout().lock();
            stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush())
        }
    };
    match written {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(e) => Err(files::failed("standard output", &e)),
    }
}

/// Prints one line to standard output.
///
/// # Errors
/// As [`print()`].
pub fn print_line(line: &str) -> Result<(), AppError> {
    print(&format!("{line}\n")).map(|_| ())
}

/// Prints one line to standard error; that it can't be written changes nothing (`eprintln!` would panic).
pub fn tell(line: impl Display) {
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}
