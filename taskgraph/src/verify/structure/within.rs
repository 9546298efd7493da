//! Checks the operands of one task against each other: it must not overwrite what it may have yet to read.
//!
//! Nothing orders a task's own reads and writes. Writing exactly the view that it reads, in place, is the contract of its task type,
//! which is enforced when an operator is added. No task type knows that two tensors share memory.

use super::RankCheck;
use crate::task_graph::{Operand, Place, Task, TaskGraph, TensorEntry};
use crate::trust::RowShares;
use crate::verify::boxes::{boxes, hole, is_symbolic, without};

impl RankCheck<'_> {
    /// The reason why the task may overwrite what it reads, or what it writes itself.
    pub(super) fn overlap(&self, task: &Task) -> Option<String> {
        let graph = self.graph();
        let (inputs, outputs) = (graph.inputs(task), graph.outputs(task));
        let here = |operand: &Operand| match operand.place {
            Place::Own | Place::All => true,
            Place::Peer(peer) => usize::from(peer) == self.rank,
        };
        let tensor = |operand: &Operand| &graph.tensors[operand.tensor as usize];
        for (o, written) in outputs.iter().enumerate().filter(|(_, written)| here(written)) {
            for (i, read) in inputs.iter().enumerate() {
                if read.tensor == written.tensor && meets(graph, task, (i, read), written) {
                    return Some(format!(
                        "has output {o} and input {i} in the same bytes of '{}', but they are not the same view: it \
                         could overwrite what it has not read yet",
                        tensor(read).name
                    ));
                }
            }
            let others = inputs.iter().chain(outputs[..o].iter().filter(|other| here(other)));
            let mut others = others.filter(|other| other.tensor != written.tensor);
            if let Some(other) = others.find(|other| share_memory(tensor(other), tensor(written))) {
                return Some(format!(
                    "writes '{}', which shares memory with '{}', another operand of the same task: it could overwrite \
                     what is still needed",
                    tensor(written).name,
                    tensor(other).name
                ));
            }
        }
        None
    }
}

/// True if a task is known to write bytes of the tensor that it also reads, through another view.
fn meets(graph: &TaskGraph, task: &Task, (input, read): (usize, &Operand), written: &Operand) -> bool {
    let tensor = &graph.tensors[read.tensor as usize];
    let unknown = read.trust.is_some() || written.trust.is_some() || is_symbolic(tensor) || tensor.tiled;
    if unknown || same_view(read, written) {
        return false;
    }
    // Scattered views have been refused.
    let Ok(target) = boxes(tensor, written, RowShares::default()) else { return false };
    let meets = |read: &Operand| {
        boxes(tensor, read, RowShares::default())
            .is_ok_and(|found| found.iter().any(|a| target.iter().any(|b| a.overlaps(b))))
    };
    match hole(graph, task, input) {
        Some(hole) => without(read, tensor.dtype.size(), hole).iter().any(meets),
        None => meets(read),
    }
}

/// True if two views of a tensor are the same. Dimensions with one index do not matter.
fn same_view(a: &Operand, b: &Operand) -> bool {
    fn wide(operand: &Operand) -> impl Iterator<Item = (u32, u32)> + '_ {
        let dims = operand.dims.iter().zip(&operand.strides).take(usize::from(operand.ndim));
        dims.filter(|(count, _)| **count != 1).map(|(&count, &stride)| (count, stride))
    }
    a.offset == b.offset && wide(a).eq(wide(b))
}

/// True if two tensors have bytes in common.
fn share_memory(a: &TensorEntry, b: &TensorEntry) -> bool {
    let (Some(x), Some(y)) = (a.overlay, b.overlay) else { return false };
    let filled = a.bytes > 0 && b.bytes > 0;
    filled && x.area == y.area && x.offset < y.offset + b.bytes && y.offset < x.offset + a.bytes
}
