//! Adds and cancels requests while the kernel runs: the hosts' part of `kernels-cu/protocol/admission.h`.
//!
//! Rank 0 creates a [`service`]: a [`Client`] for the threads that submit requests, and a [`Service`] for the main thread, which then
//! serves ([`Rank::lead`]). All other ranks call [`Rank::follow`]. Both return after the client has asked for the end.
//!
//! - An entry (a request, a cancel, the stop) goes to every other host with its payload. Each host writes it into its rank's ring,
//!   once its kernel has finished with the previous content, and confirms it. Rank 0's host writes an entry last, after all hosts have
//!   confirmed it. Its kernel decides when the entry takes effect.
//! - All memory is limited: request numbers, places for tokens, entries of the ring. A request waits on the host until there is room.
//!   If too many wait, `submit` returns [`SubmitError::Full`]. A request in the kernel has room for all the tokens that it may yield.
//!   So neither a slow host nor a slow reader stops the kernel or another request.
//! - A kernel without work ends after [`crate::plan::ServePlan::idle_exit`]. Rank 0 starts all kernels again when an entry arrives.
//!   Weights, KV cache and the batch step's state stay in memory.

mod arena;
mod bells;
mod client;
mod eager;
mod follower;
mod leader;
mod prefix;
mod reader;
mod results;
mod serve;
mod sink;
mod table;
mod target;
mod wire;

pub use client::{Client, Stats, Submission, SubmitError};
pub use leader::Service;
pub use reader::Reader;
pub use sink::{End, Sink, Token};

use crate::bell::Bell;
use crate::error::{Error, Result};
use crate::plan::BatchPlan;
use crate::rank::Rank;
use crate::world::World;
use client::Shared;
use follower::Follower;
use leader::Leader;
use serve::serve;
use target::Target;

/// Both ends of a service on rank 0; `None` if the plan's mode is not [`crate::plan::Mode::Serve`]. At most `most_waiting` requests
/// wait on the host. Requests may be submitted before the rank serves.
pub fn service(plan: &BatchPlan, most_waiting: usize) -> Option<(Client, Service)> {
    let shared = Shared::new(plan, most_waiting)?;
    Some((shared.client(), Service(shared)))
}

/// The bell that a host sleeps on. If its kernel does not ring it, the hosts of a node should be able to.
fn host_bell(world: &World, target: &impl Target) -> Bell {
    let bell = target.bell();
    if bell.of_kernel { bell } else { world.bell().map_or(bell, Bell::of_hosts) }
}

impl Rank {
    /// Collective, on rank 0 while the other ranks call [`Rank::follow`]: serves until [`Client::shutdown`] and the end of the last
    /// request. Must be called on the thread that created the world.
    ///
    /// # Errors
    /// Those of [`Rank::run`]. All sinks get [`End::Lost`], after [`World::tell`].
    pub fn lead(&mut self, world: &World, service: Service) -> Result<()> {
        match self {
            Rank::Cpu(rank) => {
                let bell = host_bell(world, rank.as_ref());
                let mut leader = Leader::new(service, world, bell, rank.outputs());
                serve(rank.as_mut(), world, bell, &mut leader)
            }
            Rank::Cuda(rank) => {
                let bell = host_bell(world, rank.as_ref());
                let mut leader = Leader::new(service, world, bell, rank.outputs());
                serve(rank.as_mut(), world, bell, &mut leader)
            }
        }
    }

    /// Collective, on all ranks except 0: serves until rank 0 ends the service.
    ///
    /// # Errors
    /// Those of [`Rank::run`].
    pub fn follow(&mut self, world: &World) -> Result<()> {
        if world.rank() == 0 {
            return Err(Error::Aborted("rank 0 must lead and cannot follow".into()));
        }
        match self {
            Rank::Cpu(rank) => {
                let bell = host_bell(world, rank.as_ref());
                let mut follower = Follower::new(world, bell);
                serve(rank.as_mut(), world, bell, &mut follower)
            }
            Rank::Cuda(rank) => {
                let bell = host_bell(world, rank.as_ref());
                let mut follower = Follower::new(world, bell);
                serve(rank.as_mut(), world, bell, &mut follower)
            }
        }
    }
}
