//! The GPU of a rank: which one it is, and whether it has what the graphs need.

use super::budget::Budget;
use super::device::{Context, Gpu};
use super::driver::Driver;
use super::symmetric::{Bootstrap, Transport, heap_bytes};
use crate::arrays::any_dynamic;
use crate::error::{Error, Result};
use crate::heap_layout::HeapLayout;
use crate::memory::Layout;
use crate::plan::RunOptions;
use crate::queues::Queues;
use crate::tensors::TensorLayout;
use crate::trace;
use crate::world::{World, agreed};
use kernels_cu::abi;
use std::collections::BTreeMap;
use std::sync::Arc;
use taskgraph::Placement;
use taskgraph::task_graph::{Task, TaskGraph};

/// Maximum memory of a rank's timeline.
const TRACE_BYTES: u64 = 512 << 20;
/// Number of schedulers that launch this rank's own events in dynamic placement.
const LOCAL_SCHEDULERS: u32 = 8;
/// Device memory that CUDA and NVSHMEM use in addition, approximately.
const OVERHEAD: u64 = 256 << 20;

/// The GPU that a rank runs on, and how the ranks reach each other.
#[derive(Clone, Debug)]
pub struct Machine {
    /// The GPU's context.
    pub context: Arc<Context>,
    /// Number of ranks of this node on the same GPU.
    pub sharing: u32,
    /// All ranks are on this node, and their GPUs reach each other's memory.
    pub local: bool,
    /// How ranks write to each other's memory.
    pub transport: Transport,
    /// How NVSHMEM's ranks find each other.
    pub bootstrap: Bootstrap,
}

impl Machine {
    /// Collective: the GPU of this rank, chosen by its index among the ranks of its node.
    ///
    /// # Errors
    /// The GPU cannot be used.
    pub fn of_rank(
        world: &World,
        driver: Driver,
        transport: Transport,
        bootstrap: Bootstrap,
    ) -> Result<Machine> {
        let gpus = Gpu::all(driver);
        let gpus = agreed(world, gpus)?;
        let count = gpus.len() as u32;
        let ordinal = world.node_rank() % count;
        // Launchers may show different GPUs to each rank, so their numbers do not identify them.
        let all = world.all_gather(gpus[ordinal as usize].identity);
        let sharing = all.iter().filter(|&&gpu| gpu == all[world.rank() as usize]).count() as u32;
        // All ranks come to the same result.
        if transport != Transport::Host {
            check_even(&all)?;
        }
        let used: Vec<&Gpu> = gpus.iter().filter(|gpu| all.contains(&gpu.identity)).collect();
        let reach = agreed(world, all_reach(&used))?;
        let seen = all.iter().all(|identity| gpus.iter().any(|gpu| gpu.identity == *identity));
        // Launchers may show different GPUs to each rank. But what follows from this, above all the cubin, must be the same for
        // all ranks.
        let local = world.node_size() == world.size() && reach && seen;
        let local = world.all_gather(u64::from(local)).iter().all(|&rank| rank == 1);
        let context = agreed(world, Context::new(gpus[ordinal as usize].clone()))?;
        if sharing > 1 {
            tracing::warn!(
                "{sharing} ranks share GPU {ordinal}. This works but is slow, because they take turns of milliseconds; use one GPU per rank for speed"
            );
        }
        Ok(Machine { context, sharing, local, transport, bootstrap })
    }

    /// True if the kernel needs NVSHMEM's device library.
    pub fn puts_through_nvshmem(&self, world: &World) -> bool {
        self.transport.puts_through_nvshmem(world.size(), self.local)
    }

    /// True if the kernel puts through its host.
    pub fn puts_through_host(&self, world: &World) -> bool {
        self.transport.puts_through_host(world.size())
    }

    /// Collective: checks that the GPU has what `graphs` need, apart from the cubin.
    ///
    /// # Errors
    /// There is too little memory, or the kernel cannot run the graphs.
    pub fn check(&self, world: &World, graphs: &[TaskGraph], options: &RunOptions) -> Result<()> {
        let heap = HeapLayout::agree(world, graphs);
        agreed(world, check_limits(graphs))?;
        if self.puts_through_host(world) {
            agreed(world, check_host_limits(graphs))?;
        }
        let layout = agreed(world, TensorLayout::new(graphs, &heap))?;
        let workers = graphs.first().map_or(1, |g| g.workers);
        let record = size_of::<abi::mpk_trace_record>() as u64;
        let trace = trace_capacity(options, workers) * record * trace::rows(workers);
        let budget =
            budget(graphs, &layout, heap_on_device(heap.bytes, graphs, self.puts_through_host(world)), trace);
        let free = agreed(world, self.context.free_memory())?;
        // No rank allocates memory before all have measured the free memory.
        world.barrier();
        agreed(world, budget.check(&self.context, self.sharing, free))
    }
}

/// Refuses ranks that do not fill their GPUs evenly: NVSHMEM's start would wait for ever if one GPU had more ranks than another.
/// `gpus` are the ranks' GPUs, in rank order.
fn check_even(gpus: &[u64]) -> Result<()> {
    let mut ranks_of: BTreeMap<u64, u32> = BTreeMap::new();
    gpus.iter().for_each(|&gpu| *ranks_of.entry(gpu).or_default() += 1);
    let (most, least) = (ranks_of.values().max().copied(), ranks_of.values().min().copied());
    if most == least {
        return Ok(());
    }
    let count = ranks_of.len() as u32;
    let shares = gpus.iter().fold(Vec::new(), |mut seen: Vec<u64>, gpu| {
        if !seen.contains(gpu) {
            seen.push(*gpu);
        }
        seen
    });
    Err(Error::UnevenGpus {
        ranks: gpus.len() as u32,
        gpus: count,
        shares: shares.iter().filter_map(|gpu| ranks_of.get(gpu)).copied().collect(),
    })
}

/// True if each GPU can access the memory of every other.
fn all_reach(gpus: &[&Gpu]) -> Result<bool> {
    for from in gpus {
        for to in gpus {
            if !from.reaches(to)? {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// Number of records per row of the timeline; 0 if there is none.
pub(super) fn trace_capacity(options: &RunOptions, workers: u32) -> u64 {
    if options.trace { trace::capacity(workers, TRACE_BYTES) } else { 0 }
}

/// The device memory that a symmetric heap of `bytes` takes. With NVSHMEM it is more.
fn heap_on_device(bytes: u64, graphs: &[TaskGraph], through_host: bool) -> u64 {
    let one_rank = graphs.first().is_none_or(|graph| graph.world == 1);
    if one_rank || through_host { bytes } else { heap_bytes(bytes) }
}

/// The memory that a rank needs on its GPU. `heap` is what the symmetric heap takes.
fn budget(graphs: &[TaskGraph], layout: &TensorLayout, heap: u64, trace: u64) -> Budget {
    let (world, workers) = graphs.first().map_or((1, 1), |g| (g.world, g.workers));
    let scratch = Scratch::new(graphs);
    let mut queues = Layout::default();
    if any_dynamic(graphs) {
        Queues::reserve(graphs, workers, schedulers(workers, world), world, &mut queues);
    }
    let mut budget = Budget::default();
    budget.add("weights", layout.constants);
    budget.add("key-value cache", layout.persistent);
    budget.add("activations", layout.activations);
    budget.add("symmetric heap", heap);
    budget.add("scratch", scratch.each * u64::from(workers));
    budget.add("queues", queues.bytes());
    budget.add("trace", trace);
    budget.add("CUDA itself", OVERHEAD);
    budget
}

/// The memory that a rank with these graphs needs on its GPU: the amount, and what it is for.
///
/// # Errors
/// The graphs contradict each other.
pub fn memory_needed(graphs: &[TaskGraph]) -> Result<(u64, String)> {
    let heap = HeapLayout::agree(&World::single(), graphs);
    let layout = TensorLayout::new(graphs, &heap)?;
    let budget = budget(graphs, &layout, heap_on_device(heap.bytes, graphs, false), 0);
    Ok((budget.total(), budget.to_string()))
}

/// Refuses graphs that exceed the kernel's limits.
///
/// # Errors
/// The limit, and the graph that exceeds it.
pub fn check_limits(graphs: &[TaskGraph]) -> Result<()> {
    const OPERANDS: u32 = abi::MPK_GPU_MAX_OPERANDS;
    const DYNAMIC_RANKS: u32 = abi::MPK_GPU_MAX_DYNAMIC_RANKS;
    for graph in graphs {
        let problem = |problem: String| Error::Graph { graph: graph.name.clone(), problem };
        let count = |task: &Task| u32::from(task.num_inputs) + u32::from(task.num_outputs);
        if let Some(task) = graph.tasks.iter().find(|task| count(task) > OPERANDS) {
            return Err(problem(format!(
                "a task of {} has {} operands, but the limit on a GPU is {OPERANDS}",
                graph.type_name(task),
                count(task)
            )));
        }
        if graph.placement == Placement::Dynamic && graph.workers < schedulers(graph.workers, graph.world) {
            return Err(problem(
                "dynamic placement with several ranks needs 2 workers at least on a GPU".into(),
            ));
        }
        if graph.placement == Placement::Dynamic && graph.world > DYNAMIC_RANKS {
            return Err(problem(format!(
                "dynamic placement on GPUs supports at most {DYNAMIC_RANKS} ranks; use Placement::Static"
            )));
        }
    }
    Ok(())
}

/// Refuses graphs that leave the kernel no spare warp for the data that hosts bring. That needs one block more than the batch step
/// or the schedulers, and the host's requests (`protocol/gpu/spare.cuh`).
fn check_host_limits(graphs: &[TaskGraph]) -> Result<()> {
    let Some(graph) = graphs.first() else { return Ok(()) };
    let busy = if any_dynamic(graphs) { schedulers(graph.workers, graph.world) } else { 1 };
    if graph.workers >= busy + 2 {
        return Ok(());
    }
    Err(Error::Graph {
        graph: graph.name.clone(),
        problem: format!("Transport::Host needs at least {} workers on a GPU", busy + 2),
    })
}

/// Number of schedulers of dynamic placement: local ones, and a remote one if there are peers. They run in the workers' blocks, so
/// there are no more of them than workers.
pub(super) fn schedulers(workers: u32, world: u32) -> u32 {
    let remote = u32::from(world > 1);
    (LOCAL_SCHEDULERS + remote).min(workers).max(1 + remote)
}

/// Scratch memory of each worker. It starts with a list of deferred tasks, with room for every task of the largest graph. The
/// memory of the tasks' code follows; `mpk_rank.scratch` points to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Scratch {
    pub(super) deferred: u64,
    pub(super) each: u64,
}

impl Scratch {
    pub(super) fn new(graphs: &[TaskGraph]) -> Scratch {
        let tasks = graphs.iter().map(|g| g.tasks.len()).max().unwrap_or(0) as u64;
        let code = graphs.iter().flat_map(|g| &g.variants).map(|v| v.scratch_bytes).max().unwrap_or(0);
        Scratch::of(tasks, u64::from(code))
    }

    fn of(tasks: u64, code: u64) -> Scratch {
        let deferred = (4 * tasks).next_multiple_of(256);
        Scratch { deferred, each: deferred + code.next_multiple_of(256).max(256) }
    }

    pub(super) fn of_workers(&self, base: u64, workers: u32) -> Vec<u64> {
        (0..u64::from(workers)).map(|w| base + w * self.each + self.deferred).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_must_fill_their_gpus_evenly() {
        for even in [&[7][..], &[7, 9], &[7, 9, 7, 9], &[7, 7], &[1, 2, 3, 1, 2, 3]] {
            assert!(check_even(even).is_ok(), "{even:?}");
        }
        let text = |gpus: &[u64]| check_even(gpus).expect_err("uneven").whole();
        let three = text(&[9, 7, 9]);
        assert!(three.contains("3 ranks share 2 GPUs unevenly (2, 1 ranks on them)"), "{three}");
        assert!(three.contains("use 1, 2, or 4, 6, 8 ... ranks"), "{three}");
        let six = text(&[1, 2, 3, 4, 1, 2]);
        assert!(six.contains("(2, 2, 1, 1 ranks on them)"), "{six}");
        assert!(six.contains("use 1, 2, 3, 4, or 8, 12, 16 ... ranks"), "{six}");
    }

    #[test]
    fn the_deferred_list_lies_directly_before_the_scratch() {
        let scratch = Scratch::of(1001, 300);
        assert_eq!(scratch, Scratch { deferred: 4096, each: 4096 + 512 });
        assert_eq!(scratch.of_workers(1 << 20, 2), [(1 << 20) + 4096, (1 << 20) + 4608 + 4096]);
        assert!(Scratch::of(0, 0).each >= 256);
    }

    #[test]
    fn schedulers_live_in_the_blocks_of_workers() {
        assert_eq!((schedulers(132, 1), schedulers(132, 4)), (8, 9));
        assert_eq!((schedulers(4, 1), schedulers(4, 2)), (4, 4));
        assert_eq!((schedulers(1, 1), schedulers(2, 2)), (1, 2));
    }
}
