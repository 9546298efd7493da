//! The cost of a task, from the accesses that it declares.

use std::collections::HashMap;
use taskgraph::op_graph::Role;
use taskgraph::task_graph::{Operand, Place, Task, core_types};
use taskgraph::{DType, Registry, TaskGraph, Trust};

/// The load of an iteration, which the graph alone does not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Number of active requests.
    pub active: u32,
    /// Number of tokens that each of them has in the cache.
    pub context: u32,
}

/// The work of one task.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Work {
    /// Bytes of constants that may be fetched before the task begins.
    pub streamed: u64,
    /// Bytes of cache pages, which the task reads from memory once it runs.
    pub paged: u64,
    /// Bytes of activations that it reads.
    pub read: u64,
    /// Bytes that it writes in the rank's own memory.
    pub written: u64,
    /// Floating-point operations of products with constants.
    pub flops: u64,
    /// True if the place of some bytes is known only at run time.
    pub indirect: bool,
    /// Bytes of a copy to a peer.
    pub put: u64,
    /// True for a task without operands, which only waits and triggers.
    pub nothing: bool,
}

/// The costs of a graph's tasks.
pub(crate) struct Costs<'a> {
    graph: &'a TaskGraph,
    load: Load,
    /// The gathered inputs of each task type in use.
    types: HashMap<&'a str, &'static [usize]>,
    /// For each operator and cache, the volume that its tasks read together: the whole part of the cache that is in
    /// use.
    caches: HashMap<(u32, u32), u64>,
}

impl<'a> Costs<'a> {
    pub fn new(graph: &'a TaskGraph, registry: &Registry, load: Load) -> Self {
        let of = |name: &'a String| {
            let known = registry.get(name);
            (name.as_str(), known.map_or(&[][..], |task_type| task_type.gathered_inputs()))
        };
        let mut caches = HashMap::new();
        for task in &graph.tasks {
            for input in graph.inputs(task).iter().filter(|input| is_paged(input)) {
                *caches.entry((task.op, input.tensor)).or_default() += input.region.volume();
            }
        }
        Costs { graph, load, types: graph.type_names.iter().map(of).collect(), caches }
    }

    /// The work of one task.
    pub fn of(&self, task: &Task) -> Work {
        let mut work = Work::default();
        let (inputs, outputs) = (self.graph.inputs(task), self.graph.outputs(task));
        let name = self.graph.type_name(task);
        work.nothing = inputs.is_empty() && outputs.is_empty();
        let gathered = self.types.get(name).copied().unwrap_or_default();
        for output in outputs {
            match output.place {
                // An append to a cache is small compared with what is read.
                Place::Own | Place::All if is_paged(output) => {}
                Place::Own | Place::All => work.written += self.bytes(output),
                Place::Peer(_) => work.put += self.bytes(output),
            }
        }
        for (index, input) in inputs.iter().enumerate() {
            let tensor = &self.graph.tensors[input.tensor as usize];
            let is_constant = matches!(tensor.role, Role::Weight { .. } | Role::Constant);
            if let Some(bytes) = self.paged(task.op, input) {
                work.paged += bytes;
                work.indirect = true;
            } else if gathered.contains(&index) {
                work.paged += self.bytes(input).min(work.written);
                work.indirect = true;
            } else if is_constant && tensor.tiled {
                // A matrix packed for products is read whole, once.
                let bytes = self.bytes(input);
                work.streamed += bytes;
                work.flops += 2 * u64::from(self.rows()) * bytes / tensor.dtype.size().max(1);
            } else if is_constant {
                // A vector, or a table of which the task reads a few rows. Every worker reads it again and again.
                work.read += self.bytes(input).min(work.written);
            } else if name != core_types::NVSHMEM_COPY {
                work.read += self.bytes(input);
            }
        }
        work
    }

    /// Rows of the iteration: one per request in decode, the graph's capacity in prefill.
    fn rows(&self) -> u32 {
        let capacity = self.graph.capacity;
        if capacity.rows == capacity.active { self.load.active } else { capacity.rows }
    }

    /// Bytes of the view.
    fn bytes(&self, operand: &Operand) -> u64 {
        let dims = &operand.dims[..operand.ndim as usize];
        let tensor = &self.graph.tensors[operand.tensor as usize];
        let elements: u64 = dims.iter().map(|&d| u64::from(d)).product();
        let bytes = elements * tensor.dtype.size();
        // Leaves out rows that are not in use.
        let capacity = self.graph.capacity;
        let by_row = matches!(tensor.role, Role::Activation) && capacity.rows == capacity.active;
        let share = match operand.trust {
            // A slot's rows.
            Some(Trust::RowsOfSlot { of, .. } | Trust::RowsOfUnits { of, .. }) => (1, u64::from(of.max(1))),
            _ if by_row => (u64::from(self.load.active), u64::from(capacity.active.max(1))),
            _ => (1, 1),
        };
        (bytes * share.0).div_ceil(share.1.max(1))
    }

    /// The bytes of cache pages that the access stands for; none if it is no access to a cache.
    fn paged(&self, op: u32, operand: &Operand) -> Option<u64> {
        if !is_paged(operand) {
            return None;
        }
        let tensor = &self.graph.tensors[operand.tensor as usize];
        // This box of [active slots, heads, splits] is a share of all slots' tokens.
        let space = self.caches.get(&(op, operand.tensor)).copied().unwrap_or(0);
        let positions = match tensor.dims[..] {
            [pages, _, page_size, _] => u64::from(pages) * u64::from(page_size),
            _ => return Some(0),
        };
        let active = self.graph.capacity.active;
        // A slot that is not in use reads nothing.
        if u64::from(operand.region.lo[0]) >= u64::from(self.load.active) {
            return Some(0);
        }
        let a_token = tensor.bytes as f64 / positions.max(1) as f64;
        let all = a_token * f64::from(self.load.context) * f64::from(active);
        Some((all * operand.region.volume() as f64 / space.max(1) as f64) as u64)
    }
}

/// Whether its bytes are cache pages, whose place is known only at run time.
fn is_paged(operand: &Operand) -> bool {
    matches!(operand.trust, Some(Trust::PagesOfSlot | Trust::PagesOfRows))
}

/// Bytes of flagged words of an operand.
pub(crate) fn flagged_bytes(graph: &TaskGraph, operand: &Operand, load: Load) -> u64 {
    let dims = &operand.dims[..operand.ndim as usize];
    let elements: u64 = dims.iter().map(|&d| u64::from(d)).product();
    let capacity = graph.capacity;
    let share =
        if capacity.rows == capacity.active { u64::from(load.active) } else { u64::from(capacity.active) };
    (elements * DType::F32Flagged.size() * share).div_ceil(u64::from(capacity.active.max(1)))
}
