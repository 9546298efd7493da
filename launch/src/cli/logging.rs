//! Logs go to stderr, from rank 0 only unless `--log-all-ranks` is given.

use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;

/// Environment variables in which launchers put this process's rank.
const RANK_VARIABLES: [&str; 3] = ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"];

/// True on rank 0 and without a launcher. Works before MPI is initialised.
pub fn is_first_rank() -> bool {
    RANK_VARIABLES.iter().find_map(|v| std::env::var(v).ok()).is_none_or(|rank| rank == "0")
}

/// Sets up logging; the level comes from `MPK_LOG` (default `info`).
pub fn init(all_ranks: bool) {
    if all_ranks || is_first_rank() {
        let filter = EnvFilter::try_from_env("MPK_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
        tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            // They would be printed with `eprintln!`, which panics if standard error is closed.
            .log_internal_errors(false)
            .with_ansi(std::io::stderr().is_terminal())
            .with_target(false)
            .init();
    }
}
