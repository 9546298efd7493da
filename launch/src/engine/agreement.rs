//! How ranks agree on errors.

use crate::model::app_error::AppError;
use distributed::World;

/// The exit status that all ranks agreed on; the message has been printed by one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit(pub i32);

/// Collective: goes on where every rank's step went well; otherwise the first rank that failed tells its error
/// (see [`World::tell`]) and all get its status.
pub fn together<T>(world: &World, result: Result<T, AppError>) -> Result<T, Exit> {
    let status = result.as_ref().err().map_or(0, |e| e.status);
    match world.agree(status) {
        None => result.map_err(|e| Exit(e.status)),
        Some((rank, status)) => {
            if let Err(error) = &result
                && rank == world.rank()
            {
                world.tell(&error.message);
            }
            Err(Exit(status))
        }
    }
}
