//! One rank of the CUDA target: its device memory, and the `mpk_rank` that the kernel uses.

use super::device::Context;
use super::host_ring::HostRing;
use super::launch::Launcher;
use super::library::{Kernel, Library, Shape};
use super::machine::{Machine, Scratch, schedulers, trace_capacity};
use super::memory::{DeviceBuffer, PinnedBuffer, Stream};
use super::prepare::prepare;
use super::probe_kernels::ProbeKernels;
use super::symmetric::{HeapOptions, SymmetricHeap, Transport};
use super::weights::{self, WeightKernels};
use crate::arrays::{GraphArrays, any_dynamic};
use crate::common::Common;
use crate::control::Control;
use crate::control_writer::ControlWriter;
use crate::error::{Error, Result};
use crate::fill::TensorSource;
use crate::gibibytes::gibibytes;
use crate::heap_layout::HeapLayout;
use crate::lasting::Lasting;
use crate::plan::{BatchPlan, RunOptions};
use crate::tensors::{Bases, TensorLayout, constants, flagged, flagged_activations};
use crate::trace;
use crate::world::{World, agreed};
use bytemuck::AnyBitPattern;
use kernels_cu::abi;
use kernels_cu::gpu::{CollectiveShim, Cubin, KernelConfig, NvshmemVersion};
use std::sync::Arc;
use std::time::{Duration, Instant};
use taskgraph::task_graph::{TaskGraph, TensorEntry};

/// The code that the GPU executes.
#[derive(Clone, Debug)]
pub struct Code {
    /// The compiled model.
    pub cubin: Cubin,
    /// One cubin for each of the kernels of [`RunOptions::probe`].
    pub probes: Vec<Cubin>,
    /// Its kernel's shape.
    pub config: KernelConfig,
    /// The kernel variant of each task, by graph.
    pub codes: Vec<Vec<u32>>,
    /// Launch with NVSHMEM if possible.
    pub collective: bool,
    /// The version of NVSHMEM's headers and device library: that of the cubin if it is linked with them, otherwise that of the
    /// installation or the shim.
    pub nvshmem: Option<NvshmemVersion>,
    /// NVSHMEM's collective launch, if the host library does not export it.
    pub shim: Option<CollectiveShim>,
}

/// One rank of the CUDA target, ready to run.
pub struct CudaRank {
    pub(crate) common: Common,
    pub(crate) control: Control,
    pub(super) launcher: Launcher,
    pub(super) kernel: Kernel,
    pub(super) shape: Shape,
    /// The kernel's stream, and a stream for reading the device while the kernel runs.
    pub(super) stream: Stream,
    pub(super) watch: Stream,
    /// For writes by the host while the kernel runs.
    tables: Stream,
    /// The abort that the host requests, and its origin (`mpk_rank.host_abort`).
    pub(super) host_abort: PinnedBuffer,
    pub(super) rank: u32,
    pub(super) snapshot: PinnedBuffer,
    pub(crate) deadline: Duration,
    weight_kernels: WeightKernels,
    trace_capacity: u64,
    trace: DeviceBuffer,
    control_memory: DeviceBuffer,
    pub(super) areas: [DeviceBuffer; 4],
    lasting: Lasting,
    /// Present if the kernel puts through its host.
    _host_ring: Option<HostRing>,
    library: Library,
    pub(super) probe: Option<ProbeKernels>,
    pub(super) heap: SymmetricHeap,
    pub(super) heap_bytes: u64,
    pub(super) machine: Machine,
    compile_time: Duration,
}

impl CudaRank {
    /// Collective: gives every tensor its address and builds the rank. Weights and constants are zero until [`CudaRank::fill`].
    ///
    /// # Errors
    /// The GPU, its memory, NVSHMEM or the cubin cannot be used. All ranks return the same error.
    pub fn new(
        world: &World,
        machine: Machine,
        code: Code,
        graphs: Vec<TaskGraph>,
        plan: BatchPlan,
        options: &RunOptions,
    ) -> Result<CudaRank> {
        let me = world.rank();
        let context = machine.context.clone();
        // Checked before NVSHMEM starts, which takes long.
        agreed(world, check_driver(&context, &code.cubin))?;
        let heap_layout = HeapLayout::agree(world, &graphs);
        let layout = agreed(world, TensorLayout::new(&graphs, &heap_layout))?;
        let workers = graphs.first().map_or(1, |g| g.workers);
        let schedulers = if any_dynamic(&graphs) { schedulers(workers, world.size()) } else { 0 };
        let scratch = Scratch::new(&graphs);
        let record = size_of::<abi::mpk_trace_record>() as u64;
        let trace_capacity = trace_capacity(options, workers);
        let trace_bytes = trace_capacity * record * trace::rows(workers);

        let begin = Instant::now();
        let heap_bytes = heap_layout.bytes;
        let linked = code.cubin.toolchain.nvshmem.is_some();
        let stream = agreed(world, Stream::new(&context))?;
        let heap = SymmetricHeap::allocate(
            world,
            &context,
            &stream,
            &HeapOptions {
                bytes: heap_layout.bytes,
                transport: if linked || machine.puts_through_host(world) {
                    machine.transport
                } else {
                    Transport::P2p
                },
                bootstrap: machine.bootstrap,
                version: code.nvshmem,
                linked,
                local: machine.local,
            },
        )?;
        let took = begin.elapsed().as_secs_f64();
        tracing::info!("symmetric heap of {}: {took:.2} s", gibibytes(heap_layout.bytes));

        let begin = Instant::now();
        let shape = Shape {
            blocks: workers,
            threads: code.config.block_threads,
            shared_bytes: code.config.shared_bytes,
        };
        let loaded = load(&context, &code.cubin, shape);
        let (library, kernel, weight_kernels) = agreed(world, loaded)?;
        if let Some(nvshmem) = heap.linked() {
            // SAFETY: just loaded; the cubin is linked with NVSHMEM's device library (its version was compared).
            let ready = world.call(|| unsafe { nvshmem.culibrary_init(library.raw().cast()) });
            agreed(world, ready.map_err(Error::from))?;
        }
        let probe = options.probe.as_ref();
        let probe = probe.map(|probe| ProbeKernels::load(&context, probe, &code.probes, shape)).transpose();
        let probe = agreed(world, probe)?;
        if let (Some(nvshmem), Some(probe)) = (heap.linked(), &probe) {
            for library in probe.libraries() {
                // SAFETY: as above.
                let ready = world.call(|| unsafe { nvshmem.culibrary_init(library.raw().cast()) });
                agreed(world, ready.map_err(Error::from))?;
            }
        }
        // NVSHMEM's collective launch needs the kernels of all PEs on the device at once.
        let collective = code.collective && machine.sharing == 1;
        let launcher = Launcher::agree(world, heap.nvshmem(), collective, code.shim.as_ref());
        let compile_time = begin.elapsed();
        tracing::info!("cubin loaded: {:.2} s; launch by {launcher}", compile_time.as_secs_f64());

        let begin = Instant::now();
        let memory = || -> Result<_> {
            let new = |what, bytes, value: u8| {
                let buffer = DeviceBuffer::new(&context, what, bytes)?;
                buffer.fill(value, &stream)?;
                Ok::<_, Error>(buffer)
            };
            let areas = [
                new("weights", layout.constants, 0)?,
                new("the key-value cache", layout.persistent, 0)?,
                // No kernel may rely on the initial contents: all bits set is NaN in every float type.
                new("activations", layout.activations, 0xff)?,
                new("scratch", scratch.each * u64::from(workers), 0)?,
            ];
            let trace = new("the trace", trace_bytes, 0)?;
            let host_abort = PinnedBuffer::new(&context, "the abort word", 64)?;
            let snapshot = PinnedBuffer::new(&context, "the progress", size_of::<abi::mpk_control>())?;
            Ok((areas, trace, host_abort, snapshot, Stream::new(&context)?, Stream::new(&context)?))
        };
        let (areas, trace, host_abort, snapshot, watch, tables) = agreed(world, memory())?;
        let host_ring = match world.proxy().filter(|_| machine.puts_through_host(world)) {
            Some(proxy) => Some(agreed(world, HostRing::new(&context, &stream, proxy))?),
            None => None,
        };
        // A counter needs one kind of atomic: two ranks that cannot reach each other decide for all ranks.
        let out_of_reach = heap.bases().contains(&0) && host_ring.is_none();
        let signals = match world.all_gather(u64::from(out_of_reach)).contains(&1) {
            true => abi::MPK_SIGNALS_NVSHMEM,
            false => abi::MPK_SIGNALS_DIRECT,
        };
        let slots = layout.slots(Bases {
            constants: areas[0].address(),
            persistent: areas[1].address(),
            activations: areas[2].address(),
            heap: heap.base(),
        });
        let write = || -> Result<_> {
            for slot in flagged_activations(&graphs, &layout, &slots) {
                // SAFETY: the slot is part of the activations. In the same stream, this comes after they were filled with NaN.
                unsafe { stream.memset(slot.address, 0, slot.bytes) }?;
            }
            let arrays = graphs
                .iter()
                .zip(&slots)
                .zip(&code.codes)
                .map(|((graph, slots), codes)| GraphArrays::new(graph, slots, codes, heap.bases()))
                .collect::<Result<Vec<_>>>()?;
            let lasting = Lasting {
                rank: me,
                world: world.size(),
                schedulers,
                arrays,
                flagged: flagged(&graphs, &slots).collect(),
                heap: heap_layout,
                signals,
                scratch: scratch.of_workers(areas[3].address(), workers),
                trace: trace.address(),
                trace_capacity,
                options: options.clone(),
                oversubscribed: u32::from(machine.sharing > 1),
                threads_per_core: 0,
                kernels: 0,
                host_abort: host_abort.as_ptr() as u64,
                proxy: host_ring.as_ref().map_or(0, HostRing::address),
            };
            let made = prepare(&context, &stream, &lasting, &graphs, &slots, &plan, heap.bases())?;
            Ok((lasting, made))
        };
        let (lasting, (outputs, control, control_memory)) = agreed(world, write())?;
        let took = begin.elapsed().as_secs_f64();
        tracing::info!("memory and task graphs ({}): {took:.2} s", gibibytes(control.written));
        Ok(CudaRank {
            common: Common { graphs, slots, outputs: Arc::new(outputs), constant_bytes: layout.constants },
            control,
            launcher,
            kernel,
            shape,
            stream,
            watch,
            tables,
            host_abort,
            rank: world.rank(),
            snapshot,
            deadline: options.deadline,
            weight_kernels,
            trace_capacity,
            trace,
            control_memory,
            areas,
            lasting,
            _host_ring: host_ring,
            library,
            probe,
            heap,
            heap_bytes,
            machine,
            compile_time,
        })
    }

    /// Prepares another launch of `plan`. Weights and the kernel stay in memory; the outputs of the last launch are lost. No rank
    /// may still be running; [`CudaRank::run`] waits until every rank has come this far.
    ///
    /// # Errors
    /// The device failed or lacks memory.
    pub fn restart(&mut self, plan: &BatchPlan) -> Result<()> {
        let (context, stream) = (&self.machine.context, &self.stream);
        context.make_current()?;
        // SAFETY: the beginning of this rank's heap, and slots of its live memory. No rank accesses them between two launches;
        // the wait in `launch` comes before the next one.
        unsafe {
            stream.memset(self.heap.base(), 0, self.lasting.heap.protocol_bytes)?;
            for slot in &self.lasting.flagged {
                stream.memset(slot.address, 0, slot.bytes)?;
            }
        }
        let Common { graphs, slots, .. } = &self.common;
        let made = prepare(context, stream, &self.lasting, graphs, slots, plan, self.heap.bases())?;
        let (outputs, control, control_memory) = made;
        self.common.outputs = Arc::new(outputs);
        self.control = control;
        self.control_memory = control_memory;
        Ok(())
    }

    /// Time from the task graphs to the loaded cubin.
    pub fn compile_time(&self) -> Duration {
        self.compile_time
    }

    /// Adds the time of earlier steps, before [`CudaRank::new`].
    pub fn add_compile_time(&mut self, time: Duration) {
        self.compile_time += time;
    }

    /// Fills weights and constants, using `threads` threads that read. `done` gets the number of bytes of finished tensors.
    ///
    /// # Errors
    /// The first error of a thread.
    pub fn fill<S: TensorSource>(
        &mut self,
        threads: usize,
        source: &S,
        done: impl Fn(u64) + Sync,
    ) -> std::result::Result<(), S::Error> {
        let tensors = constants(&self.common.graphs, &self.common.slots);
        weights::fill(&self.machine.context, self.weight_kernels, tensors, threads, source, done)
    }

    /// Writes a graph input, in every graph that has it, before a run. Returns false if no graph has it.
    ///
    /// # Errors
    /// The device failed.
    pub fn write_input(&mut self, name: &str, bytes: &[u8]) -> Result<bool> {
        let places = self.common.inputs(name, bytes.len());
        for slot in &places {
            // SAFETY: the slot is device memory of this rank with room for the bytes; no kernel runs (`&mut self`).
            unsafe { self.stream.to_device(slot.address, bytes.as_ptr(), bytes.len() as u64) }?;
        }
        self.stream.wait()?;
        Ok(!places.is_empty())
    }

    /// A tensor of graph `graph`, as this rank holds it after a run.
    ///
    /// # Errors
    /// The device failed.
    pub fn read(&self, graph: usize, name: &str) -> Result<Option<(&TensorEntry, Vec<u8>)>> {
        let Some((tensor, slot)) = self.common.tensor(graph, name) else { return Ok(None) };
        // SAFETY: the slot is device memory of this rank.
        let bytes = unsafe { self.watch.read(slot.address, slot.bytes) }?;
        Ok(Some((tensor, bytes)))
    }

    /// The timeline: one row per worker, and one for the batch step.
    ///
    /// # Errors
    /// The device failed.
    pub fn trace(&self) -> Result<Vec<trace::Row>> {
        let each = self.trace_capacity;
        if each == 0 {
            return Ok(Vec::new());
        }
        let record = size_of::<abi::mpk_trace_record>() as u64;
        let rows = trace::rows(self.shape.blocks);
        let counts = self.read_control::<u64>(self.control.trace_count, rows as usize)?;
        let mut all = Vec::new();
        for (row, count) in counts.into_iter().enumerate() {
            let at = self.trace.address() + row as u64 * each * record;
            // SAFETY: `each` records were reserved for each row.
            let bytes = unsafe { self.watch.read(at, count.min(each) * record) }?;
            all.push(trace::Row::new(from_bytes::<abi::mpk_trace_record>(&bytes), count));
        }
        Ok(all)
    }

    /// The states of the worker and scheduler loops.
    pub(super) fn statuses(&self) -> Result<Vec<abi::mpk_status>> {
        self.read_control(self.control.status, self.control.statuses)
    }

    /// Values of the control memory, read from the device.
    fn read_control<T: AnyBitPattern>(&self, offset: u64, count: usize) -> Result<Vec<T>> {
        let at = self.control_memory.address() + offset;
        // SAFETY: the range was reserved in the control memory.
        let bytes = unsafe { self.watch.read(at, (count * size_of::<T>()) as u64) }?;
        Ok(from_bytes(&bytes))
    }

    /// Lets the host write memory that the kernel reads.
    pub(crate) fn writer(&self) -> Writer<'_> {
        Writer { rank: self }
    }

    /// Collective: frees symmetric memory, after every rank's kernel has ended.
    ///
    /// # Errors
    /// NVSHMEM fails.
    pub fn free(self, world: &World) -> Result<()> {
        let CudaRank { heap, library, .. } = self;
        heap.free(world, &library)
    }
}

/// Writes device memory with the copy engine while the kernel runs.
pub(crate) struct Writer<'a> {
    rank: &'a CudaRank,
}

impl ControlWriter for Writer<'_> {
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let to = self.rank.control_memory.address() + offset;
        // SAFETY: a range of the control memory. The kernel does not read it before the host has counted the entry that refers to
        // it, or before the next launch. Bytes that are not pinned have been read when the call returns.
        unsafe { self.rank.tables.to_device(to, bytes.as_ptr(), bytes.len() as u64) }
    }

    fn zero(&self, offset: u64, bytes: u64) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.rank.tables.memset(self.rank.control_memory.address() + offset, 0, bytes) }
    }

    fn zero_heap(&self, offset: u64, bytes: u64) -> Result<()> {
        // SAFETY: the heap's layout contains these bytes, and no rank's kernel runs.
        unsafe { self.rank.tables.memset(self.rank.heap.base() + offset, 0, bytes) }
    }

    fn is_written(&self) -> Result<bool> {
        self.rank.tables.is_done()
    }
}

/// Refuses a driver that is too old for the cubin.
fn check_driver(context: &Context, cubin: &Cubin) -> Result<()> {
    match super::driver::release_of_build(&cubin.toolchain.nvcc) {
        Some(release) => context.gpu().driver().serves(release),
        None => Ok(()),
    }
}

/// Loads the cubin and checks that the kernel can run.
fn load(context: &Arc<Context>, cubin: &Cubin, shape: Shape) -> Result<(Library, Kernel, WeightKernels)> {
    let library = Library::load(context, &cubin.bytes)?;
    let kernel = library.kernel(c"mpk_persistent")?;
    kernel.prepare(context, shape)?;
    let weight_kernels = WeightKernels::of(&library)?;
    Ok((library, kernel, weight_kernels))
}

/// Converts bytes to plain values.
fn from_bytes<T: AnyBitPattern>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}
