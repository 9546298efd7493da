//! Graph classes whose ranks are alike, of which rank 0's graph is kept and the others are looked at once.

use super::ranks::Ranks;
use super::structure;
use super::symmetry::Symmetry;
use crate::task_graph::{TaskGraph, TensorEntry};

/// The ranks of one graph class.
#[derive(Debug)]
pub enum Class {
    /// All graphs.
    All(Vec<TaskGraph>),
    /// Rank 0's, since the others are alike.
    Alike(Alike),
}

impl Class {
    /// The graphs that there are: rank 0's first.
    pub fn graphs(&self) -> &[TaskGraph] {
        match self {
            Class::All(graphs) => graphs,
            Class::Alike(alike) => std::slice::from_ref(&alike.first),
        }
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        match self {
            Class::All(graphs) => graphs.len(),
            Class::Alike(alike) => alike.others.len() + 1,
        }
    }
}

/// Rank 0's graph, which stands for others that were compared with it.
#[derive(Debug)]
pub struct Alike {
    first: TaskGraph,
    /// Tensors of the other ranks: their values come from elsewhere.
    others: Vec<Vec<TensorEntry>>,
    symmetry: Symmetry,
}

/// A rank that is alike to the first.
#[derive(Debug)]
pub struct Compared {
    symmetry: Symmetry,
    rank: u32,
    tensors: Vec<TensorEntry>,
}

impl Alike {
    /// Whether the graph may stand for others: it is sound by itself.
    pub fn can_be_first(first: &TaskGraph) -> bool {
        first.world > 1 && first.rank == 0 && structure::check_first(first, first.world as usize).is_empty()
    }

    /// Compares a rank's graph with rank 0's, which [`Alike::can_be_first`]. `None` if they are not alike; else the graph
    /// is not needed any more but for its tensors, which are taken.
    pub fn compare(first: &TaskGraph, other: &mut TaskGraph) -> Option<Compared> {
        let symmetry = Symmetry::of_pair(first, other, other.rank as usize)?;
        Some(Compared { symmetry, rank: other.rank, tensors: std::mem::take(&mut other.tensors) })
    }

    /// Rank 0's graph for all: `compared` are the ranks after it, in order. The graph is given back if they are not alike.
    ///
    /// # Errors
    /// The graph.
    pub fn new(first: TaskGraph, compared: Vec<Option<Compared>>) -> Result<Alike, Box<TaskGraph>> {
        if compared.len() + 1 != first.world as usize {
            return Err(Box::new(first));
        }
        let mut symmetries = Vec::with_capacity(compared.len());
        let mut others = Vec::with_capacity(compared.len());
        for (rank, compared) in (1..).zip(compared) {
            let compared = compared.filter(|c| c.rank == rank);
            let Some(Compared { symmetry, tensors, .. }) = compared else { return Err(Box::new(first)) };
            symmetries.push(Some(symmetry));
            others.push(tensors);
        }
        match Symmetry::of_all(&symmetries) {
            Some(symmetry) => Ok(Alike { first, others, symmetry }),
            None => Err(Box::new(first)),
        }
    }

    pub(super) fn ranks(&self) -> Ranks<'_> {
        Ranks::kept(&self.first, &self.others, &self.symmetry)
    }
}
