//! The verifier's results.

use super::ranks::Ranks;
use crate::region::Region;

/// The property that a graph violates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ViolationKind {
    /// An index, a range, an operand or a placement that is invalid by itself.
    Structure,
    /// The triggers of an event do not add up to what it waits for.
    Triggers,
    /// A task that the begin event does not reach.
    Unreachable,
    /// A task that is not known to be done when its rank's iteration ends.
    Residual,
    /// Tasks that wait for each other.
    Cycle,
    /// A write and another access of the same region that are not ordered.
    Unordered,
    /// A write of one iteration and an access of the next one that are not ordered.
    UnorderedAcrossEpochs,
    /// A trigger of the next iteration may be counted before all triggers of this one.
    CounterAcrossEpochs,
    /// An activation is read before anything has written it.
    Unwritten,
    /// A flagged word that is read without exactly one writer.
    FlaggedCoverage,
    /// A task writes a weight, a constant or an input.
    WritesConstant,
    /// Graphs of one model disagree about a tensor that they share.
    Shared,
}

/// A property that a set of graphs violates.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Violation {
    /// The property.
    pub kind: ViolationKind,
    /// The tasks concerned: (rank, index).
    pub tasks: Vec<(u32, u32)>,
    /// What is wrong, between which tasks, where, and what is missing.
    pub message: String,
}

impl Violation {
    pub(super) fn new(kind: ViolationKind, tasks: &[(u16, u32)], message: String) -> Self {
        let tasks = tasks.iter().map(|&(rank, task)| (u32::from(rank), task)).collect();
        Violation { kind, tasks, message }
    }
}

/// Statistics of a verification.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Ranks.
    pub ranks: usize,
    /// Tasks of all ranks.
    pub tasks: usize,
    /// Events of all ranks.
    pub events: usize,
    /// Accesses to tensors that are written by some task.
    pub accesses: usize,
    /// Pairs whose order needed a search.
    pub searches: u64,
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} ranks, {} tasks, {} events, {} accesses",
            self.ranks, self.tasks, self.events, self.accesses
        )
    }
}

/// Formats names for messages.
#[derive(Clone, Copy)]
pub(super) struct Names<'g> {
    pub(super) graphs: Ranks<'g>,
}

impl Names<'_> {
    pub(super) fn task(&self, (rank, index): (u16, u32)) -> String {
        let graph = &self.graphs[usize::from(rank)];
        let Some(task) = graph.tasks.get(index as usize) else {
            return format!("task {index} of rank {rank}");
        };
        let type_name = graph.type_names.get(usize::from(task.task_type)).map_or("?", String::as_str);
        match graph.op_name(task) {
            "" => format!("{type_name} task {index} of rank {rank}"),
            op => format!("{type_name} task {index} ('{op}') of rank {rank}"),
        }
    }

    pub(super) fn event(&self, rank: usize, index: u32) -> String {
        let graph = &self.graphs[rank];
        let waits = |t: &crate::task_graph::Task| t.dependencies.contains(&index);
        let what = match index {
            0 => " (termination)".to_string(),
            1 => " (begin)".to_string(),
            2 => " (end of graph)".to_string(),
            _ => match graph.tasks.iter().find(|t| waits(t)) {
                Some(task) => format!(" (awaited by '{}')", graph.op_name(task)),
                None => String::new(),
            },
        };
        format!("event {index}{what} of rank {rank}")
    }

    pub(super) fn region(&self, owner: usize, tensor: usize, region: &Region) -> String {
        format!("'{}' {region} in rank {owner}'s memory", self.graphs[owner].tensors[tensor].name)
    }
}
