//! Graph classes whose ranks are alike. Only rank 0's graph is kept; the others are checked once.

use super::comparing::{Comparing, First};
use super::ranks::Ranks;
use super::structure;
use super::symmetry::Symmetry;
use crate::parallel;
use crate::task_graph::{TaskGraph, TensorEntry};
use std::sync::atomic::{AtomicBool, Ordering};

/// The symmetry of graphs whose ranks are alike. The first graph must be sound by itself.
pub(super) fn symmetry(graphs: &[TaskGraph]) -> Option<Symmetry> {
    let (first, world) = (graphs.first()?, graphs.len());
    if world < 2 || !structure::check_first(first, world).is_empty() {
        return None;
    }
    Symmetry::of(graphs)
}

/// The ranks of one graph class.
#[derive(Debug)]
pub enum Class {
    /// All graphs.
    All(Vec<TaskGraph>),
    /// Rank 0's graph, because the other ranks are alike.
    Alike(Box<Alike>),
}

impl Class {
    /// The graphs that are kept, rank 0's first.
    pub fn graphs(&self) -> &[TaskGraph] {
        match self {
            Class::All(graphs) => graphs,
            Class::Alike(alike) => std::slice::from_ref(&alike.first),
        }
    }

    pub(super) fn graphs_mut(&mut self) -> &mut [TaskGraph] {
        match self {
            Class::All(graphs) => graphs,
            Class::Alike(alike) => std::slice::from_mut(&mut alike.first),
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

/// Rank 0's graph, which stands for the others that were compared with it.
#[derive(Debug)]
pub struct Alike {
    first: TaskGraph,
    /// Tensors of the other ranks, which differ in the source of their values.
    others: Vec<Vec<TensorEntry>>,
    symmetry: Symmetry,
}

impl Alike {
    /// Rank 0's graph for all ranks, if the others are alike. `graph` passes on the operands of a rank's graph to be compared,
    /// and may pass on its tasks. Then it returns the graph itself, which may be without them. The graph then goes to `done`,
    /// without its tensors, which are kept. If a graph is not alike, the first graph is returned and no more are requested.
    ///
    /// # Errors
    /// Those of `graph`.
    pub fn find<E: Send>(
        first: TaskGraph,
        graph: impl Fn(u32, &mut Comparing<'_>) -> Result<TaskGraph, E> + Sync,
        done: impl Fn(TaskGraph) + Sync,
    ) -> Result<Result<Alike, Box<TaskGraph>>, E> {
        let world = first.world as usize;
        // The comparison assumes that the first graph is sound by itself.
        if world < 2 || !structure::check_first(&first, world).is_empty() {
            return Ok(Err(Box::new(first)));
        }
        let (missed, known) = (AtomicBool::new(false), First::new(&first));
        let compared = parallel::map(world - 1, |i| {
            if missed.load(Ordering::Relaxed) {
                return Ok(None);
            }
            let mut comparing = Comparing::new(&known, i + 1);
            let mut other = graph(i as u32 + 1, &mut comparing)?;
            let symmetry = Symmetry::of_compared(comparing, &other);
            if symmetry.is_none() {
                missed.store(true, Ordering::Relaxed);
            }
            let tensors = std::mem::take(&mut other.tensors);
            done(other);
            Ok(symmetry.map(|symmetry| (symmetry, tensors)))
        });
        let (mut symmetries, mut others) = (Vec::with_capacity(world), Vec::with_capacity(world));
        for compared in compared {
            let Some((symmetry, tensors)) = compared? else { return Ok(Err(Box::new(first))) };
            symmetries.push(Some(symmetry));
            others.push(tensors);
        }
        Ok(match Symmetry::of_all(&symmetries) {
            Some(symmetry) => Ok(Alike { first, others, symmetry }),
            None => Err(Box::new(first)),
        })
    }

    pub(super) fn ranks(&self) -> Ranks<'_> {
        Ranks::kept(&self.first, &self.others, &self.symmetry)
    }
}
