//! The ranks of a graph class as the verifier sees them: all graphs, or rank 0's graph, from which the others are turned.
//!
//! If ranks are alike (see `symmetry`), only rank 0's graph is kept. So only these questions about another rank have an
//! answer. What all ranks share (tasks and their operators, events, tensors except for the source of their values) is
//! taken from rank 0. The ranks that it reaches are turned by `order` and `access`. The bytes that it accesses are
//! turned by [`Ranks::boxes`]. The verifier does not use places or regions of another rank in any other way.

use super::boxes::{Boxes, Scattered, boxes};
use super::symmetry::Symmetry;
use crate::task_graph::{Operand, TaskGraph, TensorEntry};
use crate::trust::RowShares;
use std::ops::Index;

/// All ranks of a class.
#[derive(Clone, Copy)]
pub(super) struct Ranks<'g> {
    /// The graphs of all ranks, or only rank 0's.
    graphs: &'g [TaskGraph],
    world: usize,
    view: Option<View<'g>>,
}

#[derive(Clone, Copy)]
struct View<'g> {
    symmetry: &'g Symmetry,
    /// Tensors of the ranks after rank 0.
    others: Others<'g>,
}

#[derive(Clone, Copy)]
enum Others<'g> {
    /// In their graphs.
    Graphs(&'g [TaskGraph]),
    /// Kept separately.
    Tensors(&'g [Vec<TensorEntry>]),
}

impl<'g> Ranks<'g> {
    /// Each rank by itself.
    pub(super) fn all(graphs: &'g [TaskGraph]) -> Ranks<'g> {
        Ranks { graphs, world: graphs.len(), view: None }
    }

    /// The graphs' ranks are alike, so rank 0 stands for all.
    pub(super) fn alike(graphs: &'g [TaskGraph], symmetry: &'g Symmetry) -> Ranks<'g> {
        let view = View { symmetry, others: Others::Graphs(graphs) };
        Ranks { graphs: &graphs[..1], world: graphs.len(), view: Some(view) }
    }

    /// The graphs of all ranks, which are alike if there is a symmetry.
    pub(super) fn of_graphs(graphs: &'g [TaskGraph], symmetry: Option<&'g Symmetry>) -> Ranks<'g> {
        match symmetry {
            Some(symmetry) => Ranks::alike(graphs, symmetry),
            None => Ranks::all(graphs),
        }
    }

    /// The same for ranks of which only the first's graph and the others' tensors were kept.
    pub(super) fn kept(
        first: &'g TaskGraph,
        others: &'g [Vec<TensorEntry>],
        symmetry: &'g Symmetry,
    ) -> Ranks<'g> {
        let view = View { symmetry, others: Others::Tensors(others) };
        Ranks { graphs: std::slice::from_ref(first), world: others.len() + 1, view: Some(view) }
    }

    /// `world` ranks that are assumed to be like the first. For checks of the first before they are compared.
    pub(super) fn like(first: &'g TaskGraph, world: usize) -> Ranks<'g> {
        Ranks { graphs: std::slice::from_ref(first), world, view: None }
    }

    /// Number of ranks.
    pub(super) fn len(&self) -> usize {
        self.world
    }

    /// The graphs that are checked.
    pub(super) fn held(&self) -> &'g [TaskGraph] {
        self.graphs
    }

    /// How ranks are alike.
    pub(super) fn symmetry(&self) -> Option<&'g Symmetry> {
        self.view.map(|view| view.symmetry)
    }

    /// A rank's graph, or the graph from which it is turned.
    pub(super) fn of(&self, rank: usize) -> &'g TaskGraph {
        if self.graphs.len() < self.world && rank < self.world { &self.graphs[0] } else { &self.graphs[rank] }
    }

    /// The rank, if it exists.
    pub(super) fn get(&self, rank: usize) -> Option<&'g TaskGraph> {
        (rank < self.world).then(|| self.of(rank))
    }

    /// The graphs of all ranks.
    pub(super) fn iter(&self) -> impl Iterator<Item = &'g TaskGraph> + use<'g> {
        let ranks = *self;
        (0..self.world).map(move |rank| ranks.of(rank))
    }

    /// A rank's own tensors, with the source of their values.
    pub(super) fn tensors(&self, rank: usize) -> &'g [TensorEntry] {
        match self.view {
            Some(View { others: Others::Graphs(graphs), .. }) => &graphs[rank].tensors,
            Some(View { others: Others::Tensors(others), .. }) if rank > 0 => &others[rank - 1],
            _ => &self.of(rank).tensors,
        }
    }

    /// True if the graph that stands for the rank is another rank's.
    pub(super) fn turns(&self, rank: usize) -> bool {
        self.view.is_some() && rank > 0
    }

    /// The boxes that `rank` accesses through `operand`, which belongs to the graph that [`Ranks::of`] returns. Not for
    /// constants: each rank reads its own bytes of these.
    pub(super) fn boxes(
        &self,
        rank: usize,
        tensor: &TensorEntry,
        operand: &Operand,
        shares: RowShares,
    ) -> Result<Boxes, Scattered> {
        let found = boxes(tensor, operand, shares)?;
        match self.view {
            Some(view) if self.turns(rank) => {
                Ok(view.symmetry.turned(operand.tensor, tensor, found, self.world, rank))
            }
            _ => Ok(found),
        }
    }
}

impl Index<usize> for Ranks<'_> {
    type Output = TaskGraph;

    fn index(&self, rank: usize) -> &TaskGraph {
        self.of(rank)
    }
}
