//! One rank of the CPU target: its memory, and the `mpk_rank` that the protocol works on.

use crate::affinity::Cores;
use crate::arrays::{GraphArrays, placement};
use crate::batch_memory::BatchMemory;
use crate::error::{Error, Result};
use crate::heap_layout::HeapLayout;
use crate::memory::{HugeBuffer, Layout, Pages, Pinned};
use crate::plan::{BatchPlan, RunOptions};
use crate::queues::Queues;
use crate::symmetric::SymmetricHeap;
use crate::world::World;
use kernels_cu::abi;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use taskgraph::Placement;
use taskgraph::op_graph::Role;
use taskgraph::task_graph::{Space, TaskGraph, TensorEntry};

/// Largest part of the trace that is kept for one worker.
const TRACE_RECORDS: u64 = 200_000;

/// A tensor's place in this process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    pub address: *mut u8,
    pub bytes: usize,
}

/// One rank of the CPU target, ready to run.
pub struct CpuRank {
    pub(crate) graphs: Vec<TaskGraph>,
    pub(crate) rank: Pinned<abi::mpk_rank>,
    pub(crate) batch_output: Pinned<abi::mpk_batch_output>,
    pub(crate) plan: BatchPlan,
    pub(crate) cores: Cores,
    pub(crate) statuses: Vec<abi::mpk_status>,
    pub(crate) first_output: Vec<usize>,
    trace: Vec<abi::mpk_trace_record>,
    trace_count: Vec<u64>,
    /// Tensors shared by all graphs, by name, and each graph's own.
    shared: HashMap<String, Slot>,
    own: Vec<Vec<Slot>>,
    heap: SymmetricHeap,
    /// Everything that `rank` points to and nobody looks at again; dropped after it.
    _owned: Owned,
}

#[allow(dead_code, reason = "keeps alive what the ABI structs point to")]
struct Owned {
    constants: HugeBuffer,
    persistent: HugeBuffer,
    activations: HugeBuffer,
    control: HugeBuffer,
    scratch: HugeBuffer,
    arrays: Vec<GraphArrays>,
    abi_graphs: Vec<abi::mpk_graph>,
    bases: Vec<*mut u8>,
    scratch_bases: Vec<*mut u8>,
    kernels: Vec<abi::mpk_kernel>,
    config: Pinned<abi::mpk_batch_config>,
    batch: Pinned<abi::mpk_batch>,
    queues: Queues,
    remote_pushed: Vec<u64>,
}

// SAFETY: the raw pointers go to memory that this value owns (or, for the heap, that lives as long); the worker
// threads that share it are joined before the value is used again (`run`).
unsafe impl Send for CpuRank {}

impl CpuRank {
    /// Collective: gives every tensor its address and builds the rank. Weights and constants are zero until
    /// [`CpuRank::fill`].
    pub fn new(
        world: &World,
        graphs: Vec<TaskGraph>,
        plan: BatchPlan,
        options: &RunOptions,
        cores: Cores,
    ) -> Result<CpuRank> {
        let me = world.rank();
        let layout = HeapLayout::agree(world, &graphs);
        let heap = SymmetricHeap::allocate(world, layout.bytes as usize)?;
        let workers = graphs.first().map_or(1, |g| g.workers) as usize;
        let dynamic = graphs.first().is_some_and(|g| g.placement == Placement::Dynamic);
        let schedulers = if dynamic { 1 + usize::from(world.size() > 1) } else { 0 };

        let is_constant = |t: &TensorEntry| matches!(t.role, Role::Weight { .. } | Role::Constant);
        let is_persistent = |t: &TensorEntry| matches!(t.role, Role::Persistent { .. });
        let mut shared = HashMap::new();
        let constants = place_shared(Pages::Huge, me, "weights", &graphs, &mut shared, is_constant)?;
        check_available(me, world.node_size(), constants.len() as u64)?;
        let persistent =
            place_shared(Pages::Small, me, "the key-value cache", &graphs, &mut shared, is_persistent)?;
        let (activations, own) = place_own(me, &graphs, &layout, &heap)?;

        let mut arrays = Vec::new();
        for (graph, slots) in graphs.iter().zip(&own) {
            let address = |(t, slot): (&TensorEntry, &Slot)| {
                shared.get(&t.name).filter(|_| is_constant(t) || is_persistent(t)).unwrap_or(slot).address
                    as u64
            };
            let addresses: Vec<u64> = graph.tensors.iter().zip(slots).map(address).collect();
            arrays.push(GraphArrays::new(graph, &addresses)?);
        }
        let mut abi_graphs: Vec<abi::mpk_graph> = Vec::new();
        for ((graph, arrays), &counters) in graphs.iter().zip(&mut arrays).zip(&layout.counters) {
            // SAFETY: the offset lies inside the heap by the layout.
            let counters = unsafe { heap.own().add(counters as usize) }.cast();
            abi_graphs.push(arrays.abi(graph, counters));
        }

        let scratch_each =
            arrays.iter().map(|a| a.scratch_bytes).max().unwrap_or(0).next_multiple_of(4096) + 4096;
        let scratch = HugeBuffer::new(me, "scratch", scratch_each as usize * workers)?;
        // SAFETY: each offset lies inside the buffer.
        let mut scratch_bases: Vec<*mut u8> =
            (0..workers).map(|w| unsafe { scratch.as_ptr().add(w * scratch_each as usize) }).collect();

        let batch = BatchMemory::new(me, &graphs, &plan, &shared)?;
        let mut queues = Queues::new(&graphs, workers, schedulers, world.size());
        let mut bases = heap.bases().to_vec();
        let kernels = kernels_cu::registry::kernel_table();
        let mut remote_pushed = vec![0; world.size() as usize];
        // SAFETY: all-zero is a valid value of these plain C structs.
        let mut statuses: Vec<abi::mpk_status> = vec![unsafe { std::mem::zeroed() }; workers + schedulers];
        let trace_capacity = if options.trace { TRACE_RECORDS } else { 0 };
        // SAFETY: as above.
        let mut trace = vec![unsafe { std::mem::zeroed() }; trace_capacity as usize * workers];
        let mut trace_count = vec![0u64; workers];

        let BatchMemory { control, config, batch, batch_output, private, first_output } = batch;
        let stall = options.stall.filter(|s| s.rank == me);
        let threads = workers + schedulers;
        let rank = Pinned::new(abi::mpk_rank {
            abi_version: abi::MPK_ABI_VERSION,
            rank: me,
            world: world.size(),
            num_workers: workers as u32,
            num_schedulers: schedulers as u32,
            num_graphs: graphs.len() as u32,
            placement: graphs.first().map_or(0, |g| placement(g.placement)),
            oversubscribed: u32::from(cores.shared || threads > cores.own.len()),
            deadline_ns: options.deadline.as_nanos().min(u128::from(u64::MAX)) as u64,
            sym: bases.as_mut_ptr(),
            control: heap.own().cast(),
            graphs: abi_graphs.as_mut_ptr(),
            batch_config: config.as_ptr(),
            batch: batch.as_ptr(),
            batch_output: batch_output.as_ptr(),
            batch_private: private.cast(),
            worker_queues: queues.worker_queues(),
            scheduler_queues: queues.scheduler_queues(),
            remote_rings: layout.rings,
            remote_ring_bytes: layout.ring_bytes,
            remote_ring_capacity: layout.ring_capacity,
            remote_pushed: remote_pushed.as_mut_ptr(),
            kernels: kernels.as_ptr(),
            scratch: scratch_bases.as_mut_ptr(),
            status: statuses.as_mut_ptr(),
            trace: if options.trace { trace.as_mut_ptr() } else { std::ptr::null_mut() },
            trace_count: trace_count.as_mut_ptr(),
            trace_capacity,
            stall_ns: stall.map_or(0, |s| s.time.as_nanos() as u64),
            stall_op: stall.map_or(u32::MAX, |s| s.op),
            reserved: 0,
            host_abort: std::ptr::null_mut(),
        });
        Ok(CpuRank {
            graphs,
            rank,
            batch_output,
            plan,
            cores,
            statuses,
            first_output,
            trace,
            trace_count,
            shared,
            own,
            heap,
            _owned: Owned {
                constants,
                persistent,
                activations,
                control,
                scratch,
                arrays,
                abi_graphs,
                bases,
                scratch_bases,
                kernels,
                config,
                batch,
                queues,
                remote_pushed,
            },
        })
    }

    /// Fills weights and constants: calls `fill` once for each, from `threads` threads, with the tensor and its
    /// zeroed bytes; `done` gets the bytes finished so far. Stops at the first error.
    pub fn fill<E: Send>(
        &mut self,
        threads: usize,
        fill: impl Fn(&TensorEntry, &mut [u8]) -> std::result::Result<(), E> + Sync,
        done: impl Fn(u64) + Sync,
    ) -> std::result::Result<(), E> {
        let mut seen = std::collections::HashSet::new();
        let mut tensors: Vec<(&TensorEntry, Slot)> = self
            .graphs
            .iter()
            .flat_map(|g| &g.tensors)
            .filter(|t| {
                matches!(t.role, Role::Weight { .. } | Role::Constant) && seen.insert(t.name.as_str())
            })
            .map(|t| (t, self.shared[&t.name]))
            .collect();
        // The largest first, so that no thread is left with one at the end.
        tensors.sort_by_key(|(_, slot)| std::cmp::Reverse(slot.bytes));
        let next = AtomicUsize::new(0);
        let work = SharedWork(&tensors);
        let worker = || -> std::result::Result<(), E> {
            let work = &work;
            while let Some((tensor, slot)) = work.0.get(next.fetch_add(1, Ordering::Relaxed)) {
                // SAFETY: slots are disjoint pieces of live buffers, each visited once; no worker runs yet.
                let bytes = unsafe { std::slice::from_raw_parts_mut(slot.address, slot.bytes) };
                if let Err(error) = fill(tensor, bytes) {
                    next.store(usize::MAX / 2, Ordering::Relaxed);
                    return Err(error);
                }
                done(slot.bytes as u64);
            }
            Ok(())
        };
        let cores = &self.cores.own;
        std::thread::scope(|scope| {
            let run = |index: usize| {
                crate::affinity::bind(&[cores[index % cores.len()]]);
                worker()
            };
            let handles: Vec<_> = (0..threads.max(1)).map(|index| scope.spawn(move || run(index))).collect();
            handles
                .into_iter()
                .try_for_each(|h| h.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    }

    /// Bytes of weights and constants on this rank.
    pub fn constant_bytes(&self) -> u64 {
        self._owned.constants.len() as u64
    }

    /// Writes a graph input (in every graph that has it), before a run. False where no graph has it.
    pub fn write_input(&mut self, name: &str, bytes: &[u8]) -> bool {
        let mut found = false;
        for (graph, slots) in self.graphs.iter().zip(&self.own) {
            for (tensor, slot) in graph.tensors.iter().zip(slots) {
                if tensor.name == name && matches!(tensor.role, Role::Input) && bytes.len() <= slot.bytes {
                    // SAFETY: the slot is live and no worker runs (`&mut self`).
                    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), slot.address, bytes.len()) };
                    found = true;
                }
            }
        }
        found
    }

    /// A tensor of graph `graph` as this rank holds it, after a run.
    pub fn read(&self, graph: usize, name: &str) -> Option<(&TensorEntry, &[u8])> {
        let index = self.graphs[graph].tensors.iter().position(|t| t.name == name)?;
        let tensor = &self.graphs[graph].tensors[index];
        let slot = match tensor.role {
            Role::Activation | Role::Input => self.own[graph][index],
            _ => *self.shared.get(name)?,
        };
        // SAFETY: the slot is live as long as `self`; no worker runs outside `run`, which takes `&mut self`.
        Some((tensor, unsafe { std::slice::from_raw_parts(slot.address, slot.bytes) }))
    }

    /// Trace records by worker, in order.
    pub fn trace(&self) -> Vec<Vec<abi::mpk_trace_record>> {
        if self.trace.is_empty() {
            return Vec::new();
        }
        let each = self.header().trace_capacity as usize;
        let records = |(worker, &count): (usize, &u64)| {
            self.trace[worker * each..][..(count as usize).min(each)].to_vec()
        };
        self.trace_count.iter().enumerate().map(records).collect()
    }

    /// The struct that the loops share; nobody writes it after [`CpuRank::new`].
    pub(crate) fn header(&self) -> &abi::mpk_rank {
        // SAFETY: live as long as `self`, and constant, so that shared references may exist at any time.
        unsafe { &*self.rank.as_ptr() }
    }

    /// The task graphs.
    pub fn graphs(&self) -> &[TaskGraph] {
        &self.graphs
    }

    /// Collective: gives the symmetric heap back.
    pub fn free(self) {
        let CpuRank { heap, .. } = self;
        heap.free();
    }
}

/// Refuses weights that this node's ranks can't hold: mapping them works, but filling them would end in the system's
/// out-of-memory killer.
fn check_available(rank: u32, ranks: u32, bytes: u64) -> Result<()> {
    let available = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        Some(line.trim().trim_end_matches(" kB").parse::<u64>().ok()?.saturating_mul(1024))
    });
    match available {
        Some(available) if bytes.saturating_mul(u64::from(ranks)) > available => Err(Error::OutOfMemory {
            rank,
            what: "weights".into(),
            bytes,
            reason: format!("this node's {ranks} ranks share {available} bytes"),
        }),
        _ => Ok(()),
    }
}

/// Tensors with their addresses, shared by the filling threads.
struct SharedWork<'a>(&'a [(&'a TensorEntry, Slot)]);
// SAFETY: each address is used by one thread only, the one that drew its index.
unsafe impl Sync for SharedWork<'_> {}

/// Allocates one buffer for all tensors that `which` selects, the same name once.
fn place_shared(
    pages: Pages,
    rank: u32,
    what: &str,
    graphs: &[TaskGraph],
    shared: &mut HashMap<String, Slot>,
    which: impl Fn(&TensorEntry) -> bool,
) -> Result<HugeBuffer> {
    let mut layout = Layout::default();
    let mut places: HashMap<&str, (u64, u64)> = HashMap::new();
    for graph in graphs {
        for tensor in graph.tensors.iter().filter(|t| which(t)) {
            let place = places
                .entry(&tensor.name)
                .or_insert_with(|| (layout.reserve(tensor.bytes, 256), tensor.bytes));
            if place.1 != tensor.bytes {
                return Err(Error::Graph {
                    graph: graph.name.clone(),
                    problem: format!(
                        "tensor {} has {} bytes here and {} in another graph",
                        tensor.name, tensor.bytes, place.1
                    ),
                });
            }
        }
    }
    let buffer = HugeBuffer::on(pages, rank, what, layout.bytes() as usize)?;
    for (name, (offset, bytes)) in places {
        // SAFETY: the offset lies inside the buffer by the layout.
        let address = unsafe { buffer.as_ptr().add(offset as usize) };
        shared.insert(name.to_string(), Slot { address, bytes: bytes as usize });
    }
    Ok(buffer)
}

/// Places each graph's inputs and activations: one buffer for those in the rank's own memory, the symmetric
/// heap for the others.
fn place_own(
    rank: u32,
    graphs: &[TaskGraph],
    heap_layout: &HeapLayout,
    heap: &SymmetricHeap,
) -> Result<(HugeBuffer, Vec<Vec<Slot>>)> {
    let is_own =
        |t: &TensorEntry| matches!(t.role, Role::Input | Role::Activation) && t.space == Space::Device;
    let mut layout = Layout::default();
    let offsets: Vec<Vec<u64>> = graphs
        .iter()
        .map(|g| g.tensors.iter().map(|t| if is_own(t) { layout.reserve(t.bytes, 256) } else { 0 }).collect())
        .collect();
    let buffer = HugeBuffer::new(rank, "activations", layout.bytes() as usize)?;
    let slots = graphs
        .iter()
        .enumerate()
        .map(|(g, graph)| {
            let slot = |(t, tensor): (usize, &TensorEntry)| {
                let address = match tensor.space {
                    // SAFETY: both offsets lie inside their memory by their layouts.
                    Space::Symmetric => unsafe { heap.own().add(heap_layout.tensors[g][t] as usize) },
                    // SAFETY: as above; for shared tensors the address is not used.
                    Space::Device => unsafe { buffer.as_ptr().add(offsets[g][t] as usize) },
                };
                Slot { address, bytes: tensor.bytes as usize }
            };
            graph.tensors.iter().enumerate().map(slot).collect()
        })
        .collect();
    Ok((buffer, slots))
}
