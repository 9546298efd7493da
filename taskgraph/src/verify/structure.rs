//! Checks that need no edges: indices, operands, placement; and the numbers of triggers.

mod operands;
mod placement;
mod shapes;
mod within;

use super::boxes::{last_byte, strides_nest};
use super::ranks::Ranks;
use super::report::{Names, Violation, ViolationKind};
use crate::dtype::DType;
use crate::ids::{EventId, TaskId};
use crate::op_graph::Role;
use crate::region::MAX_DIMS;
use crate::target::Backend;
use crate::task_graph::{
    Area, EventType, Operand, Place, Placement, Space, Task, TaskGraph, TensorEntry, core_types,
};

/// Maximum number of violations kept per rank. More would not help.
pub(super) const KEEP: usize = 16;

/// Indices in [`core_types::ALL`], and so in [`TaskGraph::type_names`].
const TERMINATE: u16 = 0;
const BEGIN: u16 = 1;
const EMPTY: u16 = 2;
const COPY: u16 = 3;
const SIGNAL: u16 = 4;
const REDUCE: u16 = 5;

/// True for a copy, a signal and every other task that reaches another rank. It completes at its own time, and only the event that it
/// triggers shows that.
pub(super) fn is_put(task: &Task) -> bool {
    matches!(task.task_type, COPY | SIGNAL) || task.trigger.is_some_and(|event| event.is_nvshmem())
}

/// Checks every rank by itself, then that the ranks are consistent.
pub(super) fn check(graphs: Ranks<'_>) -> Vec<Violation> {
    let mut violations = check_ranks(graphs);
    if violations.is_empty() {
        symmetric_tensors(graphs, &mut violations);
    }
    violations
}

/// Checks the first of `world` ranks by itself, as if the others were like it.
pub(super) fn check_first(first: &TaskGraph, world: usize) -> Vec<Violation> {
    check_ranks(Ranks::like(first, world))
}

fn check_ranks(graphs: Ranks<'_>) -> Vec<Violation> {
    let mut violations = Vec::new();
    let say = |message: String| Violation::new(ViolationKind::Structure, &[], message);
    if graphs.len() == 0 || graphs.len() > usize::from(u16::MAX) {
        return vec![say(format!("{} ranks; expected 1 to {}", graphs.len(), u16::MAX))];
    }
    let mut nodes = 0usize;
    let stands_for = if graphs.held().len() == 1 { graphs.len() } else { 1 };
    for (rank, graph) in graphs.held().iter().enumerate() {
        let of_rank = graph.tasks.len().saturating_add(graph.events.len());
        nodes = nodes.saturating_add(of_rank.saturating_mul(stands_for));
        if graph.rank as usize != rank || graph.world as usize != graphs.len() {
            violations.push(say(format!(
                "graph {rank} says rank {} of {}, but is number {rank} of {}",
                graph.rank,
                graph.world,
                graphs.len()
            )));
        }
        let differs = graph.placement != graphs[0].placement
            || graph.backend != graphs[0].backend
            || graph.capacity != graphs[0].capacity;
        if differs {
            violations.push(say(format!("rank {rank} and rank 0 differ in placement, backend or capacity")));
        }
    }
    if nodes >= (u32::MAX / 2) as usize {
        violations.push(say(format!("{nodes} tasks and events are too many: the limit is 31 bits")));
    }
    if violations.is_empty() {
        let each = crate::parallel::map(graphs.held().len(), |rank| {
            let mut of_rank = RankCheck { graphs, rank, violations: Vec::new() };
            of_rank.run();
            of_rank.violations
        });
        violations.extend(each.into_iter().flatten());
    }
    violations
}

/// Every rank must have the same symmetric tensors in the same order, so that an offset means the same everywhere.
fn symmetric_tensors(graphs: Ranks<'_>, violations: &mut Vec<Violation>) {
    let list = |g: &'_ TaskGraph| -> Vec<usize> {
        (0..g.tensors.len()).filter(|&t| g.tensors[t].space == Space::Symmetric).collect()
    };
    let first = list(&graphs[0]);
    for (rank, graph) in graphs.iter().enumerate().skip(1) {
        let other = list(graph);
        if other.len() != first.len() {
            violations.push(Violation::new(
                ViolationKind::Structure,
                &[],
                format!("rank {rank} has {} symmetric tensors, but rank 0 has {}", other.len(), first.len()),
            ));
        }
        for (&a, &b) in first.iter().zip(&other) {
            let (a, b) = (&graphs[0].tensors[a], &graph.tensors[b]);
            let same = |a: &TensorEntry, b: &TensorEntry| {
                a.name == b.name
                    && a.dtype == b.dtype
                    && a.dims == b.dims
                    && a.strides == b.strides
                    && a.bytes == b.bytes
                    && a.region_dims == b.region_dims
                    && a.overlay == b.overlay
            };
            if !same(a, b) {
                violations.push(Violation::new(
                    ViolationKind::Structure,
                    &[],
                    format!(
                        "symmetric tensor '{}' {:?} of rank 0 is where rank {rank} has '{}' {:?}: \
                         the offsets of symmetric memory must agree",
                        a.name, a.dims, b.name, b.dims
                    ),
                ));
                break;
            }
        }
    }
}

/// True if the tensor can have paired rows: each packed tile consists of as many rows of either half.
fn has_whole_pairs(tensor: &TensorEntry, backend: Backend) -> bool {
    let Some(rows) = backend.pair_rows() else { return false };
    tensor.tiled && tensor.dims.first().is_some_and(|all| all.is_multiple_of(2 * rows))
}

/// A tensor that is larger is a mistake, and sums of sizes stay far from overflow.
const MOST_BYTES: u64 = 1 << 48;

/// The reason why a tensor cannot be at its place.
fn overlay_problem(tensor: &TensorEntry) -> Option<String> {
    let overlay = tensor.overlay?;
    if (overlay.area == Area::Flagged) != (tensor.dtype == DType::F32Flagged) {
        return Some("is flagged but not in the area of flagged words, or the other way round".into());
    }
    if overlay.area.space() != tensor.space {
        return Some(format!("is {} memory, but lies in the area {}", tensor.space, overlay.area));
    }
    if tensor.role != Role::Activation || tensor.output {
        return Some("shares memory, but its value is needed after the tasks that use it".into());
    }
    if overlay.offset % 16 != 0 || overlay.offset.saturating_add(tensor.bytes) > MOST_BYTES {
        return Some(format!(
            "lies at byte {}, which is not a multiple of 16, or is too large",
            overlay.offset
        ));
    }
    None
}

struct RankCheck<'g> {
    graphs: Ranks<'g>,
    rank: usize,
    violations: Vec<Violation>,
}

impl RankCheck<'_> {
    fn graph(&self) -> &TaskGraph {
        &self.graphs[self.rank]
    }

    fn full(&self) -> bool {
        self.violations.len() >= KEEP
    }

    fn say(&mut self, message: String) {
        let message = format!("rank {}: {message}", self.rank);
        self.violations.push(Violation::new(ViolationKind::Structure, &[], message));
    }

    fn say_task(&mut self, index: u32, message: &str) {
        let task = (self.rank as u16, index);
        let message = format!("{} {message}", Names { graphs: self.graphs }.task(task));
        self.violations.push(Violation::new(ViolationKind::Structure, &[task], message));
    }

    fn run(&mut self) {
        let graphs = self.graphs;
        let graph = &graphs[self.rank];
        if graph.type_names.len() < core_types::ALL.len()
            || graph.type_names.iter().zip(core_types::ALL).any(|(a, b)| a != b)
        {
            self.say(format!("type_names must start with {}", core_types::ALL.join(", ")));
            return;
        }
        if graph.workers == 0 {
            self.say("has no workers, so no task can run".into());
        }
        self.tensors();
        self.fixed_tasks_and_events();
        if !self.violations.is_empty() {
            return;
        }
        for index in 0..graph.tasks.len() as u32 {
            if self.full() {
                return;
            }
            self.task(index, &graph.tasks[index as usize]);
        }
        if self.violations.is_empty() {
            match graph.placement {
                Placement::Static => self.static_placement(),
                Placement::Dynamic => self.dynamic_placement(),
            }
        }
    }

    fn tensors(&mut self) {
        let graphs = self.graphs;
        let capacity = graphs[self.rank].capacity;
        if capacity.samples > capacity.rows || capacity.active > capacity.rows {
            self.say(format!(
                "has room for {} samples and {} active slots, but only for {} rows",
                capacity.samples, capacity.active, capacity.rows
            ));
        }
        let mut names = std::collections::HashSet::new();
        for tensor in &graphs[self.rank].tensors {
            if self.full() {
                return;
            }
            if !names.insert(tensor.name.as_str()) {
                self.say(format!("two tensors are named '{}'", tensor.name));
            }
            if tensor.dims.len() > MAX_DIMS || tensor.region_dims.len() > MAX_DIMS {
                self.say(format!("tensor '{}' has more than {MAX_DIMS} dimensions", tensor.name));
            } else if let Some(problem) = overlay_problem(tensor) {
                self.say(format!("tensor '{}' {problem}", tensor.name));
            } else if tensor.dtype == DType::F32Flagged && tensor.role != Role::Activation {
                self.say(format!(
                    "tensor '{}' is flagged but not an activation: the tags of its words belong to one graph",
                    tensor.name
                ));
            } else if tensor.tiled && !matches!(tensor.role, Role::Weight { .. }) {
                self.say(format!("tensor '{}' is packed in tiles, but is not a weight", tensor.name));
            } else if tensor.paired && !has_whole_pairs(tensor, graphs[self.rank].backend) {
                self.say(format!(
                    "tensor '{}' {:?} has paired rows, but is not a packed matrix of whole pairs",
                    tensor.name, tensor.dims
                ));
            } else if tensor.bytes > MOST_BYTES {
                self.say(format!(
                    "tensor '{}' has {} bytes, more than any memory",
                    tensor.name, tensor.bytes
                ));
            } else if tensor.strides.len() != tensor.dims.len() {
                self.say(format!("tensor '{}' must have one stride for each dimension", tensor.name));
            } else if !tensor.dims.contains(&0) && !strides_nest(&tensor.dims, &tensor.strides) {
                self.say(format!(
                    "tensor '{}' {:?} with strides {:?} has elements in more than one place",
                    tensor.name, tensor.dims, tensor.strides
                ));
            } else if !tensor.tiled
                && last_byte(0, &tensor.dims, &tensor.strides, tensor.dtype) > tensor.bytes
            {
                self.say(format!(
                    "tensor '{}' {:?} with strides {:?} does not fit its {} bytes",
                    tensor.name, tensor.dims, tensor.strides, tensor.bytes
                ));
            }
        }
    }

    fn fixed_tasks_and_events(&mut self) {
        let graphs = self.graphs;
        let graph = &graphs[self.rank];
        let type_of = |index: u32| graph.tasks.get(index as usize).map(|t| t.task_type);
        if type_of(TaskId::TERMINATE) != Some(TERMINATE) || type_of(TaskId::BEGIN) != Some(BEGIN) {
            self.say("task 0 must be terminate and task 1 begin_task_graph".into());
        }
        let fixed = [
            (EventId::TERMINATION, EventType::Termination),
            (EventId::BEGIN, EventType::LaunchDependentTasks),
            (EventId::END_OF_GRAPH, EventType::EndOfTaskGraph),
        ];
        for (index, wanted) in fixed {
            if graph.events.get(index as usize).map(|e| e.event_type) != Some(wanted) {
                self.say(format!("event {index} must be of type {wanted}"));
            }
        }
        for (index, event) in graph.events.iter().enumerate().skip(3) {
            if self.full() {
                return;
            }
            let fits = match event.event_type {
                EventType::Empty => true,
                EventType::LaunchTasks | EventType::LaunchMassiveTasks => {
                    graph.placement == Placement::Dynamic
                }
                _ => false,
            };
            if !fits {
                self.say(format!(
                    "event {index} has type {}, which {} placement does not use there",
                    event.event_type, graph.placement
                ));
            }
        }
    }

    fn task(&mut self, index: u32, task: &Task) {
        let graph = self.graph();
        let operands = task.first_operand as usize + task.num_inputs as usize + task.num_outputs as usize;
        if operands > graph.operands.len() {
            return self.say_task(index, "uses operands that do not exist");
        }
        if usize::from(task.task_type) >= graph.type_names.len() {
            return self.say_task(index, "has an unknown type");
        }
        let fixed = index <= TaskId::BEGIN;
        if !fixed && matches!(task.task_type, TERMINATE | BEGIN) {
            return self.say_task(index, "begins or terminates, which only tasks 1 and 0 do");
        }
        // These only wait and trigger. What they seem to write would never be written.
        let idle = matches!(task.task_type, TERMINATE | BEGIN | EMPTY | SIGNAL);
        if idle && (task.num_inputs > 0 || task.num_outputs > 0) {
            return self.say_task(index, "has operands, but a task of its type reads and writes nothing");
        }
        // Nothing reads the variant of a task without code.
        let variant = graph.variants.get(usize::from(task.variant));
        if !idle && variant.is_none_or(|v| v.task_type != task.task_type) {
            return self.say_task(index, &format!("has variant {}, which is not of its type", task.variant));
        }
        if !graph.ops.is_empty() && task.op as usize >= graph.ops.len() && !fixed {
            return self.say_task(index, "refers to an operator that does not exist");
        }
        if task.dependencies.len() + task.carried.len() > usize::from(u16::MAX) {
            return self
                .say_task(index, "depends on more than 65535 events, which do not fit into its description");
        }
        let events = graph.events.len() as u32;
        if task.dependencies.iter().any(|&e| e >= events || e == EventId::TERMINATION) && !fixed {
            return self.say_task(index, "depends on an event that does not exist or never happens");
        }
        if fixed && !task.dependencies.is_empty() {
            return self.say_task(index, "must not depend on an event");
        }
        if task.carried.iter().any(|&(e, back)| e >= events || e < 3 || back == 0) {
            return self.say_task(
                index,
                "carries an event that does not exist, is fixed, or is not of an earlier epoch",
            );
        }
        if let Some(message) = self.trigger(index, task) {
            return self.say_task(index, &message);
        }
        let graphs = self.graphs;
        let inputs = graphs[self.rank].inputs(task);
        for (i, operand) in inputs.iter().enumerate() {
            if let Some(message) = self.operand(task, operand, true) {
                self.say_task(index, &format!("input {i} {message}"));
            }
        }
        for (i, operand) in graphs[self.rank].outputs(task).iter().enumerate() {
            match self.operand(task, operand, false) {
                Some(message) => self.say_task(index, &format!("output {i} {message}")),
                None => {
                    let tensor = &graphs[self.rank].tensors[operand.tensor as usize];
                    let what = match tensor.role {
                        Role::Weight { .. } | Role::Constant => Some("constant"),
                        // All iterations of a launch read what the host has written.
                        Role::Input => Some("an input"),
                        Role::Activation | Role::Persistent { .. } => None,
                    };
                    if let Some(what) = what {
                        let message = format!("writes '{}', which is {what}", tensor.name);
                        self.say_task(index, &message);
                        if let Some(last) = self.violations.last_mut() {
                            last.kind = ViolationKind::WritesConstant;
                        }
                    }
                }
            }
        }
        if self.violations.is_empty() {
            let shape = match task.task_type {
                COPY => self.copy_shape(task),
                REDUCE => self.sum_shape(task),
                _ => None,
            };
            if let Some(message) = shape.or_else(|| self.overlap(task)) {
                self.say_task(index, &message);
            }
        }
    }

    fn trigger(&self, index: u32, task: &Task) -> Option<String> {
        let Some(event) = task.trigger else {
            return matches!(task.task_type, COPY | SIGNAL).then(|| {
                "must trigger an event, because otherwise no task could know that it is done".to_string()
            });
        };
        let owner = usize::from(event.owner());
        let Some(target) = self.graphs.get(owner) else {
            return Some(format!("triggers an event of rank {owner}, which does not exist"));
        };
        if event.index() as usize >= target.events.len() {
            return Some(format!("triggers event {} of rank {owner}, which does not exist", event.index()));
        }
        match event.tag() {
            EventId::TAG_LOCAL if owner == self.rank => {}
            EventId::TAG_LOCAL => {
                return Some(format!(
                    "triggers event {} of rank {owner} without the NVSHMEM tag",
                    event.index()
                ));
            }
            EventId::TAG_NVSHMEM if owner == self.rank => {
                return Some("triggers its own rank's event with the NVSHMEM tag".into());
            }
            EventId::TAG_NVSHMEM if matches!(task.task_type, COPY | SIGNAL) => {}
            // What else it wrote, on its own rank or on a third one, no task there could know to be done.
            EventId::TAG_NVSHMEM => {
                let outputs = self.graph().outputs(task);
                let there = |o: &Operand| o.place == Place::Peer(event.owner());
                if outputs.is_empty() || !outputs.iter().all(there) {
                    return Some(format!(
                        "triggers event {} of rank {owner}, but not all of its outputs are on that rank, or it has none: only \
                         nvshmem_signal may have none",
                        event.index()
                    ));
                }
            }
            tag => return Some(format!("triggers an event with tag {tag}, which is neither 0 nor 1")),
        }
        match (event.index(), index) {
            (EventId::BEGIN, TaskId::BEGIN) => None,
            (EventId::BEGIN, _) => Some("triggers the begin event, which is task 1's".into()),
            (EventId::TERMINATION, TaskId::TERMINATE) => None,
            (EventId::TERMINATION, _) => Some("triggers the termination event".into()),
            _ => None,
        }
    }
}
