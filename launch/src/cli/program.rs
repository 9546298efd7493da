//! What the programs that run a model do before and after the engine runs.

use crate::cli::console::{keep_stdout_for_results, print, tell};
use crate::cli::logging::is_first_rank;
use crate::cli::process_limits;
use crate::cli::runtime_args::RuntimeArgs;
use crate::engine::config::Progress;
use crate::engine::{Error, ErrorKind, RunConfig};
use crate::model::app_error::AppError;
use distributed::launcher::{launched_by_mpi, ranks_here};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// Called before the engine is loaded. Checks the process's limits and reserves standard output for results.
///
/// # Errors
/// A limit of the process is too low.
pub fn prepare(runtime: &RuntimeArgs) -> Result<(), AppError> {
    process_limits::check(ranks_here())?;
    if runtime.gpu_possible() {
        keep_stdout_for_results();
    }
    Ok(())
}

/// `config` with what a program shows on standard error: why the job ends, and on a terminal a progress bar while it loads.
pub fn with_console(config: RunConfig) -> RunConfig {
    RunConfig {
        tell: |message| tell(format_args!("{}: error: {message}", name())),
        progress: std::io::stderr().is_terminal().then(progress),
        ..config
    }
}

fn progress() -> Progress {
    let bar: OnceLock<ProgressBar> = OnceLock::new();
    Progress(Arc::new(move |bytes, total| {
        let bar = bar.get_or_init(|| {
            let bar = ProgressBar::new(total);
            let style = "loading {bar:40} {bytes}/{total_bytes} {binary_bytes_per_sec}";
            ProgressStyle::with_template(style).map_or(bar.clone(), |style| bar.with_style(style))
        });
        bar.inc(bytes);
        if bar.position() >= total {
            bar.finish_and_clear();
        }
    }))
}

/// Sets up signals. Must be called first.
pub fn handle_signals() {
    if let Err(error) = kernels_cu::signals::install() {
        tell(format_args!(
            "{}: signals cannot be handled, so Ctrl-C ends this program at once: {error}",
            name()
        ));
    }
}

/// Prints the outcome of reading the command line: help or version on standard output, errors on standard error. Returns the
/// exit status.
pub fn tell_usage(error: &clap::Error) -> i32 {
    // Every rank reads the same command line, so one rank prints.
    if !is_first_rank() {
        return error.exit_code();
    }
    if error.use_stderr() {
        let _ = error.print();
        return error.exit_code();
    }
    let text = error.render();
    let text = if std::io::stdout().is_terminal() { text.ansi().to_string() } else { text.to_string() };
    print(&text).map_or_else(|error| tell_once(&error), |_| error.exit_code())
}

/// The name under which the program was called.
fn name() -> String {
    let called = std::env::args_os().next();
    let file = called.as_deref().map(Path::new).and_then(Path::file_name);
    file.map_or("mpk-run".into(), |file| file.to_string_lossy().into_owned())
}

/// Prints an error that concerns all ranks once. Returns its exit status.
pub fn tell_once(error: &AppError) -> i32 {
    if is_first_rank() {
        tell(format_args!("{}: error: {error}", name()));
    }
    error.status
}

/// An error that ends the program on rank 0.
#[derive(Debug)]
pub struct Failure {
    error: AppError,
    /// The engine has printed it already.
    told: bool,
}

impl Failure {
    /// Prints the error unless the engine has done so. Returns its exit status.
    pub fn tell(self) -> i32 {
        if self.told { self.error.status } else { tell_once(&self.error) }
    }
}

impl Failure {
    /// An error that ends the engine, which has printed it.
    pub fn told(error: Error) -> Failure {
        Failure { error: error.into(), told: true }
    }
}

impl From<AppError> for Failure {
    fn from(error: AppError) -> Failure {
        Failure { error, told: false }
    }
}

impl From<Error> for Failure {
    /// The engine prints the error that ends it, but not the error of a refused request.
    fn from(error: Error) -> Failure {
        let told = error.kind() == ErrorKind::Failed;
        Failure { error: error.into(), told }
    }
}

/// Ends the process. After a failed run on GPUs, and if other ranks have already ended, the libraries' exit handlers are
/// skipped because they might wait.
pub fn exit(status: i32) -> ! {
    if launched_by_mpi() || distributed::cuda::must_leave_at_once() {
        let _ = std::io::stdout().flush();
        // SAFETY: ends the process at once, so nothing of it is used afterwards.
        unsafe { libc::_exit(status) };
    }
    std::process::exit(status)
}
