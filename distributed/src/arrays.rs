//! A task graph as the arrays of the ABI.

use crate::error::{Error, Result};
use crate::image::Image;
use crate::memory::Layout;
use crate::tensors::Slot;
use kernels_cu::abi;
use kernels_cu::layout::layout_of;
use kernels_cu::registry::type_number;
use taskgraph::task_graph::{EventType, Place, Space, TaskGraph, core_types};
use taskgraph::{EventId, Placement};

/// The arrays that an `mpk_graph` points to.
#[derive(Default)]
pub struct GraphArrays {
    tasks: Vec<abi::mpk_task>,
    events: Vec<abi::mpk_event>,
    variants: Vec<abi::mpk_variant>,
    operands: Vec<abi::mpk_operand>,
    dependencies: Vec<abi::mpk_dependency>,
    worker_first: Vec<u32>,
    worker_tasks: Vec<u32>,
    /// Scratch memory that a worker needs, in bytes.
    pub scratch_bytes: u64,
}

/// Offsets of a graph's arrays in an image.
#[derive(Clone, Copy)]
pub struct ArrayPlaces {
    tasks: u64,
    events: u64,
    variants: u64,
    operands: u64,
    dependencies: u64,
    worker_first: u64,
    worker_tasks: u64,
    launched: u64,
}

impl GraphArrays {
    /// Converts `graph`. `slots` has the address of each tensor in the kernel's memory. On a GPU, `codes` has the kernel variant
    /// of each task in the cubin. `sym` has each rank's symmetric heap as seen from this rank, 0 if stores cannot reach it.
    pub fn new(graph: &TaskGraph, slots: &[Slot], codes: &[u32], sym: &[u64]) -> Result<Self> {
        let problem = |problem: String| Error::Graph { graph: graph.name.clone(), problem };
        let types = graph
            .type_names
            .iter()
            .map(|name| type_number(name).ok_or_else(|| problem(format!("no kernel for task type {name}"))))
            .collect::<Result<Vec<u16>>>()?;
        let mut arrays = GraphArrays::default();
        for variant in &graph.variants {
            if variant.params.len() > abi::MPK_MAX_PARAMS as usize {
                return Err(problem(format!("a variant has {} parameters", variant.params.len())));
            }
            let mut params = [0; abi::MPK_MAX_PARAMS as usize];
            params[..variant.params.len()].copy_from_slice(&variant.params);
            arrays.scratch_bytes = arrays.scratch_bytes.max(u64::from(variant.scratch_bytes));
            arrays.variants.push(abi::mpk_variant {
                task_type: types[usize::from(variant.task_type)],
                num_params: variant.params.len() as u16,
                scratch_bytes: variant.scratch_bytes,
                params,
            });
        }
        arrays.operands = graph
            .operands
            .iter()
            .map(|operand| {
                let tensor = &graph.tensors[operand.tensor as usize];
                abi::mpk_operand {
                    addr: slots[operand.tensor as usize].address + operand.offset,
                    dims: operand.dims,
                    strides: operand.strides,
                    dtype: tensor.dtype as u8,
                    ndim: operand.ndim,
                    layout: layout_of(tensor, graph.backend),
                    symmetric: u8::from(tensor.space == Space::Symmetric),
                    pe: match operand.place {
                        Place::Own => -1,
                        Place::Peer(rank) => i32::from(rank),
                        Place::All => -2,
                    },
                }
            })
            .collect();
        arrays.reach_peers(graph, slots, sym).map_err(problem)?;
        let flag_numbers = graph.flag_numbers();
        let flag_count = flag_numbers.iter().flatten().count() as u32;
        for (index, task) in graph.tasks.iter().enumerate() {
            let flag_of = |o: &taskgraph::task_graph::Operand| flag_numbers[o.tensor as usize];
            let flagged = graph.inputs(task).iter().any(|o| flag_of(o).is_some());
            let mut flags = graph.inputs(task).iter().chain(graph.outputs(task)).filter_map(flag_of);
            let flag = flags.next();
            if flags.any(|other| Some(other) != flag) {
                return Err(problem(format!("task {index} touches flagged words of two tensors")));
            }
            let first_dependency = arrays.dependencies.len() as u32;
            let now = task.dependencies.iter().map(|&event| (event, 0));
            arrays.dependencies.extend(
                now.chain(task.carried.iter().copied())
                    .map(|(event, epochs_back)| abi::mpk_dependency { event, epochs_back }),
            );
            let num_dependencies = u16::try_from(arrays.dependencies.len() as u32 - first_dependency)
                .map_err(|_| problem(format!("task {index} depends on more than 65535 events")))?;
            arrays.tasks.push(abi::mpk_task {
                trigger_event: task.trigger.unwrap_or(EventId::INVALID).0,
                first_operand: task.first_operand,
                first_dependency,
                num_inputs: task.num_inputs,
                num_outputs: task.num_outputs,
                num_dependencies,
                task_type: types[usize::from(task.task_type)],
                variant: task.variant,
                flags: if flagged { abi::MPK_TASK_FLAGGED_INPUTS as u16 } else { 0 },
                worker: task.worker.unwrap_or(u32::MAX),
                op: task.op,
                args: task.args,
                flag_count: if flag.is_some() { flag_count } else { 0 },
                flag_number: flag.unwrap_or(0),
                code: codes.get(index).copied().unwrap_or(abi::MPK_NO_CODE),
            });
        }
        arrays.events = graph
            .events
            .iter()
            .map(|event| abi::mpk_event {
                num_triggers: event.num_triggers,
                first_task: event.first_task,
                last_task: event.last_task,
                event_type: match event.event_type {
                    EventType::Empty => abi::MPK_EVENT_EMPTY,
                    EventType::LaunchTasks => abi::MPK_EVENT_LAUNCH_TASKS,
                    EventType::LaunchMassiveTasks => abi::MPK_EVENT_LAUNCH_MASSIVE_TASKS,
                    EventType::LaunchDependentTasks => abi::MPK_EVENT_LAUNCH_DEPENDENT_TASKS,
                    EventType::EndOfTaskGraph => abi::MPK_EVENT_END_OF_TASK_GRAPH,
                    EventType::Termination => abi::MPK_EVENT_TERMINATION_TYPE,
                } as u16,
                remote_triggers: u16::from(event.remote),
            })
            .collect();
        arrays.worker_first.push(0);
        for worker in 0..graph.workers as usize {
            arrays.worker_tasks.extend(graph.worker_lists.get(worker).into_iter().flatten());
            arrays.worker_first.push(arrays.worker_tasks.len() as u32);
        }
        Ok(arrays)
    }

    /// Tasks that write on another rank, other than copies, store there like anywhere else: they get the peer's own address.
    fn reach_peers(
        &mut self,
        graph: &TaskGraph,
        slots: &[Slot],
        sym: &[u64],
    ) -> std::result::Result<(), String> {
        let at = |rank: usize| sym.get(rank).copied().filter(|&base| base != 0);
        for (index, task) in graph.tasks.iter().enumerate() {
            if graph.type_name(task) == core_types::NVSHMEM_COPY {
                continue;
            }
            let first = usize::from(task.num_inputs) + task.first_operand as usize;
            for (operand, output) in self.operands[first..].iter_mut().zip(graph.outputs(task)) {
                let Place::Peer(peer) = output.place else { continue };
                let (Some(own), Some(there)) = (at(graph.rank as usize), at(usize::from(peer))) else {
                    return Err(format!(
                        "task {index} ({}) stores into the memory of rank {peer}, which is out of reach of rank {}; build \
                         the graph with BuildOptions::within_reach = false",
                        graph.type_name(task),
                        graph.rank
                    ));
                };
                let here = slots[output.tensor as usize].address + output.offset;
                operand.addr = here.wrapping_sub(own).wrapping_add(there);
                operand.pe = -1;
            }
        }
        Ok(())
    }

    /// Reserves room for the arrays.
    pub fn reserve(&self, layout: &mut Layout) -> ArrayPlaces {
        fn array<T>(layout: &mut Layout, values: &[T]) -> u64 {
            // The GPU fetches descriptors with 16-byte loads, which may read one value past the end.
            layout.reserve((size_of_val(values) + size_of::<T>()) as u64, 128)
        }
        ArrayPlaces {
            tasks: array(layout, &self.tasks),
            events: array(layout, &self.events),
            variants: array(layout, &self.variants),
            operands: array(layout, &self.operands),
            dependencies: array(layout, &self.dependencies),
            worker_first: array(layout, &self.worker_first),
            worker_tasks: array(layout, &self.worker_tasks),
            launched: layout.reserve((self.events.len() * 4) as u64, 128),
        }
    }

    /// Writes the arrays to `image` and returns the struct that points to them.
    pub fn write(
        &self,
        graph: &TaskGraph,
        places: ArrayPlaces,
        counters: u64,
        image: &mut Image,
    ) -> abi::mpk_graph {
        image.put(places.tasks, &self.tasks);
        image.put(places.events, &self.events);
        image.put(places.variants, &self.variants);
        image.put(places.operands, &self.operands);
        image.put(places.dependencies, &self.dependencies);
        image.put(places.worker_first, &self.worker_first);
        image.put(places.worker_tasks, &self.worker_tasks);
        abi::mpk_graph {
            num_tasks: self.tasks.len() as u32,
            num_events: self.events.len() as u32,
            num_variants: self.variants.len() as u32,
            num_operands: self.operands.len() as u32,
            num_dependencies: self.dependencies.len() as u32,
            num_workers: graph.workers,
            rows: graph.capacity.rows,
            samples: graph.capacity.samples,
            active: graph.capacity.active,
            placement: placement(graph.placement),
            tasks: image.address(places.tasks) as *const _,
            events: image.address(places.events) as *const _,
            variants: image.address(places.variants) as *const _,
            operands: image.address(places.operands) as *const _,
            dependencies: image.address(places.dependencies) as *const _,
            worker_first: image.address(places.worker_first) as *const _,
            worker_tasks: image.address(places.worker_tasks) as *const _,
            counters: counters as *mut _,
            launched: image.address(places.launched) as *mut _,
        }
    }
}

/// True if some of the graphs are static and others dynamic.
pub fn are_mixed<'a>(graphs: impl IntoIterator<Item = &'a TaskGraph>) -> bool {
    let mut graphs = graphs.into_iter().map(|graph| graph.placement);
    graphs.next().is_some_and(|first| graphs.any(|other| other != first))
}

/// True if some of the graphs are dynamic, so that the rank has schedulers.
pub(crate) fn any_dynamic(graphs: &[TaskGraph]) -> bool {
    graphs.iter().any(|graph| graph.placement == Placement::Dynamic)
}

/// The ABI's number of a rank's placement.
pub(crate) fn placement_of_rank(graphs: &[TaskGraph]) -> u32 {
    match graphs.first() {
        Some(_) if are_mixed(graphs) => abi::MPK_MIXED,
        Some(graph) => placement(graph.placement),
        None => abi::MPK_STATIC,
    }
}

/// The ABI's number of a graph's placement.
pub fn placement(placement: Placement) -> u32 {
    match placement {
        Placement::Static => abi::MPK_STATIC,
        Placement::Dynamic => abi::MPK_DYNAMIC,
    }
}
