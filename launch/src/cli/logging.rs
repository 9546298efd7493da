//! Logs go to stderr, from rank 0 only unless `--log-all-ranks` is given.

use crate::cli::options::in_options;
use std::io::{self, IsTerminal, Stderr, Write};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// Environment variable with the level.
const VARIABLE: &str = "MPK_LOG";

/// True on rank 0 and without a launcher. Works before MPI is initialised.
pub fn is_first_rank() -> bool {
    distributed::launcher::is_first()
}

/// Sets up logging; the level comes from `MPK_LOG` (default `info`).
pub fn init(all_ranks: bool) {
    if all_ranks || is_first_rank() {
        let given = std::env::var(VARIABLE).unwrap_or_default();
        let (filter, problem) = filter(&given);
        tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(|| InOptions(std::io::stderr()))
            // They would be printed with `eprintln!`, which panics if standard error is closed.
            .log_internal_errors(false)
            .with_ansi(std::io::stderr().is_terminal())
            .with_target(false)
            .init();
        if let Some(problem) = problem {
            tracing::warn!("{VARIABLE}={given}: {problem}; logging at level info");
        }
    }
}

/// Writes lines with options in place of the library's fields. The formatter writes each line at once.
struct InOptions(Stderr);

impl Write for InOptions {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = match std::str::from_utf8(bytes) {
            Ok(text) => self.0.write_all(in_options(text).as_bytes()),
            Err(_) => self.0.write_all(bytes),
        };
        written.map(|()| bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// The filter that `MPK_LOG` asks for; the default if it is invalid, with the reason.
fn filter(given: &str) -> (EnvFilter, Option<String>) {
    let default = || EnvFilter::new("info");
    if given.trim().is_empty() {
        return (default(), None);
    }
    // A single word that is not a level would be taken for the only part of the program that logs.
    let is_level = |word: &str| word.parse::<LevelFilter>().is_ok();
    let wrong =
        given.split(',').map(str::trim).find(|part| !part.contains(['=', ':', '[']) && !is_level(part));
    if let Some(wrong) = wrong {
        let levels = "off, error, warn, info, debug, trace, or PART=LEVEL such as launch::serve=debug";
        return (default(), Some(format!("`{wrong}` is not a level; expected {levels}")));
    }
    match EnvFilter::try_new(given) {
        Ok(filter) => (filter, None),
        Err(error) => (default(), Some(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_log_levels_are_reported_and_replaced() {
        for fine in ["", "debug", "INFO", "off", "info,launch::serve=debug", "distributed=trace"] {
            assert_eq!(filter(fine).1, None, "{fine}");
        }
        assert_eq!(filter("").0.to_string(), "info");
        for wrong in ["nonsense", "info,verbose", "launch=loud"] {
            let (filter, problem) = filter(wrong);
            assert!(problem.is_some() && filter.to_string() == "info", "{wrong}: {problem:?}");
        }
    }
}
