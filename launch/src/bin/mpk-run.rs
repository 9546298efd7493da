//! `mpirun -n N mpk-run model.json`: runs a model as one persistent kernel per rank.

use launch::cli::args::{Args, Command};
use launch::cli::process_limits::Allocator;
use launch::cli::signals::Signals;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn main() {
    ALLOCATOR.install();
    launch::model::files::report_size_limits();
    if let Some(status) = launch::cli::generated::serve(Args::with_commands) {
        std::process::exit(status);
    }
    let first = launch::cli::logging::is_first_rank();
    let command = match Args::from_command_line() {
        Ok(command) => command,
        Err(error) => {
            // Every rank sees the same command line: one tells.
            if first {
                let _ = error.print();
            }
            std::process::exit(error.exit_code());
        }
    };
    let status = match command {
        Command::Run(args) => {
            launch::cli::logging::init(args.runtime.log_all_ranks);
            // Before there is any other thread.
            let signals = (first && args.is_conversation()).then(Signals::hold);
            launch::cli::run::run(&args, signals)
        }
        // Under a launcher one rank tells.
        Command::Doctor(_) if !first => 0,
        Command::Doctor(args) => {
            launch::cli::logging::init(false);
            launch::cli::doctor::run(&args)
        }
    };
    launch::cli::program::exit(status)
}
