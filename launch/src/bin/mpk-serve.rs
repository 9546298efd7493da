//! `mpirun -n N mpk-serve MODEL`: serves a model over HTTP, with OpenAI's API.

use clap::CommandFactory;
use kernels_cu::signals::Watched;
use launch::cli::process_limits::Allocator;
use launch::cli::serve_args::ServeArgs;
use launch::model::app_error::AppError;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn main() {
    ALLOCATOR.install();
    // SAFETY: the first thread is still the only one.
    unsafe { distributed::affinity::yield_in_mpi() };
    launch::model::files::report_size_limits();
    launch::cli::program::handle_signals();
    if let Some(status) = launch::cli::generated::serve(ServeArgs::command) {
        std::process::exit(status);
    }
    let args = match ServeArgs::from_command_line() {
        Ok(args) => args,
        Err(error) => std::process::exit(launch::cli::program::tell_usage(&error)),
    };
    launch::cli::logging::init(args.runtime.log_all_ranks);
    let status = Watched::begin().map_or_else(
        |error| {
            launch::cli::program::tell_once(&AppError::environment(format!(
                "signals cannot be handled: {error}"
            )))
        },
        |signals| launch::cli::serve::run(&args, signals),
    );
    launch::cli::program::exit(status)
}
