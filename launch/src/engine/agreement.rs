//! How ranks agree on errors.

use crate::engine::error::Error;
use crate::model::app_error::AppError;
use distributed::World;

/// Collective: returns the value if every rank's step succeeded. Otherwise the first rank that failed reports its error
/// (see [`World::tell`]), and every rank gets that error.
pub fn together<T>(world: &World, result: Result<T, AppError>) -> Result<T, Error> {
    let status = result.as_ref().err().map_or(0, |e| e.status);
    let Some((rank, status)) = world.agree(status) else { return result.map_err(Error::from) };
    if let Err(error) = &result
        && rank == world.rank()
    {
        world.tell(&error.to_string());
    }
    let own = result.as_ref().err().map(|error| error.to_string().into_bytes()).unwrap_or_default();
    let message = world.broadcast(rank, own);
    match result {
        Err(error) if rank == world.rank() => Err(error.into()),
        _ => Err(Error::at_rank(rank, status, String::from_utf8_lossy(&message).into_owned())),
    }
}
