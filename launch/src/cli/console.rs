//! The process's standard output and standard error.

use crate::cli::options::in_options;
use crate::model::app_error::AppError;
use crate::model::files;
use rustix::stdio::dup2_stdout;
use std::fmt::Display;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::fd::AsFd;
use std::sync::OnceLock;

/// The process's original standard output, once [`keep_stdout_for_results`] has been called.
static KEPT: OnceLock<File> = OnceLock::new();

/// Reserves standard output for this module. From now on, output of libraries goes to standard error, such as NVSHMEM's
/// with NVSHMEM_DEBUG.
pub fn keep_stdout_for_results() {
    // Without a free descriptor, standard output stays as it is.
    let Ok(own) = std::io::stdout().as_fd().try_clone_to_owned() else { return };
    if KEPT.set(own.into()).is_ok() {
        let _ = dup2_stdout(std::io::stderr());
    }
}

/// Prints `text` to standard output at once. Returns false if standard output no longer has a reader; this is not an
/// error.
///
/// # Errors
/// Standard output cannot be written.
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

/// Prints one line to standard error, with options in place of the library's fields. A failed write is ignored, where `eprintln!`
/// would panic.
pub fn tell(line: impl Display) {
    let _ = std::io::stderr().write_all(in_options(&format!("{line}\n")).as_bytes());
}
