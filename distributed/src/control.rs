//! The `mpk_rank` of a kernel and everything that it points to, laid out in one block of memory.

use crate::arrays::placement_of_rank;
use crate::batch_memory::{BatchMemory, TablePlaces};
use crate::control_writer::ControlWriter;
use crate::error::Result;
use crate::image::Image;
use crate::lasting::Lasting;
use crate::memory::Layout;
use crate::outputs::Outputs;
use crate::plan::BatchPlan;
use crate::queues::Queues;
use crate::tensors::Slot;
use kernels_cu::abi;
use std::mem::offset_of;
use taskgraph::task_graph::TaskGraph;

/// The inputs of the control memory: what all launches have, and what this one adds.
pub(crate) struct Parts<'a> {
    pub lasting: &'a Lasting,
    pub graphs: &'a [TaskGraph],
    pub slots: &'a [Vec<Slot>],
    pub plan: &'a BatchPlan,
    pub outputs: &'a Outputs,
    /// The heap of each rank, by addresses that the kernel uses; 0 if stores cannot reach it.
    pub sym: &'a [u64],
}

/// The written control memory.
pub(crate) struct Control {
    pub image: Image,
    /// Number of bytes of the image that were written. The rest is zero.
    pub written: u64,
    /// Offset of `mpk_rank`.
    pub rank: u64,
    /// Offset of the `mpk_status` array, and its length.
    pub status: u64,
    pub statuses: usize,
    /// Offset of the number of records of each row of the timeline.
    pub trace_count: u64,
    /// The tables that the host fills while the kernel runs.
    pub table: TablePlaces,
    queues: Queues,
    /// Offset of `mpk_rank.remote_pushed`, and its size in bytes.
    pushed: (u64, u64),
    /// Offsets and sizes of the words in the symmetric heap that must be 0 at a launch.
    heap_zeros: Vec<(u64, u64)>,
}

impl Control {
    /// Lays out, allocates and writes everything.
    pub fn new(parts: &Parts<'_>, allocate: impl FnOnce(u64) -> Result<Image>) -> Result<Control> {
        let lasting = parts.lasting;
        let workers = lasting.scratch.len();
        // Without schedulers, one status belongs to the batch step.
        let statuses = workers + (lasting.schedulers as usize).max(1);
        let mut layout = Layout::default();
        let rank_at = layout.reserve(size_of::<abi::mpk_rank>() as u64, 128);
        let graphs_at = layout.reserve((parts.graphs.len() * size_of::<abi::mpk_graph>()) as u64, 128);
        let mut words = |count: usize| layout.reserve(count as u64 * 8, 128);
        let sym_at = words(parts.sym.len());
        let pushed_at = words(lasting.world as usize);
        let scratch_at = words(workers);
        let trace_count_at = words(workers + 1);
        let status_at = layout.reserve((statuses * size_of::<abi::mpk_status>()) as u64, 128);
        let batch = BatchMemory::reserve(parts.graphs, parts.plan, &mut layout);
        let places: Vec<_> = lasting.arrays.iter().map(|arrays| arrays.reserve(&mut layout)).collect();
        let table = batch.table();
        let queues =
            Queues::reserve(parts.graphs, workers as u32, lasting.schedulers, lasting.world, &mut layout);

        let mut image = allocate(layout.bytes())?;
        let own_heap = parts.sym[lasting.rank as usize];
        let graphs: Vec<abi::mpk_graph> = parts
            .graphs
            .iter()
            .zip(&lasting.arrays)
            .zip(places)
            .zip(&lasting.heap.counters)
            .map(|(((graph, arrays), places), counters)| {
                arrays.write(graph, places, own_heap + counters, &mut image)
            })
            .collect();
        if lasting.kernels != 0 && kernels_cu::sanitizer::enabled() {
            for ((graph, arrays), slots) in parts.graphs.iter().zip(&graphs).zip(parts.slots) {
                let addresses = slots.iter().map(|slot| slot.address);
                kernels_cu::sanitizer::declare(graph, arrays.operands, addresses)?;
            }
        }
        image.put(graphs_at, &graphs);
        image.put(sym_at, parts.sym);
        image.put(scratch_at, &lasting.scratch);
        let batch = batch.write(parts.graphs, parts.slots, parts.plan, parts.outputs, &mut image);
        let (worker_queues, scheduler_queues) = queues.write(&mut image);
        let written = queues.written();
        let stall = lasting.options.stall.filter(|s| s.rank == lasting.rank);
        let traced = lasting.trace_capacity > 0;
        let rank = abi::mpk_rank {
            abi_version: abi::MPK_ABI_VERSION,
            rank: lasting.rank,
            world: lasting.world,
            num_workers: workers as u32,
            num_schedulers: lasting.schedulers,
            num_graphs: parts.graphs.len() as u32,
            placement: placement_of_rank(parts.graphs),
            oversubscribed: lasting.oversubscribed,
            threads_per_core: lasting.threads_per_core,
            pad: 0,
            deadline_ns: lasting.options.deadline.as_nanos().min(u128::from(u64::MAX)) as u64,
            sym: image.address(sym_at) as *mut _,
            control: own_heap as *mut _,
            graphs: image.address(graphs_at) as *mut _,
            batch_config: batch.config as *mut _,
            batch: batch.batch as *mut _,
            batch_output: parts.outputs.address() as *mut _,
            batch_private: batch.private as *mut _,
            worker_queues: worker_queues as *mut _,
            scheduler_queues: scheduler_queues as *mut _,
            remote_rings: lasting.heap.rings,
            remote_ring_bytes: lasting.heap.ring_bytes,
            remote_ring_capacity: lasting.heap.ring_capacity,
            remote_pushed: image.address(pushed_at) as *mut _,
            kernels: lasting.kernels as *const _,
            scratch: image.address(scratch_at) as *mut _,
            status: image.address(status_at) as *mut _,
            trace: if traced { lasting.trace as *mut _ } else { std::ptr::null_mut() },
            trace_count: image.address(trace_count_at) as *mut _,
            trace_capacity: lasting.trace_capacity,
            stall_ns: stall.map_or(0, |s| s.time.as_nanos() as u64),
            stall_op: stall.map_or(u32::MAX, |s| s.op),
            signals: lasting.signals,
            host_abort: lasting.host_abort as *mut _,
            proxy: lasting.proxy as *mut _,
        };
        image.put(rank_at, &[rank]);
        let published = (offset_of!(abi::mpk_control, iteration) as u64, 8);
        let tails = (0..u64::from(lasting.world))
            .map(|sender| (lasting.heap.rings + sender * lasting.heap.ring_bytes, 8));
        let tails = tails.filter(|_| lasting.heap.ring_capacity > 0);
        Ok(Control {
            image,
            written,
            rank: rank_at,
            status: status_at,
            statuses,
            trace_count: trace_count_at,
            table,
            queues,
            pushed: (pushed_at, u64::from(lasting.world) * 8),
            heap_zeros: std::iter::once(published).chain(tails).collect(),
        })
    }

    /// Prepares the memory for another launch, which continues with the batch step's state. No rank's kernel may be running.
    pub fn reset(&self, writer: &impl ControlWriter) -> Result<()> {
        self.queues.reset(&self.image, writer)?;
        writer.zero(self.pushed.0, self.pushed.1)?;
        self.heap_zeros.iter().try_for_each(|&(offset, bytes)| writer.zero_heap(offset, bytes))
    }
}
