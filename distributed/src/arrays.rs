//! One task graph as the arrays of the ABI.

use crate::error::{Error, Result};
use kernels_cu::abi;
use kernels_cu::layout::packed_layout;
use kernels_cu::registry::type_number;
use taskgraph::DType;
use taskgraph::task_graph::{EventType, Place, Space, TaskGraph};
use taskgraph::{EventId, Placement};

/// Owns what an `mpk_graph` points to.
#[derive(Default)]
pub struct GraphArrays {
    tasks: Vec<abi::mpk_task>,
    events: Vec<abi::mpk_event>,
    variants: Vec<abi::mpk_variant>,
    operands: Vec<abi::mpk_operand>,
    dependencies: Vec<abi::mpk_dependency>,
    worker_first: Vec<u32>,
    worker_tasks: Vec<u32>,
    launched: Vec<u32>,
    /// Scratch memory that a worker needs, bytes.
    pub scratch_bytes: u64,
}

impl GraphArrays {
    /// Converts `graph`; `addresses` gives each tensor's address in this process.
    pub fn new(graph: &TaskGraph, addresses: &[u64]) -> Result<Self> {
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
        let packed = packed_layout(graph.backend);
        arrays.operands = graph
            .operands
            .iter()
            .map(|operand| {
                let tensor = &graph.tensors[operand.tensor as usize];
                abi::mpk_operand {
                    addr: addresses[operand.tensor as usize] + operand.offset,
                    dims: operand.dims,
                    strides: operand.strides,
                    dtype: tensor.dtype as u8,
                    ndim: operand.ndim,
                    layout: if tensor.tiled { packed } else { abi::MPK_LAYOUT_STRIDED as u8 },
                    symmetric: u8::from(tensor.space == Space::Symmetric),
                    pe: match operand.place {
                        Place::Own => -1,
                        Place::Peer(rank) => i32::from(rank),
                        Place::All => -2,
                    },
                }
            })
            .collect();
        for task in &graph.tasks {
            let flagged = graph
                .inputs(task)
                .iter()
                .any(|o| graph.tensors[o.tensor as usize].dtype == DType::F32Flagged);
            let first_dependency = arrays.dependencies.len() as u32;
            let now = task.dependencies.iter().map(|&event| (event, 0));
            arrays.dependencies.extend(
                now.chain(task.carried.iter().copied())
                    .map(|(event, epochs_back)| abi::mpk_dependency { event, epochs_back }),
            );
            arrays.tasks.push(abi::mpk_task {
                trigger_event: task.trigger.unwrap_or(EventId::INVALID).0,
                first_operand: task.first_operand,
                first_dependency,
                num_inputs: task.num_inputs,
                num_outputs: task.num_outputs,
                num_dependencies: (arrays.dependencies.len() as u32 - first_dependency) as u16,
                task_type: types[usize::from(task.task_type)],
                variant: task.variant,
                flags: if flagged { abi::MPK_TASK_FLAGGED_INPUTS as u16 } else { 0 },
                worker: task.worker.unwrap_or(u32::MAX),
                op: task.op,
                args: task.args,
                code: abi::MPK_NO_CODE,
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
        arrays.launched = vec![0; graph.events.len()];
        Ok(arrays)
    }

    /// The ABI view; valid as long as `self` lives and is not moved out of its heap buffers.
    pub fn abi(&mut self, graph: &TaskGraph, counters: *mut u64) -> abi::mpk_graph {
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
            tasks: self.tasks.as_ptr(),
            events: self.events.as_ptr(),
            variants: self.variants.as_ptr(),
            operands: self.operands.as_ptr(),
            dependencies: self.dependencies.as_ptr(),
            worker_first: self.worker_first.as_ptr(),
            worker_tasks: self.worker_tasks.as_ptr(),
            counters,
            launched: self.launched.as_mut_ptr(),
        }
    }
}

/// The ABI's number of a placement.
pub fn placement(placement: Placement) -> u32 {
    match placement {
        Placement::Static => abi::MPK_STATIC,
        Placement::Dynamic => abi::MPK_DYNAMIC,
    }
}
