//! `mpirun -n N mpk-serve MODEL`: serves a model over HTTP, with OpenAI's API.

use clap::CommandFactory;
use launch::cli::process_limits::Allocator;
use launch::cli::serve_args::ServeArgs;
use launch::cli::signals::Signals;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn main() {
    ALLOCATOR.install();
    launch::model::files::report_size_limits();
    if let Some(status) = launch::cli::generated::serve(ServeArgs::command) {
        std::process::exit(status);
    }
    let args = match ServeArgs::from_command_line() {
        Ok(args) => args,
        Err(error) => {
            // Every rank sees the same command line: one tells.
            if launch::cli::logging::is_first_rank() {
                let _ = error.print();
            }
            std::process::exit(error.exit_code());
        }
    };
    launch::cli::logging::init(args.runtime.log_all_ranks);
    // Before there is any other thread.
    let signals = Signals::hold();
    launch::cli::program::exit(launch::cli::serve::run(&args, signals))
}
