//! Small task graphs built by hand, for the tests of the verifier and of the files.
#![allow(dead_code)]

pub mod kept;

use smallvec::{SmallVec, smallvec};
use taskgraph::op_graph::{Capacity, Role, Rows};
use taskgraph::task_graph::{
    Event, EventType, Operand, Place, Placement, Space, Task, TaskGraph, TensorEntry, Variant,
};
use taskgraph::{DType, EventId, Region};

pub const EMPTY: u16 = 2;
pub const COPY: u16 = 3;
pub const SIGNAL: u16 = 4;
pub const REDUCE: u16 = 5;
pub const LINEAR: u16 = 6;
/// A sum with one input for each summand, which a `reduce` does not have.
pub const SUM: u16 = 7;

/// Builds one rank's graph.
pub struct RankBuilder {
    pub graph: TaskGraph,
}

impl RankBuilder {
    pub fn new(rank: u32, world: u32, workers: u32) -> Self {
        let types = [
            "terminate",
            "begin_task_graph",
            "empty",
            "nvshmem_copy",
            "nvshmem_signal",
            "reduce",
            "linear",
            "sum",
        ];
        // A copy and a `reduce` of flagged words know which rows are in use: all of them.
        let params = |task_type: u16| match task_type {
            COPY => vec![2],
            REDUCE => vec![world, rank, 2, 1],
            _ => vec![7, u32::from(task_type), 2],
        };
        let event =
            |event_type| Event { event_type, num_triggers: 0, first_task: 0, last_task: 0, remote: false };
        let mut built = RankBuilder {
            graph: TaskGraph {
                name: "hand-built".into(),
                rank,
                world,
                placement: Placement::Static,
                backend: taskgraph::target::Backend::Cpu,
                workers,
                capacity: Capacity { rows: 1, samples: 1, active: 1 },
                type_names: types.iter().map(|s| s.to_string()).collect(),
                ops: vec!["begin".into()],
                tensors: Vec::new(),
                variants: (0..=SUM)
                    .map(|task_type| Variant { task_type, params: params(task_type), scratch_bytes: 64 })
                    .collect(),
                operands: Vec::new(),
                tasks: Vec::new(),
                events: vec![
                    event(EventType::Termination),
                    event(EventType::LaunchDependentTasks),
                    event(EventType::EndOfTaskGraph),
                ],
                worker_lists: vec![Vec::new(); workers as usize],
            },
        };
        built.push(0, 0, &[], &[], &[], None);
        built.push(1, 0, &[], &[], &[], Some(EventId::local(rank as u16, 1)));
        built
    }

    pub fn tensor(&mut self, name: &str, dtype: DType, dims: &[u32], space: Space, role: Role) -> u32 {
        let mut strides = vec![1u32; dims.len()];
        for d in (0..dims.len().saturating_sub(1)).rev() {
            strides[d] = strides[d + 1] * dims[d + 1];
        }
        self.graph.tensors.push(TensorEntry {
            name: name.into(),
            dtype,
            dims: dims.to_vec(),
            strides,
            space,
            bytes: dims.iter().map(|&d| u64::from(d)).product::<u64>() * dtype.size(),
            role,
            parts: Vec::new(),
            region_dims: dims.to_vec(),
            tiled: false,
            paired: false,
            output: false,
            rows: Rows::Tokens,
            overlay: None,
        });
        self.graph.tensors.len() as u32 - 1
    }

    /// A view of a box of a tensor; the box is also its region.
    pub fn at(&self, tensor: u32, region: Region, place: Place) -> Operand {
        let entry = &self.graph.tensors[tensor as usize];
        let ndim = entry.dims.len();
        let (mut dims, mut strides, mut offset) = ([1; 4], [1; 4], 0u64);
        for d in 0..ndim {
            dims[d] = region.hi[d] - region.lo[d];
            strides[d] = entry.strides[d];
            offset += u64::from(region.lo[d]) * u64::from(entry.strides[d]);
        }
        Operand {
            tensor,
            offset: offset * entry.dtype.size(),
            dims,
            strides,
            ndim: ndim as u8,
            place,
            region,
            trust: None,
        }
    }

    /// The same without the first dimension, in which the region has one index: the form of a copy's target.
    pub fn inner(&self, tensor: u32, region: Region, place: Place) -> Operand {
        let mut operand = self.at(tensor, region, place);
        operand.dims.rotate_left(1);
        operand.strides.rotate_left(1);
        operand.ndim -= 1;
        (operand.dims[3], operand.strides[3]) = (1, 1);
        operand
    }

    /// The whole tensor.
    pub fn all(&self, tensor: u32) -> Operand {
        let dims = self.graph.tensors[tensor as usize].dims.clone();
        self.at(tensor, Region::whole(&dims), Place::Own)
    }

    pub fn event(&mut self, remote: bool) -> u32 {
        self.graph.events.push(Event {
            event_type: EventType::Empty,
            num_triggers: 0,
            first_task: 0,
            last_task: 0,
            remote,
        });
        self.graph.events.len() as u32 - 1
    }

    fn push(
        &mut self,
        task_type: u16,
        op: u32,
        inputs: &[Operand],
        outputs: &[Operand],
        dependencies: &[u32],
        trigger: Option<EventId>,
    ) -> u32 {
        let none = inputs.is_empty() && outputs.is_empty();
        let first_operand = if none { 0 } else { self.graph.operands.len() as u32 };
        self.graph.operands.extend(inputs.iter().chain(outputs));
        self.graph.tasks.push(Task {
            task_type,
            variant: task_type,
            first_operand,
            num_inputs: inputs.len() as u16,
            num_outputs: outputs.len() as u16,
            trigger,
            dependencies: SmallVec::from_slice(dependencies),
            carried: smallvec![],
            worker: None,
            args: [0; 8],
            op,
        });
        self.graph.tasks.len() as u32 - 1
    }

    /// Adds a task at the end of a worker's list.
    #[allow(clippy::too_many_arguments)]
    pub fn task(
        &mut self,
        worker: u32,
        task_type: u16,
        op: &str,
        inputs: &[Operand],
        outputs: &[Operand],
        dependencies: &[u32],
        trigger: Option<EventId>,
    ) -> u32 {
        self.graph.ops.push(op.into());
        let op = self.graph.ops.len() as u32 - 1;
        let index = self.push(task_type, op, inputs, outputs, dependencies, trigger);
        self.graph.tasks[index as usize].worker = Some(worker);
        self.graph.worker_lists[worker as usize].push(index);
        index
    }
}

/// Sets each event's trigger count to the number of triggers that it gets.
pub fn count_triggers(graphs: &mut [TaskGraph]) {
    let triggers: Vec<EventId> =
        graphs.iter().flat_map(|g| g.tasks.iter().filter_map(|t| t.trigger)).collect();
    graphs.iter_mut().flat_map(|g| &mut g.events).for_each(|e| e.num_triggers = 0);
    for event in triggers {
        graphs[event.owner() as usize].events[event.index() as usize].num_triggers += 1;
    }
}

/// How the summands get to the other ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lowering {
    Copy,
    Flagged,
}

/// `layers` times linear, allreduce (in column tiles) and a residual, then a task that reads all of it.
/// Tasks of layer l and tile t: `l{l}.linear`, `l{l}.copy` (to each peer), `l{l}.reduce`; last `last`.
pub fn chain(world: u32, workers: u32, tiles: u32, layers: u32, lowering: Lowering) -> Vec<TaskGraph> {
    let columns = tiles * 4;
    let mut graphs: Vec<TaskGraph> = (0..world)
        .map(|rank| {
            let mut b = RankBuilder::new(rank, world, workers);
            // Flagged words, and a residual.
            b.graph.variants[usize::from(REDUCE)].params[3] = 3;
            let own = rank as u16;
            let mut x = b.tensor("x", DType::F32, &[2, columns], Space::Device, Role::Input);
            let mut x_event = EventId::BEGIN;
            let weight =
                b.tensor("w", DType::Bf16, &[columns, 8], Space::Device, Role::Weight { parts: Vec::new() });
            for layer in 0..layers {
                let flagged = lowering == Lowering::Flagged;
                let name = |what: &str| format!("l{layer}.{what}");
                let act = Role::Activation;
                let y = b.tensor(&name("y"), DType::F32, &[2, columns], Space::Device, act.clone());
                let receive_type = if flagged { DType::F32Flagged } else { DType::F32 };
                let receive = b.tensor(
                    &name("receive"),
                    receive_type,
                    &[world, 2, columns],
                    Space::Symmetric,
                    act.clone(),
                );
                let partial = (!flagged).then(|| {
                    b.tensor(&name("partial"), DType::F32, &[2, columns], Space::Device, act.clone())
                });
                let y_event = b.event(false);
                let mut tasks_at = 0;
                let mut next_worker = || {
                    tasks_at += 1;
                    (tasks_at - 1) % workers
                };
                // Events by index, the same on every rank: own partial, then arrival of each tile.
                let events: Vec<(u32, u32)> = if flagged {
                    Vec::new()
                } else {
                    (0..tiles).map(|_| (b.event(false), b.event(true))).collect()
                };
                for tile in 0..tiles {
                    let columns_of = Region::whole(&[2, columns]).with(1, tile * 4, tile * 4 + 4);
                    let slot = Region::whole(&[world, 2, columns]).with(0, rank, rank + 1).with(
                        2,
                        tile * 4,
                        tile * 4 + 4,
                    );
                    let w = b.at(
                        weight,
                        Region::whole(&[columns, 8]).with(0, tile * 4, tile * 4 + 4),
                        Place::Own,
                    );
                    let input = [b.all(x), w];
                    let (output, trigger) = match partial {
                        Some(p) => (
                            b.at(p, columns_of, Place::Own),
                            Some(EventId::local(own, events[tile as usize].0)),
                        ),
                        None => (b.at(receive, slot, Place::All), None),
                    };
                    let worker = next_worker();
                    b.task(worker, LINEAR, &name("linear"), &input, &[output], &[x_event], trigger);
                    let Some(p) = partial else { continue };
                    for peer in (0..world as u16).filter(|&p| p != own) {
                        let source = b.at(p, columns_of, Place::Own);
                        let target = b.inner(receive, slot, Place::Peer(peer));
                        let arrival = EventId::nvshmem(peer, events[tile as usize].1);
                        let dep = [events[tile as usize].0];
                        b.task(worker, COPY, &name("copy"), &[source], &[target], &dep, Some(arrival));
                    }
                }
                for tile in 0..tiles {
                    let columns_of = Region::whole(&[2, columns]).with(1, tile * 4, tile * 4 + 4);
                    let received = Region::whole(&[world, 2, columns]).with(2, tile * 4, tile * 4 + 4);
                    let residual = b.at(x, columns_of, Place::Own);
                    let output = b.at(y, columns_of, Place::Own);
                    let mut inputs = vec![residual];
                    let mut deps = vec![x_event];
                    if let Some(p) = partial {
                        inputs.push(b.at(p, columns_of, Place::Own));
                        deps = vec![events[tile as usize].0];
                        if world > 1 {
                            deps.push(events[tile as usize].1);
                        }
                        for peer in (0..world).filter(|&p| p != rank) {
                            inputs.push(b.at(receive, received.with(0, peer, peer + 1), Place::Own));
                        }
                    } else {
                        inputs.insert(0, b.at(receive, received, Place::Own));
                    }
                    let worker = next_worker();
                    let trigger = Some(EventId::local(own, y_event));
                    let sum = if flagged { REDUCE } else { SUM };
                    b.task(worker, sum, &name("reduce"), &inputs, &[output], &deps, trigger);
                }
                (x, x_event) = (y, y_event);
            }
            let input = [b.all(x)];
            b.task(0, LINEAR, "last", &input, &[], &[x_event], Some(EventId::local(own, 2)));
            b.graph
        })
        .collect();
    if world == 1 {
        graphs[0].events.iter_mut().for_each(|e| e.remote = false);
    }
    count_triggers(&mut graphs);
    graphs
}

/// Index of the `nth` task of an operator.
pub fn find(graph: &TaskGraph, op: &str, nth: usize) -> u32 {
    let mut of_op = (0..graph.tasks.len()).filter(|&t| graph.op_name(&graph.tasks[t]) == op);
    of_op.nth(nth).expect("the operator has that many tasks") as u32
}
