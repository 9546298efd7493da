//! How ranks agree on errors, so that all of them make the same collective calls.

use crate::error::{Error, Result};
use crate::meeting::numbers;
use crate::world::{World, agreed};
use std::time::Duration;

impl World {
    /// Agrees on the outcome of a step. `status` is 0 if the step succeeded on this rank. Returns, on every rank, the first rank whose
    /// status is not 0 and that status.
    pub fn agree(&self, status: i32) -> Option<(u32, i32)> {
        self.agree_within(None, status)
    }

    fn agree_within(&self, limit: Option<Duration>, status: i32) -> Option<(u32, i32)> {
        let own = u64::from(status as u32);
        let limit = limit.map(|limit| self.hurried(limit));
        let all = self.exchange_within(own.to_ne_bytes().to_vec(), limit);
        let status_of = |bytes: &Vec<u8>| numbers(bytes).first().copied().unwrap_or(own) as u32 as i32;
        (0..).zip(all.iter().map(status_of)).find(|&(_, status)| status != 0)
    }

    /// Collective: the first rank that has an error, and that error as all other ranks report it. If the ranks have not all arrived within
    /// `limit`, the job ends.
    pub(crate) fn first_failed(
        &self,
        limit: Option<Duration>,
        error: Option<&Error>,
    ) -> Option<(u32, Error)> {
        if self.size() == 1 {
            return None;
        }
        let (rank, status) = self.agree_within(limit, error.map_or(0, Error::exit_status))?;
        let own = error.map(|error| error.whole().into_bytes()).unwrap_or_default();
        let message = String::from_utf8_lossy(&self.broadcast(rank, own)).into_owned();
        Some((rank, Error::AtRank { rank, status, message }))
    }

    /// Collective: the last meeting before a launch, when every rank's memory is ready. `ready` says whether this rank can launch. Either
    /// all ranks launch or none.
    ///
    /// While ranks serve, one may fail before it hears that the others launch. Then this meeting is paired with its last one
    /// ([`World::part`]), in which it reports its error.
    pub(crate) fn begin_launch(&self, ready: Result<()>) -> Result<()> {
        agreed(self, ready.and_then(|()| self.launch_fault()))
    }

    /// Collective: the last meeting of ranks that have served, whatever the end of each. `error` is this rank's.
    pub(crate) fn part(&self, limit: Duration, error: Option<&Error>) {
        self.first_failed(Some(limit), error);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_rank_keeps_its_own_error() {
        let world = World::single();
        assert_eq!((world.agree(0), world.agree(3)), (None, Some((0, 3))));
        let error = Error::Aborted("the reason".into());
        assert!(world.first_failed(None, Some(&error)).is_none());
        assert!(world.begin_launch(Ok(())).is_ok());
        let failed = world.begin_launch(Err(error)).map_err(|error| error.to_string());
        assert_eq!(failed, Err("the reason".to_string()));
    }
}
