//! Ranks that are the same up to their numbers: what is proven of one then holds for all.
//!
//! The ranks are alike if rank r's graph is rank 0's with every rank number turned on by r: task i of the one is task i
//! of the other, in the same place of the same list, waits for the same events, and where task i of rank 0 reaches rank
//! p, that of rank r reaches p + r. Turning all numbers on by one is then a symmetry of the whole set: it maps tasks to
//! tasks, events to events and every edge to an edge. So it maps the order to itself, and the accesses to rank 0's memory
//! to those to any other rank's.
//!
//! Bytes must go along. Most tensors are touched at the same bytes on all ranks. The others have a *slot* for each rank
//! along one dimension, which turns too: an access takes the slot of one rank, that is turned, or all of them. This maps
//! bytes to bytes one to one, so accesses share bytes on rank 0 exactly where they do on rank r. Of constants, which nobody
//! writes, a task of rank r may read other bytes than rank 0's.
//!
//! This is checked of the graphs themselves; nothing is taken from the builder's word.

use super::boxes::Boxes;
use super::comparing::{Comparing, First};
use super::turn::{Turn, turned};
use crate::parallel;
use crate::region::Region;
use crate::task_graph::{TaskGraph, TensorEntry};

/// The symmetry of alike ranks.
#[derive(Debug)]
pub(super) struct Symmetry {
    turns: Vec<Turn>,
}

impl Symmetry {
    /// The symmetry of these graphs; `None` where ranks are not alike, or there is one only. Rank 0's graph is sound by
    /// itself.
    pub(super) fn of(graphs: &[TaskGraph]) -> Option<Symmetry> {
        let known = First::new(graphs.first()?);
        let compared = parallel::map(graphs.len().saturating_sub(1), |i| {
            let mut comparing = Comparing::new(&known, i + 1);
            comparing.operands(&graphs[i + 1].operands);
            Symmetry::of_compared(comparing, &graphs[i + 1])
        });
        Symmetry::of_all(&compared)
    }

    /// How a rank differs from the first, if it is alike as far as these two tell.
    pub(super) fn of_compared(comparing: Comparing<'_>, other: &TaskGraph) -> Option<Symmetry> {
        comparing.finish(other).map(|turns| Symmetry { turns })
    }

    /// The symmetry of all ranks, each of which has been compared with the first. All differ from it by the same slots: a
    /// rank that touches a tensor just as the first does, while another's slots turn, is not alike.
    pub(super) fn of_all(compared: &[Option<Symmetry>]) -> Option<Symmetry> {
        let first = compared.first()?.as_ref()?;
        let same = |other: &Option<Symmetry>| other.as_ref().is_some_and(|s| s.turns == first.turns);
        compared.iter().all(same).then(|| Symmetry { turns: first.turns.clone() })
    }

    /// Both graphs' ranks turn in the same way in what the graphs share.
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

    /// Boxes that rank 0 touches of a tensor, as `rank` does.
    pub(super) fn turned(
        &self,
        index: u32,
        tensor: &TensorEntry,
        found: Boxes,
        world: usize,
        rank: usize,
    ) -> Boxes {
        let Turn::Slots(d) = self.turns[index as usize] else { return found };
        let d = usize::from(d);
        turned(&found, d, tensor.dims[d], world as u32, rank as u32).unwrap_or_else(|| {
            // It was looked at: each box is of one slot or of all. All of the tensor is never too little.
            debug_assert!(false, "{found:?}");
            Boxes::from_slice(&[Region::whole(&tensor.dims)])
        })
    }
}
