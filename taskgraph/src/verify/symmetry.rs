//! Ranks that are the same up to their numbers: what is proven for one of them holds for all.
//!
//! The ranks are alike if rank r's graph is rank 0's graph with every rank number turned by r. Task i of one graph is
//! task i of the other, at the same place of the same list, and waits for the same events. Where task i of rank 0
//! reaches rank p, task i of rank r reaches rank p + r. Turning all numbers by one is then a symmetry of the whole set:
//! it maps tasks to tasks, events to events and every edge to an edge. So it maps the order to itself, and the accesses
//! to rank 0's memory to those to any other rank's.
//!
//! Bytes must be mapped too. Most tensors are accessed at the same bytes on all ranks. The others have equal *blocks* along one
//! dimension, which belong to the ranks in turn; with one block for each rank they are *slots*. A block is turned to the next rank's
//! block of the same group. An access is either inside one block, which is turned, or covers whole groups. This maps bytes to bytes one
//! to one, so accesses share bytes on rank 0 exactly where they do on rank r. Constants are an exception: no task
//! writes them, so a task of rank r may read other bytes than rank 0's.
//!
//! This is checked on the graphs themselves, without trusting the builder.

use super::boxes::Boxes;
use super::comparing::{Comparing, First};
use super::turn::Turn;
use crate::parallel;
use crate::region::Region;
use crate::task_graph::{TaskGraph, TensorEntry};

/// The symmetry of alike ranks.
#[derive(Debug)]
pub(super) struct Symmetry {
    turns: Vec<Turn>,
}

impl Symmetry {
    /// The symmetry of these graphs; `None` if ranks are not alike or there is only one. Rank 0's graph must be sound by itself.
    pub(super) fn of(graphs: &[TaskGraph]) -> Option<Symmetry> {
        let known = First::new(graphs.first()?);
        let compared = parallel::map(graphs.len().saturating_sub(1), |i| {
            let mut comparing = Comparing::new(&known, i + 1);
            comparing.operands(&graphs[i + 1].operands);
            Symmetry::of_compared(comparing, &graphs[i + 1])
        });
        Symmetry::of_all(&compared)
    }

    /// How a rank differs from the first, if these two are alike.
    pub(super) fn of_compared(comparing: Comparing<'_>, other: &TaskGraph) -> Option<Symmetry> {
        comparing.finish(other).map(|turns| Symmetry { turns })
    }

    /// The symmetry of all ranks, each of which has been compared with the first. All must differ from it by the same
    /// blocks. If one rank accesses a tensor exactly as the first does, while another rank's blocks turn, the ranks are
    /// not alike.
    pub(super) fn of_all(compared: &[Option<Symmetry>]) -> Option<Symmetry> {
        let first = compared.first()?.as_ref()?;
        let same = |other: &Option<Symmetry>| other.as_ref().is_some_and(|s| s.turns == first.turns);
        compared.iter().all(same).then(|| Symmetry { turns: first.turns.clone() })
    }

    /// True if both graphs' ranks turn in the same way in what the graphs share.
    pub(super) fn agrees(&self, own: &TaskGraph, other: &Symmetry, others: &TaskGraph) -> bool {
        let turning = |s: &Symmetry, g: &TaskGraph| -> Vec<(String, Turn)> {
            let shared = g.tensors.iter().zip(&s.turns).filter(|(t, _)| t.overlay.is_none());
            shared
                .filter(|(_, turn)| **turn != Turn::Still)
                .map(|(t, turn)| (t.name.clone(), *turn))
                .collect()
        };
        let agree = |turning: Vec<(String, Turn)>, s: &Symmetry, g: &TaskGraph| {
            turning.iter().all(|(name, turn)| {
                let there = g.tensors.iter().position(|t| t.name == *name);
                there.is_none_or(|t| s.turns[t] == *turn)
            })
        };
        agree(turning(self, own), other, others) && agree(turning(other, others), self, own)
    }

    /// The boxes that rank 0 accesses in a tensor, turned to `rank`.
    pub(super) fn turned(
        &self,
        index: u32,
        tensor: &TensorEntry,
        found: Boxes,
        world: usize,
        rank: usize,
    ) -> Boxes {
        let Turn::Blocks(blocks) = self.turns[index as usize] else { return found };
        blocks.turned_all(&found, world as u32, rank as u32).unwrap_or_else(|| {
            // This has been checked: each box is inside one block or covers groups of them. Returning the whole tensor is always safe.
            debug_assert!(false, "{found:?}");
            Boxes::from_slice(&[Region::whole(&tensor.dims)])
        })
    }
}
