//! `mpirun -n N mpk-run model.json`: runs a model as one persistent kernel per rank.

use launch::cli::Args;

fn main() {
    let first = launch::logging::is_first_rank();
    let args = match Args::from_command_line() {
        Ok(args) => args,
        Err(error) => {
            // Every rank sees the same command line: one tells.
            if first {
                let _ = error.print();
            }
            std::process::exit(error.exit_code());
        }
    };
    launch::logging::init(args.log_all_ranks);
    std::process::exit(launch::session::run(&args));
}
