//! Emits the finished task graph of one rank.

use super::columns::Columns;
use super::dynamic::{empty_task, launch_by_one_event};
use super::entries::{Entries, entries};
use super::events::Analysis;
use super::memory::Memory;
use super::operands::{Block, Blocks, Layout, SlotTensor, SlotTensors, make_operands};
use super::place::{Dealer, Turns};
use super::plan::Plan;
use super::types::{CLOSING_EVENT, FIRST_EVENT, NONE, Part, SlotKind};
use crate::error::BuildError;
use crate::ids::EventId;
use crate::task_graph::{Event, EventType, Placement, Task, TaskGraph, Variant, core_types};
use crate::verify::{Comparing, Repeat, TaskColumns, TaskShape};
use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

/// Indices in [`core_types::ALL`], and so in [`TaskGraph::type_names`].
const TERMINATE: u16 = 0;
const BEGIN: u16 = 1;
const EMPTY: u16 = 2;
const COPY: u16 = 3;
const SIGNAL: u16 = 4;

/// The graph of a rank. `spare` is a graph that is no longer needed; the new graph reuses its memory.
pub(crate) fn emit(
    plan: &Plan,
    analysis: &Analysis,
    memory: &Memory,
    rank: u32,
    spare: Option<TaskGraph>,
) -> Result<TaskGraph, BuildError> {
    let mut emitter = Emitter::new(plan, memory, rank, spare, Columns::default(), None);
    emitter.run(analysis)?;
    emitter.finish(analysis, memory.closing);
    Ok(emitter.graph())
}

/// Passes the operands and tasks of a rank's graph to `comparing` instead of keeping them, and returns the rest of
/// the graph. `columns` is memory that is no longer needed. For static placement only.
pub(crate) fn compare(
    plan: &Plan,
    analysis: &Analysis,
    memory: &Memory,
    rank: u32,
    columns: &mut Columns,
    comparing: &mut Comparing<'_>,
) -> Result<TaskGraph, BuildError> {
    let mut emitter = Emitter::new(plan, memory, rank, None, std::mem::take(columns), Some(comparing));
    emitter.run(analysis)?;
    emitter.finish(analysis, memory.closing);
    *columns = emitter.give_columns(analysis);
    Ok(emitter.graph())
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

/// Number of variants that a graph can have: [`Task::variant`] is their index.
const MOST_VARIANTS: usize = 1 << 16;

struct Emitter<'a, 'c, 'g> {
    plan: &'a Plan,
    rank: u32,
    entries: Entries,
    /// For each tensor of the plan, the tensor whose memory it uses.
    home: &'a [u32],
    graph: TaskGraph,
    variants: FxHashMap<Variant, u16>,
    /// Operands of earlier slots.
    blocks: Blocks,
    compared: Option<&'c mut Comparing<'g>>,
    /// Operands that have been made or repeated.
    operands: u32,
    columns: Columns,
    /// Number of tasks after the first two that are not in the graph, because they have been compared already.
    gone: usize,
}

impl<'a, 'c, 'g> Emitter<'a, 'c, 'g> {
    fn new(
        plan: &'a Plan,
        memory: &'a Memory,
        rank: u32,
        spare: Option<TaskGraph>,
        mut columns: Columns,
        compared: Option<&'c mut Comparing<'g>>,
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
        operands.clear();
        if compared.is_none() {
            tasks.reserve(task_count + SPARE_TASKS);
            operands.reserve(operand_count);
        }
        columns.clear(task_count + SPARE_TASKS);
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
            variants: FxHashMap::default(),
            blocks: Blocks::new(plan),
            compared,
            operands: 0,
            columns,
            gone: 0,
        };
        for core in [TERMINATE, BEGIN, EMPTY] {
            let variant = emitter.variant(core, Vec::new(), 0);
            emitter.graph.tasks.push(empty_task(
                core,
                variant,
                SmallVec::new(),
                EventId::INVALID,
                None,
                NONE,
            ));
        }
        emitter.graph.tasks.truncate(2);
        let begins = EventId::local(rank as u16, EventId::BEGIN);
        emitter.columns.triggers.extend([EventId::INVALID, begins]);
        emitter.columns.workers.extend([NONE; 2]);
        emitter
    }

    fn run(&mut self, analysis: &Analysis) -> Result<(), BuildError> {
        let plan = self.plan;
        self.events(analysis);
        let mut dealer = Dealer::new(plan.options.target.workers);
        for (index, slot) in plan.slots.iter().enumerate() {
            let Some(part) = plan.part(self.rank, index) else { continue };
            let first = analysis.first_task[index] as usize;
            let after_stores = || matches!(plan.slots[index - 2].kind, SlotKind::Store { .. });
            let turns = match slot.kind {
                SlotKind::Arrive { .. } => continue,
                SlotKind::Compute { .. } if index >= 2 && after_stores() => Turns::GoOn,
                SlotKind::Compute { .. } | SlotKind::Store { .. } => Turns::Own,
                SlotKind::Copy { exchange } if !plan.exchanges[exchange as usize].beside_producer => {
                    Turns::Own
                }
                SlotKind::Copy { .. } | SlotKind::Collective => Turns::Follow,
            };
            let workers = match plan.options.placement {
                Placement::Static => dealer.deal(part, turns),
                Placement::Dynamic => Vec::new(),
            };
            self.slot(index, part, analysis, first, &workers)?;
            // Their numbers have 16 bits.
            if self.graph.variants.len() > MOST_VARIANTS {
                return Err(BuildError::Graph(format!(
                    "has more than {MOST_VARIANTS} combinations of task type and parameters; cut operators into fewer different parts"
                )));
            }
        }
        Ok(())
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
        let sends = slot.kind.sends().map(|exchange| {
            let exchange = &self.plan.exchanges[exchange as usize];
            (exchange, &exchange.table.sends[self.rank as usize][..])
        });
        let (rank, first_task) = (self.rank as u16, self.columns.triggers.len());
        if task_type == COPY && sends.is_none() {
            self.columns.own_copies.push(first_task..first_task + part.tasks.len());
        }
        self.columns.triggers.extend((0..part.tasks.len()).map(|i| match sends {
            Some((exchange, sends)) => {
                let number = exchange.first_event[sends[i].to as usize] + sends[i].event;
                EventId::nvshmem(sends[i].to as u16, number)
            }
            None => EventId::local(rank, analysis.trigger[first + i]),
        }));
        self.columns.workers.extend(workers);
        let first_operand = self.operands;
        let repeated = self.slot_operands(index, part)?;
        if self.compared.is_some() {
            self.gone += part.tasks.len();
        }
        if repeated && self.compared.is_some() {
            return Ok(());
        }
        let mut shape =
            TaskShape { task_type, variant, first_operand, num_inputs: 0, num_outputs: 0, op: slot.op };
        for (i, spec) in part.tasks.iter().enumerate() {
            (shape.num_inputs, shape.num_outputs) = (spec.reads.len() as u16, spec.writes.len() as u16);
            if let Some((_, sends)) = sends {
                (shape.task_type, shape.variant) = (task_type, variant);
                match sends[i].source {
                    Some(_) => shape.num_outputs = 1,
                    None => {
                        shape.task_type = SIGNAL;
                        shape.variant = self.variant(SIGNAL, Vec::new(), 0);
                    }
                }
            }
            match &mut self.compared {
                Some(compared) => compared.task(&shape),
                None => {
                    let worker = workers.get(i).copied();
                    if let Some(worker) = worker {
                        self.graph.worker_lists[worker as usize].push(self.graph.tasks.len() as u32);
                    }
                    self.graph.tasks.push(Task {
                        task_type: shape.task_type,
                        variant: shape.variant,
                        first_operand: shape.first_operand,
                        num_inputs: shape.num_inputs,
                        num_outputs: shape.num_outputs,
                        trigger: None,
                        // Copied as a block; `clone` would copy element by element.
                        dependencies: SmallVec::from_slice(analysis.dependencies.of(first + i)),
                        carried: SmallVec::new(),
                        worker,
                        args: spec.args,
                        op: slot.op,
                    });
                }
            }
            shape.first_operand += u32::from(shape.num_inputs) + u32::from(shape.num_outputs);
        }
        Ok(())
    }

    /// The operands of a slot: an earlier slot's with other tensors (then true), or new ones.
    fn slot_operands(&mut self, index: usize, part: &Part) -> Result<bool, BuildError> {
        let slot = &self.plan.slots[index];
        let mut tensors: SlotTensors =
            slot.inputs.iter().chain(&slot.outputs).map(|&tensor| self.slot_tensor(tensor)).collect();
        if let Some(exchange) = slot.kind.sends() {
            tensors.push(self.slot_tensor(self.plan.exchanges[exchange as usize].target));
        }
        let part_number = self.plan.part_of[self.rank as usize][index];
        let found = self.blocks.find(self.plan, part_number, slot.kind, &tensors);
        let graph = &mut self.graph;
        let first_task = self.columns.triggers.len() as u32 - part.tasks.len() as u32;
        if let Some(block @ Block { first, count, .. }) = found {
            let renamed: SmallVec<[(u32, u32); 8]> = block.renamed(&tensors).collect();
            match &mut self.compared {
                Some(compared) => compared.repeat(&Repeat {
                    operands: (*first, *count),
                    tasks: (block.first_task, part.tasks.len() as u32),
                    op: slot.op,
                    tensors: renamed,
                }),
                None => {
                    let (at, first) = (graph.operands.len(), *first as usize);
                    graph.operands.extend_from_within(first..first + *count as usize);
                    for operand in &mut graph.operands[at..] {
                        let new = renamed.iter().find(|(old, _)| *old == operand.tensor);
                        operand.tensor = new.map_or(operand.tensor, |&(_, new)| new);
                    }
                }
            }
            self.operands += count;
            return Ok(true);
        }
        let at = graph.operands.len();
        make_operands(self.plan, self.rank, slot, part, &tensors, &mut graph.operands)?;
        let count = (graph.operands.len() - at) as u32;
        self.blocks.add(part_number, Block::new(slot.kind, tensors, (self.operands, count), first_task));
        if let Some(compared) = &mut self.compared {
            compared.operands(&graph.operands);
            graph.operands.clear();
        }
        self.operands += count;
        Ok(false)
    }

    /// A task that belongs to no slot.
    fn add_task(&mut self, mut task: Task) {
        if task.dependencies.is_empty() {
            task.dependencies.push(EventId::BEGIN);
        }
        let number = self.columns.triggers.len() as u32;
        if let (Some(worker), None) = (task.worker, &self.compared) {
            self.graph.worker_lists[worker as usize].push(number);
        }
        self.columns.triggers.push(task.trigger.unwrap_or(EventId::INVALID));
        self.columns.workers.extend(task.worker);
        self.graph.tasks.push(task);
    }

    fn slot_tensor(&self, tensor: u32) -> SlotTensor {
        let (root, shift) = self.plan.root(tensor, self.rank);
        let number = self.entries.of[self.home[root as usize] as usize];
        let entry = &self.entries.list[number as usize];
        let layout = Layout {
            size: entry.dtype.size(),
            strides: self.entries.strides[number as usize],
            dims: self.plan.tensors[tensor as usize].dims[self.rank as usize],
            shift,
            tiled: entry.tiled,
            ndim: entry.dims.len(),
        };
        SlotTensor { tensor, number, layout }
    }

    /// The end of the iteration: tasks without dependents trigger event 2.
    fn finish(&mut self, analysis: &Analysis, closing: bool) {
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
            self.columns.drop_implied_ends(end, self.plan.options.target.workers);
            self.graph.ops.push("end_of_iteration".into());
            let (world, own) = (self.plan.options.world, self.rank);
            let done = self.new_event(0, false);
            let mut triggers = 0;
            for trigger in self.columns.triggers.iter_mut().skip(2).filter(|trigger| **trigger == end) {
                *trigger = EventId::local(rank, done);
                triggers += 1;
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
        // What sends triggers nothing on this rank. An empty task after it in its worker's list does.
        let mut open = self.columns.ending_remotely(self.plan.options.target.workers);
        let nothing = self.columns.triggers.len() == 2;
        if !open.is_empty() || nothing {
            if nothing {
                open.push(0);
            }
            self.graph.ops.push("end_of_list".into());
            for worker in open {
                self.add_task(empty_task(EMPTY, empty_variant, SmallVec::new(), end, on(worker), last_op));
            }
        }
        self.columns.drop_implied_ends(end, self.plan.options.target.workers);
        let triggers = self.columns.triggers.iter().filter(|trigger| **trigger == end).count();
        self.graph.events[EventId::END_OF_GRAPH as usize].num_triggers = triggers as u32;
        let (fixed, others) = self.graph.tasks.split_at_mut(2);
        let (first, rest) = self.columns.triggers.split_at(2);
        let kept = first.iter().chain(&rest[self.gone..]);
        for (task, trigger) in fixed.iter_mut().chain(others).zip(kept) {
            task.trigger = (*trigger != EventId::INVALID).then_some(*trigger);
        }
        if !is_static {
            launch_by_one_event(&mut self.graph, empty_variant, EMPTY);
        }
        // Tasks 0 and 1 belong to no operator; the last index stands for that.
        let none = self.graph.ops.len() as u32;
        self.graph.tasks[..2].iter_mut().for_each(|t| t.op = none);
    }

    /// The columns of all tasks are compared. The graph has only the tasks that belong to no slot.
    fn give_columns(&mut self, analysis: &Analysis) -> Columns {
        let columns = std::mem::take(&mut self.columns);
        if let Some(compared) = &mut self.compared {
            let tasks = 2..2 + self.gone;
            compared.columns(&TaskColumns {
                first_dependency: &analysis.dependencies.first,
                dependencies: &analysis.dependencies.events,
                workers: &columns.workers[tasks.clone()],
                triggers: &columns.triggers[tasks],
            });
        }
        columns
    }

    fn graph(self) -> TaskGraph {
        TaskGraph { tensors: self.entries.list, ..self.graph }
    }
}
