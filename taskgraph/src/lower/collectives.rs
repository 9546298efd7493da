//! Collectives of a plan: cuts the tables of their sends into copies and arrivals.

use super::local::local_op;
use super::types::{NONE, Part, Table};
use crate::blocks::Blocks;
use crate::collective::{
    CollectiveOp, Exchange, Lowered, OWNED_ROWS, Operand, Send, Step, SumRows, TaskStep,
};
use crate::error::BuildError;
use crate::op_graph::{Op, OpGraph, Role};
use crate::options::BuildOptions;
use crate::passes::op_view;
use crate::region::{MAX_DIMS, Region};
use crate::registry::Registry;
use crate::task_graph::core_types;
use crate::task_type::{Access, ExpansionOperand, OpView, TaskSpec, TaskType};
use rustc_hash::{FxHashMap, FxHashSet};
use std::fmt::Write;
use std::sync::Arc;

/// The blocks of rows that belong to the ranks in turn, if ranks sum rows.
pub(super) const BLOCKS: Blocks = Blocks { dim: 0, size: OWNED_ROWS };

/// A collective and its parts.
#[derive(Debug)]
pub(crate) struct Cut {
    pub lowered: Lowered,
    /// One entry per step.
    pub steps: Vec<CutStep>,
}

/// The parts of a step, by rank.
#[derive(Debug)]
pub(crate) enum CutStep {
    Exchange { table: Arc<Table>, copy: Vec<u32>, arrive: Vec<u32> },
    Tasks { part: Vec<u32> },
}

/// Lowers the collectives of `graph`. Those that look the same are lowered once. `None` for other operators. `rows`: whether ranks must
/// sum rows, and whether the producer can store each tile with its owner ([`CollectiveOp::can_store`]).
pub(crate) fn cut_collectives(
    graph: &OpGraph,
    registry: &Registry,
    options: &BuildOptions,
    uses: &Uses,
    rows: &[(SumRows, bool)],
    parts: &mut Vec<Part>,
) -> Result<Vec<Option<Arc<Cut>>>, BuildError> {
    let mut by_key: FxHashMap<String, Arc<Cut>> = FxHashMap::default();
    let mut placed: FxHashSet<u32> = FxHashSet::default();
    graph
        .ops
        .iter()
        .zip(rows)
        .map(|(op, &(rows, can_store))| {
            let Some(collective) = registry.collective(&op.op_type) else { return Ok(None) };
            let view = op_view(graph, op);
            let can_place = uses.can_place(graph, registry, op) && !placed.contains(&op.inputs[0]);
            let can_push = uses.can_push(graph, registry, options, op);
            let key = key(op, &view, [can_place, can_push, can_store], rows);
            let cut = match by_key.get(&key) {
                Some(cut) => cut.clone(),
                None => {
                    let lower = CollectiveOp { view: &view, options, can_push, can_place, can_store, rows };
                    let lowered = collective.lower(&lower).and_then(|l| check(l, &lower));
                    let lowered = lowered.map_err(|e| BuildError::op(&op.name, e.0))?;
                    let cut = Arc::new(cut(lowered, options.world, parts));
                    // A note contains the operator's name.
                    if cut.lowered.notes.is_empty() {
                        by_key.insert(key, cut.clone());
                    }
                    cut
                }
            };
            if cut.lowered.input_in_output.is_some() {
                placed.insert(op.inputs[0]);
            }
            Ok(Some(cut))
        })
        .collect()
}

fn key(op: &Op, view: &OpView<'_>, can: [bool; 3], rows: SumRows) -> String {
    let mut key = String::with_capacity(256);
    let _ = write!(key, "{} {can:?} {rows:?} {:?}", op.op_type, op.attrs);
    for operand in view.inputs.iter().chain(&view.outputs) {
        let role = match operand.role {
            Role::Activation => "activation",
            Role::Persistent { .. } => "persistent",
            _ => "given",
        };
        let _ = write!(key, "|{:?} {:?} {role}", operand.ty, operand.sharding);
    }
    key
}

/// Adds signals so that every rank hears from every other rank. Ranks then stay within one iteration of each other, so no counter
/// that several of them trigger can mix two iterations.
fn hear_from_all(exchange: &mut Exchange, world: u32) {
    for (rank, sends) in exchange.sends.iter_mut().enumerate() {
        for to in (1..world).map(|step| (rank as u32 + step) % world) {
            if sends.iter().all(|send| send.to != to) {
                sends.push(Send { to, source: None, target: Region::whole(&[]), event: 0 });
            }
        }
    }
}

fn cut(mut lowered: Lowered, world: u32, parts: &mut Vec<Part>) -> Cut {
    for step in &mut lowered.steps {
        if let Step::Exchange(exchange) = step
            && exchange.between_all
        {
            hear_from_all(exchange, world);
        }
    }
    let steps = lowered
        .steps
        .iter()
        .map(|step| match step {
            Step::Exchange(exchange) => {
                let slots = match exchange.target {
                    Operand::Buffer(b) if lowered.buffers[b].by_sender => Some(world),
                    _ => None,
                };
                cut_exchange(exchange, slots, world, parts)
            }
            Step::Tasks(step) => {
                let part = |(rank, tasks): (usize, &Vec<TaskSpec>)| task_part(step, rank, tasks);
                CutStep::Tasks { part: add(step.tasks.iter().enumerate().map(part).collect(), parts) }
            }
        })
        .collect();
    Cut { lowered, steps }
}

/// `slots`: the slots of the buffer in which the data arrives, if it has one for each sender.
pub(super) fn cut_exchange(
    exchange: &Exchange,
    slots: Option<u32>,
    world: u32,
    parts: &mut Vec<Part>,
) -> CutStep {
    let table = Arc::new(table(&exchange.sends, world));
    let copies: Vec<Part> = (0..world).map(|rank| copy_part(exchange, rank)).collect();
    let arrivals = (0..world).map(|rank| arrive_part(exchange, &table, rank, slots)).collect();
    CutStep::Exchange { table, copy: add(copies, parts), arrive: add(arrivals, parts) }
}

/// Adds the ranks' parts of a step. Equal parts are stored once. A part without tasks is [`NONE`].
pub(super) fn add(ranks: Vec<Part>, parts: &mut Vec<Part>) -> Vec<u32> {
    let first = parts.len();
    let mut numbers = Vec::with_capacity(ranks.len());
    for part in ranks {
        if part.tasks.is_empty() {
            numbers.push(NONE);
            continue;
        }
        let known = parts[first..].iter().position(|p| *p == part);
        numbers.push((first + known.unwrap_or(parts.len() - first)) as u32);
        if known.is_none() {
            parts.push(part);
        }
    }
    numbers
}

fn task_part(step: &TaskStep, rank: usize, tasks: &[TaskSpec]) -> Part {
    Part {
        type_name: step.task_type.into(),
        params: step.rank_params.get(rank).unwrap_or(&step.params).clone(),
        rank_param: step.rank_param,
        stacked: step.stacked,
        scratch_bytes: 0,
        tasks: tasks.to_vec(),
    }
}

/// The copies of `rank`, one per send. If a send has no data, the task signals.
fn copy_part(exchange: &Exchange, rank: u32) -> Part {
    let first_row = |send: &Send| send.source.map_or(0, |r| (r.lo[0] * exchange.rows_per_index) as i32);
    let tasks = exchange.sends[rank as usize].iter().map(|send| TaskSpec {
        reads: send.source.iter().map(|r| Access::new(0, *r)).collect(),
        args: [first_row(send), 0, 0, 0, 0, 0, 0, 0],
        cost: send.source.map_or(1, |r| 8 * r.volume()),
        ..TaskSpec::default()
    });
    Part {
        type_name: core_types::NVSHMEM_COPY.into(),
        params: vec![exchange.rows_kind],
        rank_param: None,
        stacked: None,
        scratch_bytes: 0,
        tasks: tasks.collect(),
    }
}

/// The arrivals on `rank`: one "task" per event that peers trigger. If the buffer has a slot per sender (`slots` of them), all
/// slots are written at once, so that ranks are alike.
pub(super) fn arrive_part(exchange: &Exchange, table: &Table, rank: u32, slots: Option<u32>) -> Part {
    let mut tasks = vec![TaskSpec::default(); table.triggers[rank as usize].len()];
    for send in exchange.sends.iter().flatten().filter(|s| s.to == rank && s.source.is_some()) {
        let region = slots.map_or(send.target, |n| send.target.with(0, 0, n));
        let writes = &mut tasks[send.event as usize].writes;
        if slots.is_none() || writes.iter().all(|w| w.region != region) {
            writes.push(Access::new(0, region));
        }
    }
    arrival(tasks)
}

/// The part of an arrival with these "tasks".
pub(super) fn arrival(tasks: Vec<TaskSpec>) -> Part {
    Part {
        type_name: String::new(),
        params: Vec::new(),
        rank_param: None,
        stacked: None,
        scratch_bytes: 0,
        tasks,
    }
}

/// The table of these sends, by rank.
pub(super) fn table(sends: &[Vec<Send>], world: u32) -> Table {
    let n = world as usize;
    let mut triggers: Vec<Vec<u32>> = vec![Vec::new(); n];
    // The senders for each receiver and event, in order.
    let mut senders: Vec<Vec<Vec<usize>>> = vec![Vec::new(); n];
    for (rank, list) in sends.iter().enumerate() {
        for send in list {
            let (to, event) = (send.to as usize, send.event as usize);
            if triggers[to].len() <= event {
                triggers[to].resize(event + 1, 0);
                senders[to].resize(event + 1, Vec::new());
            }
            triggers[to][event] += 1;
            let who = &mut senders[to][event];
            if who.last() != Some(&rank) {
                who.push(rank);
            }
        }
    }
    let from_all =
        senders.iter().all(|events| !events.is_empty() && events.iter().all(|who| who.len() == n - 1));
    let to_all = sends.iter().enumerate().all(|(rank, list)| {
        let sources = |peer: usize| -> FxHashSet<Option<Region>> {
            list.iter().filter(|s| s.to as usize == peer).map(|s| s.source).collect()
        };
        let mut peers = (0..n).filter(|&p| p != rank).map(sources);
        let first = peers.next();
        peers.all(|p| Some(&p) == first.as_ref())
    });
    let one_event = triggers.iter().all(|t| t.len() == 1);
    Table { sends: sends.to_vec(), triggers, from_all, to_all, one_event }
}

/// Checks that ranks, operands and events of the steps exist. The verifier checks whether the steps are right.
fn check(lowered: Lowered, op: &CollectiveOp<'_>) -> Result<Lowered, crate::task_type::OpError> {
    let (view, world) = (op.view, op.options.world);
    let wrong = |what: String| {
        Err(crate::task_type::OpError(format!("the collective lowers it to invalid steps: {what}")))
    };
    let exists = |operand: &Operand| match *operand {
        Operand::Input(i) => i < view.inputs.len(),
        Operand::Output => view.outputs.len() == 1,
        Operand::Buffer(b) => b < lowered.buffers.len(),
    };
    let placed = [&lowered.input_in_output, &lowered.output_in_input];
    let placed = placed.into_iter().flatten().chain(lowered.output_in_buffer.as_ref().map(|(_, p)| p));
    if placed.into_iter().any(|p| p.first.len() != world as usize || p.dim >= MAX_DIMS) {
        return wrong("a place must have one index for each rank".into());
    }
    if let Some(buffer) = lowered.stored_into {
        let read = |step: &Step| match step {
            Step::Exchange(exchange) => exchange.source == Operand::Input(0),
            Step::Tasks(step) => step.inputs.contains(&Operand::Input(0)),
        };
        let dims = view.inputs.first().map_or(&[][..], |input| &input.ty.dims);
        let room = match dims {
            &[rows, columns] => vec![world, rows as u32 / world, columns as u32],
            _ => Vec::new(),
        };
        let why = match lowered.buffers.get(buffer) {
            _ if !op.can_store => "its producer cannot do that",
            _ if lowered.dealt != Some(BLOCKS) => "their rows are not dealt in blocks of 256",
            Some(buffer) if buffer.dims != room => "its buffer is not [world, rows of a rank, columns]",
            None => "its buffer does not exist",
            _ if lowered.steps.iter().any(read) => "a step reads input 0, which has no memory",
            _ => "",
        };
        if !why.is_empty() {
            return wrong(format!("tiles are stored with their owners, but {why}"));
        }
    }
    for step in &lowered.steps {
        match step {
            Step::Exchange(exchange) => {
                if !exists(&exchange.source) || !exists(&exchange.target) {
                    return wrong("the source or the target of an exchange does not exist".into());
                }
                if matches!(exchange.target, Operand::Input(_)) {
                    return wrong("ranks send into an input".into());
                }
                if exchange.sends.len() != world as usize {
                    return wrong(format!("sends of {} ranks, not {world}", exchange.sends.len()));
                }
                let mut events: Vec<FxHashSet<u32>> = vec![FxHashSet::default(); world as usize];
                for (rank, send) in
                    exchange.sends.iter().enumerate().flat_map(|(r, l)| l.iter().map(move |s| (r, s)))
                {
                    if send.to >= world || send.to as usize == rank {
                        return wrong(format!("rank {rank} sends to rank {}", send.to));
                    }
                    events[send.to as usize].insert(send.event);
                }
                if events.iter().any(|e| e.iter().any(|&i| i as usize >= e.len())) {
                    return wrong("a receiver's events are not counted from 0 without gaps".into());
                }
            }
            Step::Tasks(step) => {
                if !step.inputs.iter().chain(&step.outputs).all(exists) || step.tasks.len() != world as usize
                {
                    return wrong(format!(
                        "tasks of `{}` have operands or ranks that do not exist",
                        step.task_type
                    ));
                }
                let fits =
                    |accesses: &[Access], n: usize| accesses.iter().all(|a| usize::from(a.operand) < n);
                let tasks = step.tasks.iter().flatten();
                if tasks
                    .into_iter()
                    .any(|t| !fits(&t.reads, step.inputs.len()) || !fits(&t.writes, step.outputs.len()))
                {
                    return wrong(format!(
                        "a task of `{}` has an operand that its step does not have",
                        step.task_type
                    ));
                }
                if !step.rank_params.is_empty() && step.rank_params.len() != world as usize {
                    return wrong(format!("parameters of {} ranks, not {world}", step.rank_params.len()));
                }
                if step.rank_param.is_some_and(|p| p >= step.params.len()) {
                    return wrong(format!("tasks of `{}` have no parameter for the rank", step.task_type));
                }
            }
        }
    }
    Ok(lowered)
}

/// True if the operator's tasks can push its output `tensor` on every rank.
fn pushes(graph: &OpGraph, registry: &Registry, options: &BuildOptions, op: &Op, tensor: u32) -> bool {
    let can = |task_type: &dyn TaskType| Some(task_type.pushable_output()?).zip(task_type.push_param());
    let Some(task_type) = registry.get(&op.op_type) else { return false };
    let Some((output, _)) = can(task_type.as_ref()) else { return false };
    if op.outputs.get(output) != Some(&tensor) {
        return false;
    }
    // It expands the same way on all ranks. An error is reported when it is cut.
    let view = op_view(graph, op);
    let rows = view.outputs[output].ty.dims.first().copied().unwrap_or(0);
    let fits = |task_type: &dyn TaskType| rows <= task_type.most_pushed_rows(&options.target);
    match task_type.expand(&local_op(&view, 0, options.world), &options.target) {
        Ok(Some(expansion)) => expansion.ops.iter().all(|step| {
            let written = step.outputs.iter().position(|&o| o == ExpansionOperand::Output(output));
            let step_type = registry.get(step.op_type).filter(|t| fits(t.as_ref()));
            written.is_none() || step_type.and_then(|t| can(t.as_ref())).map(|(o, _)| o) == written
        }),
        Ok(None) => fits(task_type.as_ref()),
        Err(_) => true,
    }
}

/// The writers and readers of each tensor of an op graph.
pub(crate) struct Uses {
    writer: Vec<Option<usize>>,
    readers: Vec<u32>,
    only_reader: Vec<Option<usize>>,
}

impl Uses {
    pub fn new(graph: &OpGraph) -> Self {
        let n = graph.tensors.len();
        let mut uses = Uses { writer: vec![None; n], readers: vec![0; n], only_reader: vec![None; n] };
        for (index, op) in graph.ops.iter().enumerate() {
            op.outputs.iter().for_each(|&t| uses.writer[t as usize] = Some(index));
            for &t in &op.inputs {
                uses.readers[t as usize] += 1;
                uses.only_reader[t as usize] = Some(index);
            }
        }
        uses
    }

    /// The operator that writes a tensor.
    pub fn writer(&self, tensor: u32) -> Option<usize> {
        self.writer[tensor as usize]
    }

    /// The writer and the only reader of a tensor, if it has one of each and is read once.
    pub fn only_link(&self, tensor: u32) -> Option<(usize, usize)> {
        let tensor = tensor as usize;
        (self.readers[tensor] == 1).then_some((self.writer[tensor]?, self.only_reader[tensor]?))
    }

    /// The output of operator `index` that a collective wants to be pushed: (output, the collective).
    pub fn pushed_by(&self, graph: &OpGraph, index: usize, cuts: &[Option<Arc<Cut>>]) -> Option<(u8, usize)> {
        graph.ops[index].outputs.iter().enumerate().find_map(|(output, &tensor)| {
            let reader = self.only_reader[tensor as usize]?;
            let pushes = cuts[reader].as_ref().is_some_and(|c| c.lowered.push.is_some());
            (pushes && graph.ops[reader].inputs[0] == tensor).then_some((output as u8, reader))
        })
    }

    /// The output of operator `index` that a collective wants to be stored with its owners: (output, the collective).
    pub fn stored_by(
        &self,
        graph: &OpGraph,
        index: usize,
        cuts: &[Option<Arc<Cut>>],
    ) -> Option<(usize, usize)> {
        graph.ops[index].outputs.iter().enumerate().find_map(|(output, &tensor)| {
            let (_, reader) = self.only_link(tensor)?;
            let stores = cuts[reader].as_ref()?.lowered.stored_into.is_some();
            (stores && graph.ops[reader].inputs[0] == tensor).then_some((output, reader))
        })
    }

    /// The output of operator `index` that a collective splits over the ranks, and in which blocks.
    pub fn dealt_by(
        &self,
        graph: &OpGraph,
        index: usize,
        cuts: &[Option<Arc<Cut>>],
    ) -> Option<(usize, Blocks)> {
        graph.ops[index].outputs.iter().enumerate().find_map(|(output, &tensor)| {
            let (_, reader) = self.only_link(tensor)?;
            let blocks = cuts[reader].as_ref()?.lowered.dealt?;
            (graph.ops[reader].inputs[0] == tensor).then_some((output, blocks))
        })
    }

    /// True if the tasks that produce the first input can push it, and it has no other reader.
    pub fn can_push(&self, graph: &OpGraph, registry: &Registry, options: &BuildOptions, op: &Op) -> bool {
        let input = op.inputs[0];
        let source = &graph.tensors[input as usize];
        self.writer[input as usize].is_some_and(|w| pushes(graph, registry, options, &graph.ops[w], input))
            && self.readers[input as usize] == 1
            && !source.output
            && source.role == Role::Activation
    }

    /// True if the tasks of a task type write the first input, and its memory may be placed freely.
    pub fn can_place(&self, graph: &OpGraph, registry: &Registry, op: &Op) -> bool {
        let source = &graph.tensors[op.inputs[0] as usize];
        let computed = self.writer[op.inputs[0] as usize]
            .is_some_and(|w| registry.collective(&graph.ops[w].op_type).is_none());
        source.role == Role::Activation && computed && !source.output
    }
}
