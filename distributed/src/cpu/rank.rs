//! One rank of the CPU target: its memory, and the `mpk_rank` that the protocol uses.

use crate::affinity::Cores;
use crate::arrays::{GraphArrays, any_dynamic};
use crate::common::Common;
use crate::control::{Control, Parts};
use crate::control_writer::ControlWriter;
use crate::cpu::symmetric::SymmetricHeap;
use crate::error::{Error, Result};
use crate::fill::TensorSource;
use crate::heap_layout::HeapLayout;
use crate::image::Image;
use crate::lasting::Lasting;
use crate::memory::{HugeBuffer, Pages};
use crate::outputs::Outputs;
use crate::plan::{BatchPlan, RunOptions};
use crate::tensors::{Bases, Slot, TensorLayout, constants, flagged};
use crate::trace;
use crate::world::World;
use kernels_cu::abi;
use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use taskgraph::task_graph::{TaskGraph, TensorEntry};

/// Maximum memory of the timeline. Unwritten memory costs nothing.
const TRACE_BYTES: u64 = 4 << 30;

/// One rank of the CPU target, ready to run.
pub struct CpuRank {
    pub(crate) common: Common,
    pub(crate) cores: Cores,
    pub(crate) control: Control,
    trace: HugeBuffer,
    pub(crate) heap: SymmetricHeap,
    /// The parts from which a launch's control memory is made.
    lasting: Lasting,
    /// Memory that the kernel's structs point to. Kept alive only.
    _kernels: Vec<abi::mpk_kernel>,
    _areas: [HugeBuffer; 4],
}

/// Outputs and control memory for the requests of `plan`.
fn prepare(
    lasting: &Lasting,
    graphs: &[TaskGraph],
    slots: &[Vec<Slot>],
    plan: &BatchPlan,
    heap: &SymmetricHeap,
) -> Result<(Outputs, Control)> {
    let me = lasting.rank;
    let in_place =
        |what: &'static str| move |bytes: u64| HugeBuffer::new(me, what, bytes as usize).map(Image::in_place);
    let outputs = Outputs::new(plan, in_place("the results"))?;
    let bases: Vec<u64> = heap.bases().iter().map(|&base| base as u64).collect();
    let control = Control::new(
        &Parts { lasting, graphs, slots, plan, outputs: &outputs, sym: &bases },
        in_place("the batch state"),
    )?;
    Ok((outputs, control))
}

/// How `threads` of a rank share its cores (`mpk_cores`). With `proxy`, there is one more thread, which sends to other nodes.
fn sharing(cores: &Cores, threads: usize, proxy: bool) -> u32 {
    let own = cores.own.len();
    match () {
        () if cores.sharers > 1 || threads > own => abi::MPK_CORES_FEW,
        () if proxy && threads == own => abi::MPK_CORES_PROXY,
        () => abi::MPK_CORES_ENOUGH,
    }
}

/// Number of threads that share a core, if each rank has `threads`.
fn threads_per_core(cores: &Cores, threads: usize) -> u32 {
    (threads * cores.sharers).div_ceil(cores.own.len().max(1)) as u32
}

impl CpuRank {
    /// Collective: gives every tensor its address and builds the rank. Weights and constants are zero until [`CpuRank::fill`].
    pub fn new(
        world: &World,
        graphs: Vec<TaskGraph>,
        plan: BatchPlan,
        options: &RunOptions,
        cores: Cores,
    ) -> Result<CpuRank> {
        let me = world.rank();
        let heap_layout = HeapLayout::agree(world, &graphs);
        let heap = SymmetricHeap::allocate(world, heap_layout.bytes as usize)?;
        let workers = graphs.first().map_or(1, |g| g.workers) as usize;
        let schedulers = if any_dynamic(&graphs) { 1 + usize::from(world.size() > 1) } else { 0 };

        let layout = TensorLayout::new(&graphs, &heap_layout)?;
        let weights = HugeBuffer::new(me, "weights", layout.constants as usize)?;
        let here = world.node_size();
        check_memory((me, here), "weights and tables", layout.constants, &FREE)?;
        // The cache takes memory page by page as requests use it, so it may be larger than what is free now.
        check_memory((me, here), "the key-value cache", layout.persistent, &ALL)?;
        let persistent = HugeBuffer::on(Pages::Small, me, "the key-value cache", layout.persistent as usize)?;
        let activations = HugeBuffer::new(me, "activations", layout.activations as usize)?;
        let slots = layout.slots(Bases {
            constants: weights.as_ptr() as u64,
            persistent: persistent.as_ptr() as u64,
            activations: activations.as_ptr() as u64,
            heap: heap.own() as u64,
        });

        let bases: Vec<u64> = heap.bases().iter().map(|&base| base as u64).collect();
        let arrays = graphs
            .iter()
            .zip(&slots)
            .map(|(graph, slots)| GraphArrays::new(graph, slots, &[], &bases))
            .collect::<Result<Vec<_>>>()?;
        let scratch_each =
            arrays.iter().map(|a| a.scratch_bytes).max().unwrap_or(0).next_multiple_of(4096) + 4096;
        let scratch = HugeBuffer::new(me, "scratch", scratch_each as usize * workers)?;
        let scratch_of: Vec<u64> =
            (0..workers as u64).map(|w| scratch.as_ptr() as u64 + w * scratch_each).collect();
        let trace_capacity = if options.trace { trace::capacity(workers as u32, TRACE_BYTES) } else { 0 };
        let trace_bytes =
            trace_capacity * trace::rows(workers as u32) * size_of::<abi::mpk_trace_record>() as u64;
        let trace = HugeBuffer::on(Pages::Small, me, "the trace", trace_bytes as usize)?;
        let kernels = kernels_cu::registry::kernel_table()?;
        let lasting = Lasting {
            rank: me,
            world: world.size(),
            schedulers: schedulers as u32,
            arrays,
            flagged: flagged(&graphs, &slots).collect(),
            heap: heap_layout,
            signals: abi::MPK_SIGNALS_DIRECT,
            scratch: scratch_of,
            trace: trace.as_ptr() as u64,
            trace_capacity,
            options: options.clone(),
            oversubscribed: sharing(&cores, workers + schedulers, world.proxy().is_some()),
            threads_per_core: threads_per_core(&cores, workers + schedulers),
            kernels: kernels.as_ptr() as u64,
            host_abort: 0,
            proxy: world.proxy().map_or(0, |proxy| proxy.ring() as u64),
        };
        let (outputs, control) = prepare(&lasting, &graphs, &slots, &plan, &heap)?;
        Ok(CpuRank {
            common: Common { graphs, slots, outputs: Arc::new(outputs), constant_bytes: layout.constants },
            cores,
            control,
            trace,
            heap,
            lasting,
            _kernels: kernels,
            _areas: [weights, persistent, activations, scratch],
        })
    }

    /// Prepares another launch of `plan`. Weights stay in memory; the outputs of the last launch are lost. No rank may still be
    /// running; [`CpuRank::run`] waits until every rank has come this far.
    pub fn restart(&mut self, plan: &BatchPlan) -> Result<()> {
        let own = self.heap.own();
        // SAFETY: the beginning of this rank's heap, and slots of its live memory. No rank accesses them between two launches.
        unsafe {
            std::ptr::write_bytes(own, 0, self.lasting.heap.protocol_bytes as usize);
            for slot in &self.lasting.flagged {
                std::ptr::write_bytes(slot.address as *mut u8, 0, slot.bytes as usize);
            }
        }
        let Common { graphs, slots, .. } = &self.common;
        let (outputs, control) = prepare(&self.lasting, graphs, slots, plan, &self.heap)?;
        self.common.outputs = Arc::new(outputs);
        self.control = control;
        Ok(())
    }

    /// Fills weights and constants, using `threads` threads. `done` gets the number of bytes finished so far. Stops at the first
    /// error.
    pub fn fill<S: TensorSource>(
        &mut self,
        threads: usize,
        source: &S,
        done: impl Fn(u64) + Sync,
    ) -> std::result::Result<(), S::Error> {
        let tensors = constants(&self.common.graphs, &self.common.slots);
        let next = AtomicUsize::new(0);
        let worker = || -> std::result::Result<(), S::Error> {
            while let Some(&(tensor, slot)) = tensors.get(next.fetch_add(1, Ordering::Relaxed)) {
                // SAFETY: slots are disjoint pieces of live buffers, each visited once; no worker runs yet.
                let bytes =
                    unsafe { std::slice::from_raw_parts_mut(slot.address as *mut u8, slot.bytes as usize) };
                if let Err(error) = source.fill(tensor, bytes) {
                    next.store(usize::MAX / 2, Ordering::Relaxed);
                    return Err(error);
                }
                done(slot.bytes);
            }
            Ok(())
        };
        let cores = &self.cores.own;
        std::thread::scope(|scope| {
            let run = |index: usize| {
                crate::affinity::bind(&[cores[index % cores.len()]]);
                worker()
            };
            crate::fill::threads(scope, threads, run)?
                .into_iter()
                .try_for_each(|h| h.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    }

    /// Writes a graph input, in every graph that has it, before a run. Returns false if no graph has it.
    pub fn write_input(&mut self, name: &str, bytes: &[u8]) -> bool {
        let places = self.common.inputs(name, bytes.len());
        for slot in &places {
            // SAFETY: the slot is live, has room for the bytes, and no worker runs (`&mut self`).
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), slot.address as *mut u8, bytes.len()) };
        }
        !places.is_empty()
    }

    /// A tensor of graph `graph`, as this rank holds it after a run.
    pub fn read(&self, graph: usize, name: &str) -> Option<(&TensorEntry, Vec<u8>)> {
        let (tensor, Slot { address, bytes }) = self.common.tensor(graph, name)?;
        // SAFETY: the slot is live as long as `self`; no worker runs outside `run`, which takes `&mut self`.
        Some((tensor, unsafe { std::slice::from_raw_parts(address as *const u8, bytes as usize) }.to_vec()))
    }

    /// The timeline: one row per worker, and one for the batch step.
    pub fn trace(&self) -> Vec<trace::Row> {
        let header = self.header();
        let each = header.trace_capacity as usize;
        if each == 0 {
            return Vec::new();
        }
        let rows = trace::rows(header.num_workers) as usize;
        let counts = self.control.image.host::<u64>(self.control.trace_count, rows);
        let records = self.trace.as_ptr().cast::<abi::mpk_trace_record>();
        (0..rows)
            .map(|row| {
                // SAFETY: a count for each row, and `each` zeroed or written records; no worker runs any more.
                let (count, written) = unsafe {
                    let count = *counts.add(row);
                    let written = (count as usize).min(each);
                    (count, std::slice::from_raw_parts(records.add(row * each), written))
                };
                trace::Row::new(written.to_vec(), count)
            })
            .collect()
    }

    /// The struct that the loops share. Nobody writes it after [`CpuRank::new`].
    pub(crate) fn header(&self) -> &abi::mpk_rank {
        // SAFETY: live as long as `self`, and constant, so that shared references may exist at any time.
        unsafe { &*self.rank() }
    }

    /// The struct's address.
    pub(crate) fn rank(&self) -> *mut abi::mpk_rank {
        self.control.image.host(self.control.rank, 1)
    }

    /// The states of the worker and scheduler loops. Read while they do not run.
    pub(crate) fn statuses(&self) -> Vec<abi::mpk_status> {
        let statuses = self.control.image.host(self.control.status, self.control.statuses);
        // SAFETY: as many structs were reserved and zeroed; no loop runs any more.
        unsafe { std::slice::from_raw_parts(statuses, self.control.statuses) }.to_vec()
    }

    /// The bell of a rank's host, in its control block; `None` if its memory cannot be reached.
    pub(crate) fn bell_of(&self, rank: usize) -> Option<NonNull<u32>> {
        let heap = NonNull::new(*self.heap.bases().get(rank)?)?;
        // SAFETY: the control block is the first in every rank's heap.
        Some(unsafe { heap.add(offset_of!(abi::mpk_control, bell)) }.cast())
    }

    /// Lets the host write memory that the loops read.
    pub(crate) fn writer(&self) -> Writer<'_> {
        Writer { control: &self.control, heap: self.heap.own() }
    }

    /// Collective: frees the symmetric heap.
    pub fn free(self, world: &World) {
        let CpuRank { heap, .. } = self;
        heap.free(world);
    }
}

/// Writes memory that the loops read.
pub(crate) struct Writer<'a> {
    control: &'a Control,
    heap: *mut u8,
}

impl ControlWriter for Writer<'_> {
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let place = self.control.image.host::<u8>(offset, bytes.len());
        // SAFETY: `place` has room for the bytes. The loops do not read them before the host has counted the entry that refers to
        // it (release), or before the next launch.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
        Ok(())
    }

    fn zero(&self, offset: u64, bytes: u64) -> Result<()> {
        let place = self.control.image.host::<u8>(offset, bytes as usize);
        // SAFETY: as above.
        unsafe { std::ptr::write_bytes(place, 0, bytes as usize) };
        Ok(())
    }

    fn zero_heap(&self, offset: u64, bytes: u64) -> Result<()> {
        // SAFETY: the heap's layout contains these bytes, and no rank's loops run.
        unsafe { std::ptr::write_bytes(self.heap.add(offset as usize), 0, bytes as usize) };
        Ok(())
    }

    fn is_written(&self) -> Result<bool> {
        Ok(true)
    }
}

/// Free memory, or all memory: the field of /proc/meminfo, and its description.
type Measure = (&'static str, &'static str);
const FREE: Measure = ("MemAvailable:", "free memory");
const ALL: Measure = ("MemTotal:", "memory");

/// Refuses `bytes` of memory a rank that this node's ranks cannot hold. Mapping them would succeed, but filling them would trigger the
/// system's out-of-memory killer.
fn check_memory((rank, ranks): (u32, u32), what: &str, bytes: u64, (field, name): &Measure) -> Result<()> {
    let limit = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix(field))?;
        Some(line.trim().trim_end_matches(" kB").parse::<u64>().ok()?.saturating_mul(1024))
    });
    match limit {
        Some(limit) if bytes.saturating_mul(u64::from(ranks)) > limit => Err(Error::OutOfMemory {
            rank,
            what: what.into(),
            bytes,
            reason: match ranks {
                1 => format!("this node has {limit} bytes of {name}"),
                _ => format!("this node's {ranks} ranks share {limit} bytes of {name}"),
            },
        }),
        _ => Ok(()),
    }
}
