//! Dependencies through flagged words: a reader waits for every task, of any rank, that pushes words it reads.

use std::collections::HashMap;
use taskgraph::task_graph::{Operand, Place};
use taskgraph::{DType, Region, TaskGraph};

/// The readers of each task's pushes, and the number of pushes that each task waits for.
#[derive(Debug, Default)]
pub(crate) struct Flagged {
    /// The readers of each task that pushes, by (rank, task); readers are (rank, task), in order.
    pub readers: HashMap<(u32, u32), Vec<(u32, u32)>>,
    /// The number of pushes that each polling task waits for.
    pub waits: HashMap<(u32, u32), u32>,
}

fn is_flagged(graph: &TaskGraph, operand: &Operand) -> bool {
    graph.tensors[operand.tensor as usize].dtype == DType::F32Flagged
}

/// Finds all such dependencies.
pub(crate) fn flagged(graphs: &[TaskGraph]) -> Flagged {
    let mut found = Flagged::default();
    // By the tensor's name, which is the same on all ranks: the boxes of its writers.
    let mut writers: HashMap<&str, Vec<(u32, u32, Region, Place)>> = HashMap::new();
    for graph in graphs {
        for (index, task) in graph.tasks.iter().enumerate() {
            for output in graph.outputs(task).iter().filter(|o| is_flagged(graph, o)) {
                let name = graph.tensors[output.tensor as usize].name.as_str();
                let entry = (graph.rank, index as u32, output.region, output.place);
                writers.entry(name).or_default().push(entry);
            }
        }
    }
    for graph in graphs {
        for (index, task) in graph.tasks.iter().enumerate() {
            for input in graph.inputs(task).iter().filter(|o| is_flagged(graph, o)) {
                let name = graph.tensors[input.tensor as usize].name.as_str();
                for (rank, writer, region, place) in writers.get(name).into_iter().flatten() {
                    let reaches = match place {
                        Place::All => true,
                        Place::Peer(peer) => u32::from(*peer) == graph.rank,
                        Place::Own => *rank == graph.rank,
                    };
                    if reaches && region.overlaps(&input.region) {
                        let readers = found.readers.entry((*rank, *writer)).or_default();
                        if readers.last() != Some(&(graph.rank, index as u32)) {
                            readers.push((graph.rank, index as u32));
                            *found.waits.entry((graph.rank, index as u32)).or_default() += 1;
                        }
                    }
                }
            }
        }
    }
    found
}
