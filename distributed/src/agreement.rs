//! Steps that all ranks take or none.

use crate::error::{Error, Result};
use crate::world::World;

/// Collective: goes on where every rank's step went well; otherwise every rank gets the first error, so that none
/// goes on to a collective call that another will not make.
pub(crate) fn agreed<T>(world: &World, result: Result<T>) -> Result<T> {
    if world.size() == 1 {
        return result;
    }
    let status = result.as_ref().err().map_or(0, Error::exit_status);
    let Some((rank, status)) = world.agree(status) else { return result };
    let own = result.as_ref().err().map(|e| e.to_string().into_bytes()).unwrap_or_default();
    let message = world.broadcast(rank, own);
    match result {
        Err(error) if rank == world.rank() => Err(error),
        _ => Err(Error::AtRank { rank, status, message: String::from_utf8_lossy(&message).into_owned() }),
    }
}
