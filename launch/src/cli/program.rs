//! What the programs that run a model do around the engine.

use crate::cli::console::{keep_stdout_for_results, print, tell};
use crate::cli::logging::is_first_rank;
use crate::cli::process_limits;
use crate::cli::runtime_args::RuntimeArgs;
use crate::engine::config::Progress;
use crate::engine::{Error, ErrorKind, RunConfig};
use crate::model::app_error::AppError;
use distributed::launcher::launched_by_mpi;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// Before the engine is loaded: the process has what it takes, and its standard output is kept for results.
///
/// # Errors
/// A limit of the process is too low.
pub fn prepare(runtime: &RuntimeArgs) -> Result<(), AppError> {
    process_limits::check(process_limits::ranks_here())?;
    if runtime.gpu_possible() {
        keep_stdout_for_results();
    }
    Ok(())
}

/// `config` with what a program shows on standard error: why the job ends, and on a terminal how far loading is.
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

/// Before anything else: what signals do in this program.
pub fn handle_signals() {
    if let Err(error) = kernels_cu::signals::install() {
        tell(format_args!("{}: Ctrl-C ends this program without an orderly end: {error}", name()));
    }
}

/// Prints what reading the command line gave: help or the version, to standard output, or what is wrong. Gives the exit status.
pub fn tell_usage(error: &clap::Error) -> i32 {
    // Every rank sees the same command line: one tells.
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

/// The program's name, as it was called.
fn name() -> String {
    let called = std::env::args_os().next();
    let file = called.as_deref().map(Path::new).and_then(Path::file_name);
    file.map_or("mpk-run".into(), |file| file.to_string_lossy().into_owned())
}

/// Tells an error that concerns all ranks, once; gives its exit status.
pub fn tell_once(error: &AppError) -> i32 {
    if is_first_rank() {
        tell(format_args!("{}: error: {error}", name()));
    }
    error.status
}

/// What ends the program on rank 0.
#[derive(Debug)]
pub struct Failure {
    error: AppError,
    /// By the engine.
    told: bool,
}

impl Failure {
    /// Tells it unless it has been told; gives its exit status.
    pub fn tell(self) -> i32 {
        if self.told { self.error.status } else { tell_once(&self.error) }
    }
}

impl From<AppError> for Failure {
    fn from(error: AppError) -> Failure {
        Failure { error, told: false }
    }
}

impl From<Error> for Failure {
    /// What the engine refuses has not been told; what ends it has.
    fn from(error: Error) -> Failure {
        let told = error.kind() == ErrorKind::Failed;
        Failure { error: error.into(), told }
    }
}

/// Ends the process. After a failed run on GPUs, and where other ranks have ended already, the exit handlers of libraries
/// are left out: they might wait.
pub fn exit(status: i32) -> ! {
    if launched_by_mpi() || distributed::cuda::must_leave_at_once() {
        let _ = std::io::stdout().flush();
        // SAFETY: ends the process at once; nothing of it is used any more.
        unsafe { libc::_exit(status) };
    }
    std::process::exit(status)
}
