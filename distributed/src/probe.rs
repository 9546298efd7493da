//! Kernels that leave out work, for `mpk-bench stream`: which launch runs which kernel, and what each has streamed.

use std::sync::{Mutex, PoisonError};
use taskgraph::task_graph::TaskGraph;

/// What a kernel leaves out of a decode step: a sum of `kProducts`, `kWaits` and `kAllreduces` (kernels-cu/src/gpu/config.cuh).
pub type LeftOut = u32;

/// The additional kernels, and when each of them runs. The same on every rank.
#[derive(Debug)]
pub struct Probe {
    /// What each additional kernel leaves out.
    pub kernels: Vec<LeftOut>,
    /// For each launch, the number of its kernel, counted from 1; 0 is the ordinary kernel. Later launches run the ordinary kernel.
    pub schedule: Vec<usize>,
    /// Number of requests of a full batch.
    pub batch: u32,
    found: Mutex<Found>,
}

/// Measurements on a GPU. Empty on the CPU target.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Found {
    /// Bytes of weights that a step with a full batch streams according to the task graph.
    pub step_bytes: u64,
    /// Bytes that a plain read kernel reads each time; `read_s` has the seconds.
    pub read_bytes: u64,
    /// See `read_bytes`.
    pub read_s: Vec<f64>,
    /// For each finished launch, the bytes that it streamed in steps with a full batch. `None` for an ordinary kernel, which does not
    /// count them.
    pub streamed: Vec<Option<u64>>,
}

impl Probe {
    /// A probe without measurements.
    pub fn new(batch: u32, kernels: Vec<LeftOut>, schedule: Vec<usize>) -> Probe {
        Probe { kernels, schedule, batch, found: Mutex::default() }
    }

    /// The measurements so far.
    pub fn found(&self) -> Found {
        self.found.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The kernel of launch number `launch`.
    pub(crate) fn kernel(&self, launch: usize) -> Option<usize> {
        self.schedule.get(launch).and_then(|number| number.checked_sub(1)).filter(|&n| n < self.kernels.len())
    }

    pub(crate) fn note(&self, change: impl FnOnce(&mut Found)) {
        change(&mut self.found.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// Bytes of weights that the loader streams in an iteration of the graph that the batch step chooses for `rows` rows: the matrices of each
/// task in whole tiles. From an embedding table, only single rows are read, by the task itself.
pub(crate) fn step_bytes(graphs: &[TaskGraph], rows: u32) -> u64 {
    let fitting = graphs.iter().filter(|graph| graph.capacity.rows >= rows);
    let Some(graph) = fitting.min_by_key(|graph| graph.capacity.rows) else { return 0 };
    let streams = |task_type: u16| graph.type_names[usize::from(task_type)] != "embedding";
    let tasks = graph.tasks.iter().filter(|task| streams(task.task_type));
    let inputs =
        tasks.flat_map(|task| &graph.operands[task.first_operand as usize..][..usize::from(task.num_inputs)]);
    let of = |operand: &taskgraph::task_graph::Operand| {
        let tensor = &graph.tensors[operand.tensor as usize];
        let tiles = operand.dims[..2].iter().map(|&dim| u64::from(dim.div_ceil(16)));
        if tensor.tiled { tiles.product::<u64>() * 256 * tensor.dtype.size() } else { 0 }
    };
    inputs.map(of).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_run_the_kernels_of_the_schedule_and_then_the_ordinary_one() {
        let probe = Probe::new(1, vec![1, 2], vec![0, 1, 2, 0, 7]);
        assert_eq!(
            [0, 1, 2, 3, 4, 5].map(|launch| probe.kernel(launch)),
            [None, Some(0), Some(1), None, None, None]
        );
    }
}
