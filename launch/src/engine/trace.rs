//! The timeline of all ranks.

use crate::engine::agreement::together;
use crate::engine::config::RunConfig;
use crate::engine::error::Error;
use crate::model::app_error::AppError;
use crate::model::files;
use distributed::{Rank, World};
use std::path::Path;

/// Checks before the run that the timeline can be written, if one is wanted.
///
/// # Errors
/// It cannot be written.
pub fn check(path: Option<&Path>) -> Result<(), AppError> {
    let Some(path) = path else { return Ok(()) };
    files::check(path).map_err(|error| failed(path, &error))
}

/// Collective: rank 0 writes the timeline, if one is wanted.
pub fn write(world: &World, config: &RunConfig, rank: &Rank) -> Result<(), Error> {
    let Some(path) = config.trace.as_deref() else { return Ok(()) };
    world.phase("the trace");
    let records = together(world, rank.trace().map_err(AppError::from))?;
    let events =
        distributed::trace::gather(world, rank.graphs(), &records, rank.clock(), config.trace_iterations);
    let written = if world.rank() == 0 {
        files::write(path, |out| distributed::trace::write(&events, out))
            .map_err(|error| failed(path, &error))
    } else {
        Ok(())
    };
    together(world, written)
}

fn failed(path: &Path, error: &std::io::Error) -> AppError {
    files::failed(format_args!("{} (RunConfig::trace)", path.display()), error)
}
