//! Emits the finished task graph of one rank.

use super::dynamic::{empty_task, launch_by_one_event};
use super::entries::{Entries, TILE_ROWS, entries};
use super::events::Analysis;
use super::memory::Memory;
use super::overlap::Shift;
use super::place::Dealer;
use super::plan::Plan;
use super::types::{CLOSING_EVENT, Dims, FIRST_EVENT, NONE, Part, SlotKind};
use crate::error::BuildError;
use crate::ids::EventId;
use crate::region::{MAX_DIMS, Region};
use crate::task_graph::{Event, EventType, Operand, Place, Placement, Task, TaskGraph, Variant, core_types};
use crate::task_type::Access;
use crate::trust::Trust;
use smallvec::{SmallVec, smallvec};
use std::collections::HashMap;

/// Indices in [`core_types::ALL`], and so in [`TaskGraph::type_names`].
const TERMINATE: u16 = 0;
const BEGIN: u16 = 1;
const EMPTY: u16 = 2;
const COPY: u16 = 3;
const SIGNAL: u16 = 4;

/// How an operand's view relates to its region.
#[derive(Clone, Copy, PartialEq)]
enum View {
    Region,
    Whole,
    /// Without the first dimension, in which the region has one index.
    Inner,
    /// With an additional first dimension of size 1.
    Stacked,
}

impl View {
    fn of(access: &Access) -> View {
        if access.trust.is_some() { View::Whole } else { View::Region }
    }
}

/// Receives the operands of each task as it is made, in their order.
pub(crate) type Made<'m> = &'m mut (dyn FnMut(&[Operand]) + 'm);

/// `spare` is a graph that is not needed any more; the new graph reuses its memory. `made` receives the operands, and the graph
/// is then without them.
pub(crate) fn emit(
    plan: &Plan,
    analysis: &Analysis,
    memory: &Memory,
    rank: u32,
    spare: Option<TaskGraph>,
    made: Option<Made<'_>>,
) -> Result<TaskGraph, BuildError> {
    let mut emitter = Emitter::new(plan, memory, rank, spare, made);
    emitter.events(analysis);
    let mut dealer = Dealer::new(plan.options.target.workers);
    for (index, slot) in plan.slots.iter().enumerate() {
        let Some(part) = plan.part(rank, index) else { continue };
        let first = analysis.first_task[index] as usize;
        let follow = match slot.kind {
            SlotKind::Arrive { .. } => continue,
            SlotKind::Compute { .. } => false,
            SlotKind::Copy { .. } | SlotKind::Collective => true,
        };
        let workers = match plan.options.placement {
            Placement::Static => dealer.deal(part, follow),
            Placement::Dynamic => Vec::new(),
        };
        emitter.slot(index, part, analysis, first, &workers)?;
    }
    emitter.finish(analysis, memory.closing)
}

/// Room for tasks outside of slots: the first two, and those that end the iteration.
const SPARE_TASKS: usize = 512;

/// Number of tasks and operands of all slots.
fn sizes(plan: &Plan, rank: u32) -> (usize, usize) {
    let parts = (0..plan.slots.len()).filter_map(|slot| plan.part(rank, slot));
    let of_part = |part: &Part| {
        // A copy writes one operand, which its part does not contain.
        let operands = part.tasks.iter().map(|t| t.reads.len() + t.writes.len().max(1));
        (part.tasks.len(), operands.sum::<usize>())
    };
    parts.map(of_part).fold((0, 0), |all, part| (all.0 + part.0, all.1 + part.1))
}

struct Emitter<'a, 'm> {
    plan: &'a Plan,
    rank: u32,
    entries: Entries,
    /// For each tensor of the plan, the tensor whose memory it uses.
    home: &'a [u32],
    graph: TaskGraph,
    variants: HashMap<Variant, u16>,
    made: Option<Made<'m>>,
    /// Number of operands that `made` has received.
    gone: u32,
}

/// Shared facts of all tasks of a slot about one of its tensors.
#[derive(Clone, Copy)]
struct SlotTensor {
    tensor: u32,
    /// Its index in the graph.
    number: u32,
    size: u64,
    strides: [u32; MAX_DIMS],
    dims: Dims,
    /// Where it starts in the memory that it uses.
    shift: Shift,
    tiled: bool,
    ndim: usize,
}

impl<'a, 'm> Emitter<'a, 'm> {
    fn new(
        plan: &'a Plan,
        memory: &'a Memory,
        rank: u32,
        spare: Option<TaskGraph>,
        made: Option<Made<'m>>,
    ) -> Self {
        let mut type_names: Vec<String> = core_types::ALL.iter().map(|s| s.to_string()).collect();
        let mut registered: Vec<&str> =
            plan.parts.iter().map(|p| p.type_name.as_str()).filter(|n| !n.is_empty()).collect();
        registered.sort_unstable();
        registered.dedup();
        registered.retain(|n| !core_types::ALL.contains(n));
        type_names.extend(registered.iter().map(|s| s.to_string()));
        let options = &plan.options;
        let (task_count, operand_count) = sizes(plan, rank);
        let (mut tasks, mut operands, mut events, mut worker_lists) = match spare {
            Some(spare) => (spare.tasks, spare.operands, spare.events, spare.worker_lists),
            None => Default::default(),
        };
        tasks.clear();
        tasks.reserve(task_count + SPARE_TASKS);
        operands.clear();
        if made.is_none() {
            operands.reserve(operand_count);
        }
        events.clear();
        let lists = match options.placement {
            Placement::Static => options.target.workers as usize,
            Placement::Dynamic => 0,
        };
        worker_lists.iter_mut().for_each(Vec::clear);
        worker_lists.resize_with(lists, Vec::new);
        let graph = TaskGraph {
            name: plan.graph.name.clone(),
            rank,
            world: options.world,
            placement: options.placement,
            backend: options.target.backend,
            workers: options.target.workers,
            capacity: plan.graph.capacity,
            type_names,
            ops: plan.op_names.clone(),
            tensors: Vec::new(),
            variants: Vec::new(),
            operands,
            tasks,
            events,
            worker_lists,
        };
        let mut emitter = Emitter {
            plan,
            rank,
            entries: entries(plan, memory, rank),
            home: &memory.home,
            graph,
            variants: HashMap::new(),
            made,
            gone: 0,
        };
        for core in [TERMINATE, BEGIN, EMPTY] {
            let variant = emitter.variant(core, Vec::new(), 0);
            emitter.graph.tasks.push(Task {
                trigger: (core == BEGIN).then(|| EventId::local(rank as u16, EventId::BEGIN)),
                ..empty_task(core, variant, SmallVec::new(), EventId::INVALID, None, NONE)
            });
        }
        emitter.graph.tasks.truncate(2);
        emitter
    }

    fn events(&mut self, analysis: &Analysis) {
        let dynamic = self.plan.options.placement == Placement::Dynamic;
        let ordinary = if dynamic { EventType::LaunchTasks } else { EventType::Empty };
        let events = analysis.num_triggers.iter().enumerate();
        self.graph.events.extend(events.map(|(index, &num_triggers)| Event {
            event_type: match index as u32 {
                EventId::TERMINATION => EventType::Termination,
                EventId::BEGIN => EventType::LaunchDependentTasks,
                EventId::END_OF_GRAPH => EventType::EndOfTaskGraph,
                _ => ordinary,
            },
            num_triggers,
            first_task: 0,
            last_task: 0,
            remote: (FIRST_EVENT..analysis.first_local_event).contains(&(index as u32)),
        }));
    }

    fn new_event(&mut self, num_triggers: u32, remote: bool) -> u32 {
        let dynamic = self.plan.options.placement == Placement::Dynamic;
        self.graph.events.push(Event {
            event_type: if dynamic { EventType::LaunchTasks } else { EventType::Empty },
            num_triggers,
            first_task: 0,
            last_task: 0,
            remote,
        });
        self.graph.events.len() as u32 - 1
    }

    fn variant(&mut self, task_type: u16, params: Vec<u32>, scratch_bytes: u32) -> u16 {
        let variant = Variant { task_type, params, scratch_bytes };
        let next = self.graph.variants.len() as u16;
        let graph = &mut self.graph;
        *self.variants.entry(variant).or_insert_with_key(|v| {
            graph.variants.push(v.clone());
            next
        })
    }

    fn slot(
        &mut self,
        index: usize,
        part: &Part,
        analysis: &Analysis,
        first: usize,
        workers: &[u32],
    ) -> Result<(), BuildError> {
        let slot = &self.plan.slots[index];
        let task_type =
            self.graph.type_names.iter().position(|n| *n == part.type_name).unwrap_or(EMPTY as usize) as u16;
        let mut params = part.params.clone();
        if let Some(word) = part.rank_param {
            params[word] = self.rank;
        }
        let variant = self.variant(task_type, params, part.scratch_bytes);
        let of_slot = |tensors: &[u32]| -> SmallVec<[SlotTensor; 8]> {
            tensors.iter().map(|&tensor| self.slot_tensor(tensor)).collect()
        };
        let (inputs, outputs) = (of_slot(&slot.inputs), of_slot(&slot.outputs));
        let target = match slot.kind {
            SlotKind::Copy { exchange } => of_slot(&[self.plan.exchanges[exchange as usize].target]),
            _ => SmallVec::new(),
        };
        for (i, spec) in part.tasks.iter().enumerate() {
            let first_operand = self.gone + self.graph.operands.len() as u32;
            let mut task = Task {
                task_type,
                variant,
                first_operand,
                num_inputs: spec.reads.len() as u16,
                num_outputs: spec.writes.len() as u16,
                trigger: None,
                // Copied as a whole; `clone` would copy one by one.
                dependencies: SmallVec::from_slice(&analysis.dependencies[first + i]),
                carried: SmallVec::new(),
                worker: workers.get(i).copied(),
                args: spec.args,
                op: slot.op,
            };
            for access in &spec.reads {
                let tensor = &inputs[access.operand as usize];
                let stacked = part.stacked == Some(access.operand);
                let view = if stacked { View::Stacked } else { View::of(access) };
                self.operand(tensor, access.region, view, Place::Own, access.trust)?;
            }
            match slot.kind {
                SlotKind::Copy { exchange } => {
                    let exchange = &self.plan.exchanges[exchange as usize];
                    let send = &exchange.table.sends[self.rank as usize][i];
                    let number = exchange.first_event[send.to as usize] + send.event;
                    task.trigger = Some(EventId::nvshmem(send.to as u16, number));
                    match send.source {
                        Some(_) => {
                            let dims = |tensor: u32| self.plan.tensors[tensor as usize].dims[0].n;
                            let stacked = dims(exchange.target) > dims(slot.inputs[0]);
                            let view = if stacked { View::Inner } else { View::Region };
                            self.operand(&target[0], send.target, view, Place::Peer(send.to as u16), None)?;
                            task.num_outputs = 1;
                        }
                        None => {
                            task.task_type = SIGNAL;
                            task.variant = self.variant(SIGNAL, Vec::new(), 0);
                        }
                    }
                }
                kind => {
                    let trigger = analysis.trigger[first + i];
                    task.trigger = Some(EventId::local(self.rank as u16, trigger));
                    for access in &spec.writes {
                        let tensor = &outputs[access.operand as usize];
                        if kind == (SlotKind::Compute { push: Some(access.operand) }) {
                            let region = access.region.with(0, self.rank, self.rank + 1);
                            self.operand(tensor, region, View::Inner, Place::All, None)?;
                        } else {
                            self.operand(tensor, access.region, View::of(access), Place::Own, access.trust)?;
                        }
                    }
                }
            }
            self.add_task(task);
        }
        Ok(())
    }

    fn add_task(&mut self, mut task: Task) {
        if task.dependencies.is_empty() {
            task.dependencies.push(EventId::BEGIN);
        }
        if let Some(worker) = task.worker {
            self.graph.worker_lists[worker as usize].push(self.graph.tasks.len() as u32);
        }
        self.graph.tasks.push(task);
        if let Some(made) = &mut self.made {
            made(&self.graph.operands);
            self.gone += self.graph.operands.len() as u32;
            self.graph.operands.clear();
        }
    }

    fn slot_tensor(&self, tensor: u32) -> SlotTensor {
        let (root, shift) = self.plan.root(tensor, self.rank);
        let number = self.entries.of[self.home[root as usize] as usize];
        let entry = &self.entries.list[number as usize];
        SlotTensor {
            tensor,
            number,
            size: entry.dtype.size(),
            strides: self.entries.strides[number as usize],
            dims: self.plan.tensors[tensor as usize].dims[self.rank as usize],
            shift,
            tiled: entry.tiled,
            ndim: entry.dims.len(),
        }
    }

    fn operand(
        &mut self,
        tensor: &SlotTensor,
        mut region: Region,
        view: View,
        place: Place,
        trust: Option<Trust>,
    ) -> Result<(), BuildError> {
        let &SlotTensor { number, size, mut strides, shift: (dim, shift), mut ndim, .. } = tensor;
        region.lo[dim] += shift;
        region.hi[dim] += shift;
        let mut dims = [1u32; MAX_DIMS];
        let mut offset = 0u64;
        if view == View::Whole {
            dims = tensor.dims.d;
            offset = u64::from(shift) * u64::from(strides[dim]);
        } else if tensor.tiled {
            let [row, column, ..] = region.lo;
            if row % TILE_ROWS != 0 || column != 0 {
                return Err(BuildError::tensor(
                    &self.plan.tensors[tensor.tensor as usize].name,
                    format!(
                        "is packed in tiles of {TILE_ROWS} rows, but a task reads {region}; cut its rows at multiples of {TILE_ROWS} and do not cut its columns"
                    ),
                ));
            }
            offset = u64::from(row) * u64::from(strides[0]);
            (0..ndim).for_each(|d| dims[d] = region.hi[d] - region.lo[d]);
        } else {
            for d in 0..ndim {
                dims[d] = region.hi[d].saturating_sub(region.lo[d]);
                offset += u64::from(region.lo[d]) * u64::from(strides[d]);
            }
        }
        match view {
            View::Inner => {
                dims.rotate_left(1);
                strides.rotate_left(1);
                ndim -= 1;
            }
            View::Stacked => {
                dims.rotate_right(1);
                strides.rotate_right(1);
                dims[0] = 1;
                strides[0] = 0;
                ndim += 1;
            }
            View::Region | View::Whole => {}
        }
        for d in ndim..MAX_DIMS {
            dims[d] = 1;
            strides[d] = 1;
        }
        self.graph.operands.push(Operand {
            tensor: number,
            offset: offset * size,
            dims,
            strides,
            ndim: ndim as u8,
            place,
            region,
            trust,
        });
        Ok(())
    }

    /// Static placement: a worker's list is an order. So among its tasks without dependents, only the last one triggers the end.
    /// On a GPU a trigger is a release, which would also delay the worker's next task.
    fn drop_implied_ends(&mut self, end: EventId) {
        let tasks = &mut self.graph.tasks;
        for list in &self.graph.worker_lists {
            let mut told = false;
            for &task in list.iter().rev() {
                let Task { trigger, task_type, .. } = &mut tasks[task as usize];
                if *trigger == Some(end) && *task_type != COPY && std::mem::replace(&mut told, true) {
                    *trigger = None;
                }
            }
        }
    }

    /// The end of the iteration: tasks without dependents trigger event 2.
    fn finish(mut self, analysis: &Analysis, closing: bool) -> Result<TaskGraph, BuildError> {
        let rank = self.rank as u16;
        let empty_variant = self.variant(EMPTY, Vec::new(), 0);
        let end = EventId::local(rank, EventId::END_OF_GRAPH);
        let mut last_op = self.plan.op_names.len() as u32;
        let is_static = self.plan.options.placement == Placement::Static;
        let on = |worker: u32| is_static.then_some(worker);
        let mut workers = (0..self.plan.options.target.workers.max(1)).cycle();
        for &(event, slot) in &analysis.unwatched {
            let op = self.plan.slots[slot as usize].op;
            let worker = on(workers.next().unwrap_or(0));
            self.add_task(empty_task(EMPTY, empty_variant, smallvec![event], end, worker, op));
        }
        if closing {
            // Ranks tell each other when they are done. Each ends after all are done.
            self.drop_implied_ends(end);
            self.graph.ops.push("end_of_iteration".into());
            let (world, own) = (self.plan.options.world, self.rank);
            let done = self.new_event(0, false);
            let mut triggers = 0;
            for task in &mut self.graph.tasks[2..] {
                if task.trigger == Some(end) {
                    task.trigger = Some(EventId::local(rank, done));
                    triggers += 1;
                }
            }
            self.graph.events[done as usize].num_triggers = triggers;
            let after: SmallVec<[u32; 2]> =
                if triggers > 0 { smallvec![done] } else { smallvec![EventId::BEGIN] };
            let signal_variant = self.variant(SIGNAL, Vec::new(), 0);
            for peer in (1..world).map(|step| (own + step) % world) {
                let event = EventId::nvshmem(peer as u16, CLOSING_EVENT);
                let worker = on(workers.next().unwrap_or(0));
                self.add_task(empty_task(SIGNAL, signal_variant, after.clone(), event, worker, last_op));
            }
            let mut wait = after;
            wait.push(CLOSING_EVENT);
            self.add_task(empty_task(EMPTY, empty_variant, wait, end, on(0), last_op));
            last_op += 1;
        }
        // A copy or signal triggers nothing on this rank. An empty task after it in its worker's list does.
        let mut open: Vec<u32> = Vec::new();
        for (worker, list) in self.graph.worker_lists.iter().enumerate() {
            let remote = list.last().and_then(|&t| self.graph.tasks[t as usize].trigger);
            if remote.is_some_and(|t| t.is_nvshmem()) {
                open.push(worker as u32);
            }
        }
        let nothing = self.graph.tasks.len() == 2;
        if !open.is_empty() || nothing {
            if nothing {
                open.push(0);
            }
            self.graph.ops.push("end_of_list".into());
            for worker in open {
                self.add_task(empty_task(EMPTY, empty_variant, SmallVec::new(), end, on(worker), last_op));
            }
        }
        self.drop_implied_ends(end);
        let triggers = self.graph.tasks.iter().filter(|t| t.trigger == Some(end)).count();
        self.graph.events[EventId::END_OF_GRAPH as usize].num_triggers = triggers as u32;
        if !is_static {
            launch_by_one_event(&mut self.graph, empty_variant, EMPTY);
        }
        // Tasks 0 and 1 belong to no operator; the last index stands for that.
        let none = self.graph.ops.len() as u32;
        self.graph.tasks[..2].iter_mut().for_each(|t| t.op = none);
        self.graph.tensors = self.entries.list;
        Ok(self.graph)
    }
}
