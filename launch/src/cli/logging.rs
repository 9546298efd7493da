//! Logs go to stderr, from rank 0 unless asked.

use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;

/// Variables in which launchers put this process's rank.
const RANK_VARIABLES: [&str; 3] = ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"];

/// True on rank 0, and without a launcher. Known before MPI is initialised.
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
            // They would be told by `eprintln!`, which panics where standard error is closed.
            .log_internal_errors(false)
            .with_ansi(std::io::stderr().is_terminal())
            .with_target(false)
            .init();
    }
}
