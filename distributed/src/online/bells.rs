//! The bells of other ranks' hosts.

use crate::bell::Bell;
use crate::nodes::Ringer;
use crate::world::World;

/// The bells that a host rings after it has sent a message.
pub(super) struct Bells {
    /// Those of this node.
    near: Vec<Bell>,
    /// On rank 0: the proxy, which rings those of other nodes. Rank 0's own host checks often enough while it waits for an answer.
    far: Option<Ringer>,
}

impl Bells {
    /// For a host with this `bell`: rank 0's host rings those of all other hosts, and these ring rank 0's. If the kernel rings the hosts,
    /// those of this node are reached through the target.
    pub fn new(world: &World, bell: Bell) -> Bells {
        let first = world.rank() == 0;
        let near = if bell.of_kernel { Vec::new() } else { world.other_bells() };
        let near = near.into_iter().filter(|(rank, _)| first || *rank == 0);
        Bells {
            near: near.map(|(_, word)| Bell::of_hosts(word)).collect(),
            far: world.proxy().filter(|_| first).map(|proxy| proxy.ringer()),
        }
    }

    /// Those of this node.
    pub fn near(&self) -> &[Bell] {
        &self.near
    }

    pub fn ring(&self) {
        self.near.iter().for_each(|bell| bell.ring());
        self.far.iter().for_each(Ringer::ring);
    }
}
