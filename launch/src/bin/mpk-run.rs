//! `mpirun -n N mpk-run model.json`: runs a model as one persistent kernel per rank.

use kernels_cu::signals::Watched;
use launch::cli::args::{Args, Command};
use launch::cli::process_limits::Allocator;
use launch::model::app_error::AppError;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn main() {
    ALLOCATOR.install();
    // SAFETY: the first thread is still the only one.
    unsafe { distributed::affinity::yield_in_mpi() };
    launch::model::files::report_size_limits();
    launch::cli::program::handle_signals();
    if let Some(status) = launch::cli::generated::serve(Args::with_commands) {
        std::process::exit(status);
    }
    let first = launch::cli::logging::is_first_rank();
    let command = match Args::from_command_line() {
        Ok(command) => command,
        Err(error) => std::process::exit(launch::cli::program::tell_usage(&error)),
    };
    let status = match command {
        Command::Run(args) => {
            launch::cli::logging::init(args.runtime.log_all_ranks);
            let watched = (first && args.is_conversation()).then(Watched::begin).transpose();
            watched.map_or_else(
                |error| {
                    launch::cli::program::tell_once(&AppError::environment(format!(
                        "signals cannot be handled: {error}"
                    )))
                },
                |signals| launch::cli::run::run(&args, signals),
            )
        }
        // Under a launcher only one rank prints.
        Command::Doctor(_) if !first => 0,
        Command::Doctor(args) => {
            launch::cli::logging::init(false);
            launch::cli::doctor::run(&args)
        }
    };
    launch::cli::program::exit(status)
}
