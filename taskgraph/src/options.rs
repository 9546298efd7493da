//! The options of building graphs.

use crate::error::BuildError;
use crate::target::Target;
use crate::task_graph::{Allreduce, Placement};

/// The options of building graphs.
#[derive(Clone, Debug, PartialEq)]
pub struct BuildOptions {
    /// Number of ranks.
    pub world: u32,
    /// What decides where tasks run.
    pub placement: Placement,
    /// How allreduces are carried out.
    pub allreduce: Allreduce,
    /// The node of each rank, numbered in the order of their first ranks. Empty if all ranks are on one node.
    pub nodes: Vec<u32>,
    /// Ranks on one node reach each other's memory with plain stores, so tasks may write results for a peer there.
    pub within_reach: bool,
    /// Machine.
    pub target: Target,
    /// Set to false only to show what the protection prevents. Receive buffers are then shared without regard to peers
    /// that may still read them. Such graphs do not pass the verifier.
    pub protected: bool,
}

impl BuildOptions {
    /// Static placement, with allreduces chosen by size.
    pub fn new(world: u32, target: Target) -> Self {
        BuildOptions {
            world,
            placement: Placement::Static,
            allreduce: Allreduce::Auto,
            nodes: Vec::new(),
            within_reach: true,
            target,
            protected: true,
        }
    }

    /// True if every rank reaches the memory of every other with plain stores.
    pub(crate) fn all_within_reach(&self) -> bool {
        self.within_reach && self.nodes.iter().all(|&node| node == 0)
    }

    pub(crate) fn check(&self) -> Result<(), BuildError> {
        let error = |message: &str| Err(BuildError::Options(message.into()));
        if self.world == 0 || self.world > u32::from(u16::MAX) {
            return error("the number of ranks must be 1 to 65535");
        }
        let mut next = 0;
        let counted = self.nodes.iter().all(|&node| {
            next = next.max(node + 1).min(next + 1);
            node < next
        });
        if !self.nodes.is_empty() && (self.nodes.len() != self.world as usize || !counted) {
            return error(
                "there must be one node per rank, and nodes must be numbered from 0 in the order of their first ranks",
            );
        }
        if self.target.workers == 0 || self.target.max_tiles == 0 || self.target.column_unit == 0 {
            return error("the target needs at least one worker, one tile and a column unit");
        }
        Ok(())
    }
}
