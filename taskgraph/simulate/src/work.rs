//! The cost of a task, from the accesses that it declares.

use crate::cluster::Worker as Limits;
use std::collections::HashMap;
use taskgraph::op_graph::Role;
use taskgraph::task_graph::{Operand, Place, Task, Variant, core_types};
use taskgraph::{DType, Region, Registry, TaskGraph, Trust};

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
    /// Rows of the weights among them.
    pub weight_rows: u64,
    /// Number of sums that it holds until its end. A task that has them has one tile.
    pub sums: u64,
    /// Bytes of cache pages of earlier iterations.
    pub pages: u64,
    /// Bytes that data select, which the task reads from memory once it runs.
    pub gathered: u64,
    /// Bytes of activations that it reads before its products.
    pub read: u64,
    /// Bytes of activations that it reads along with the weights.
    pub read_along: u64,
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

impl Work {
    /// Bytes of cache pages that stream ahead of the task, where `pages_run_ahead`.
    pub fn ahead(&self, pages_run_ahead: bool) -> u64 {
        if pages_run_ahead { self.pages } else { 0 }
    }

    /// The bytes of the weights in a stage, above 0.
    pub fn of_stage(&self, limits: &Limits) -> u64 {
        let (stage, rows) = (u64::from(limits.stage_bytes), u64::from(limits.step_rows));
        let filled = if self.sums > 0 { self.weight_rows.min(rows) } else { 0 };
        if filled == 0 { stage } else { (stage * filled / rows).max(1) }
    }

    /// Number of tiles of the weights, of `rows` rows each; 0 means all rows.
    pub fn tiles(&self, rows: u32) -> f64 {
        if self.sums > 0 || rows == 0 { 1.0 } else { self.weight_rows.div_ceil(u64::from(rows)) as f64 }
    }
}

/// The costs of a graph's tasks.
pub(crate) struct Costs<'a> {
    graph: &'a TaskGraph,
    load: Load,
    /// The gathered inputs of each task type in use, and whether it holds all sums.
    types: HashMap<&'a str, (&'static [usize], bool)>,
    /// For each variant, the number of a sequence's last positions that a row sees.
    seen: Vec<u64>,
    /// What the tasks of each operator read of each cache together.
    caches: HashMap<(u32, u32), Together>,
    /// Where tasks hold all sums: the number of tasks with the same inputs. Each has a part of k.
    parts: HashMap<(u32, [Region; 2]), u64>,
}

/// What an operator's tasks read of a cache together.
#[derive(Clone, Copy, Debug, Default)]
struct Together {
    /// Volume of their boxes.
    volume: u64,
    /// Number of shares into which they divide a slot's tokens.
    shares: u32,
}

impl<'a> Costs<'a> {
    pub fn new(graph: &'a TaskGraph, registry: &Registry, load: Load) -> Self {
        let of = |name: &'a String| {
            let known = registry.get(name);
            let facts = known.map(|task_type| (task_type.gathered_inputs(), task_type.holds_sums()));
            (name.as_str(), facts.unwrap_or_default())
        };
        let mut caches = HashMap::new();
        for task in &graph.tasks {
            for input in graph.inputs(task).iter().filter(|input| is_paged(input)) {
                let together: &mut Together = caches.entry((task.op, input.tensor)).or_default();
                together.volume += input.region.volume();
                together.shares = together.shares.max(input.region.hi[SHARE]);
            }
        }
        let types: HashMap<_, _> = graph.type_names.iter().map(of).collect();
        let mut parts = HashMap::new();
        for task in graph.tasks.iter().filter(|task| types.get(graph.type_name(task)).is_some_and(|t| t.1)) {
            *parts.entry(first_inputs(graph, task)).or_default() += 1;
        }
        let seen_by = |variant: &Variant| {
            let known =
                graph.type_names.get(usize::from(variant.task_type)).and_then(|name| registry.get(name));
            known.and_then(|task_type| task_type.seen_positions(&variant.params)).map_or(u64::MAX, u64::from)
        };
        let seen = graph.variants.iter().map(seen_by).collect();
        Costs { graph, load, types, seen, caches, parts }
    }

    /// The work of one task.
    pub fn of(&self, task: &Task) -> Work {
        let mut work = Work::default();
        let (inputs, outputs) = (self.graph.inputs(task), self.graph.outputs(task));
        let name = self.graph.type_name(task);
        work.nothing = inputs.is_empty() && outputs.is_empty();
        let (gathered, holds_sums) = self.types.get(name).copied().unwrap_or_default();
        let seen = self.seen.get(task.variant as usize).copied().unwrap_or(u64::MAX);
        for output in outputs {
            match output.place {
                // An append to a cache is small compared with what is read.
                Place::Own | Place::All if is_paged(output) => {}
                Place::Own | Place::All => work.written += self.bytes(output),
                Place::Peer(_) => {
                    work.put += self.bytes(output);
                    // The task's own stores; a copy only moves what others have written.
                    if name != core_types::NVSHMEM_COPY {
                        work.written += self.bytes(output);
                    }
                }
            }
        }
        for (index, input) in inputs.iter().enumerate() {
            let tensor = &self.graph.tensors[input.tensor as usize];
            let is_constant = matches!(tensor.role, Role::Weight { .. } | Role::Constant);
            if let Some(bytes) = self.paged(task.op, input, seen) {
                work.pages += bytes;
                work.indirect = true;
            } else if gathered.contains(&index) && !is_constant {
                work.read += self.bytes(input).min(work.written);
            } else if gathered.contains(&index) {
                work.gathered += self.bytes(input).min(work.written);
                work.indirect = true;
            } else if is_constant && tensor.tiled {
                // A matrix packed for products is read whole, once.
                let bytes = self.bytes(input);
                work.streamed += bytes;
                work.weight_rows += u64::from(input.dims[0]);
                work.flops += 2 * u64::from(self.rows()) * bytes / tensor.dtype.size().max(1);
            } else if is_constant {
                // A vector, or a table of which the task reads a few rows. Every worker reads it again and again.
                work.read += self.bytes(input).min(work.written);
            } else if name != core_types::NVSHMEM_COPY {
                work.read += self.bytes(input);
            }
        }
        if holds_sums && work.streamed > 0 {
            // The task declares all of k, whichever part of it is its own.
            let parts = self.parts.get(&first_inputs(self.graph, task)).copied().unwrap_or(1);
            (work.streamed, work.flops) = (work.streamed / parts, work.flops / parts);
            (work.read, work.read_along) = (0, work.read / parts);
            work.sums = work.weight_rows * u64::from(self.rows());
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

    /// The bytes of cache pages that the access stands for, if rows see the last `seen` positions; none if it is no access to a cache.
    fn paged(&self, op: u32, operand: &Operand, seen: u64) -> Option<u64> {
        if !is_paged(operand) {
            return None;
        }
        let tensor = &self.graph.tensors[operand.tensor as usize];
        let [pages, _, page_size, _] = tensor.dims[..] else { return Some(0) };
        let (positions, page_size) = (u64::from(pages) * u64::from(page_size), u64::from(page_size.max(1)));
        // The box is [active slots, heads, shares of a slot's tokens]. A slot that is not in use reads nothing.
        let (lo, hi) = (operand.region.lo, operand.region.hi);
        if lo[0] >= self.load.active {
            return Some(0);
        }
        let together = self.caches.get(&(op, operand.tensor)).copied().unwrap_or_default();
        let context = u64::from(self.load.context).min(seen);
        let a_token = tensor.bytes as f64 / positions.max(1) as f64;
        if operand.trust == Some(Trust::PagesOfRows) {
            // All slots' tokens, divided among the operator's tasks.
            let all = a_token * context as f64 * f64::from(self.graph.capacity.active);
            return Some((all * operand.region.volume() as f64 / together.volume.max(1) as f64) as u64);
        }
        // A share is of whole pages, so that of a few tokens some tasks have a page more than others.
        let shares = u64::from(together.shares.max(1));
        let in_use = context.div_ceil(page_size);
        let begin = |share: u32| (in_use * u64::from(share) / shares * page_size).min(context);
        let tokens = begin(hi[SHARE]) - begin(lo[SHARE]);
        let heads =
            f64::from(hi[1] - lo[1]) / f64::from(tensor.region_dims.get(1).copied().unwrap_or(1).max(1));
        let slots = hi[0].min(self.load.active) - lo[0];
        Some((a_token * heads * tokens as f64 * f64::from(slots)) as u64)
    }
}

/// The operator of a task and the boxes of its first two inputs: the rows and the weight of a product.
fn first_inputs(graph: &TaskGraph, task: &Task) -> (u32, [Region; 2]) {
    let inputs = graph.inputs(task);
    let region = |index: usize| inputs.get(index).map_or(Region::whole(&[]), |input| input.region);
    (task.op, [region(0), region(1)])
}

/// The dimension of a cache's boxes that divides a slot's tokens.
const SHARE: usize = 2;

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
