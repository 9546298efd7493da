//! Classes that are proven one at a time, so that the tasks of only a few classes are in memory at once.

use super::alike::Class;
use super::ranks::Ranks;
use super::report::Report;
use super::succession::{self, Known, Summary};
use super::symmetry::Symmetry;
use crate::task_graph::TaskGraph;

/// A class that is proven by itself, without its tasks. It keeps what [`may_follow`] needs.
pub struct Proven {
    /// The graphs have tensors, but neither tasks nor events.
    class: Class,
    /// How the ranks are alike, if they are and all graphs are kept.
    symmetry: Option<Symmetry>,
    report: Report,
    summaries: Vec<Summary>,
}

impl Proven {
    /// Keeps what is needed of a proven class, and passes the rest to `done`.
    pub(super) fn of(
        mut class: Class,
        symmetry: Option<Symmetry>,
        report: Report,
        summaries: Vec<Summary>,
        done: impl FnMut(TaskGraph),
    ) -> Proven {
        class.graphs_mut().iter_mut().map(without_tasks).for_each(done);
        Proven { class, symmetry, report, summaries }
    }

    /// Statistics of the proof.
    pub fn report(&self) -> Report {
        self.report
    }

    fn known(&self) -> Known<'_> {
        let ranks = match &self.class {
            Class::All(graphs) => Ranks::of_graphs(graphs, self.symmetry.as_ref()),
            Class::Alike(alike) => alike.ranks(),
        };
        Known { ranks, summaries: &self.summaries }
    }
}

/// Takes the tasks, operands, events and lists out of the graph.
fn without_tasks(graph: &mut TaskGraph) -> TaskGraph {
    let kept = TaskGraph {
        name: graph.name.clone(),
        tensors: std::mem::take(&mut graph.tensors),
        type_names: Vec::new(),
        ops: Vec::new(),
        variants: Vec::new(),
        operands: Vec::new(),
        tasks: Vec::new(),
        events: Vec::new(),
        worker_lists: Vec::new(),
        ..*graph
    };
    std::mem::replace(graph, kept)
}

/// True if any of the classes may follow any other. False if that is not so, or if the tasks must be looked at to see it:
/// then [`super::verify_succession`] decides.
pub fn may_follow(classes: &[Proven]) -> bool {
    succession::is_seen(&classes.iter().map(Proven::known).collect::<Vec<_>>())
}
