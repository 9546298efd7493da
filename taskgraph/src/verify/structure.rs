//! What can be said of a graph without following its edges: indices, operands, placement; and trigger counts.

use super::boxes::{Scattered, boxes, is_symbolic, last_byte, strides_nest};
use super::report::{Names, Violation, ViolationKind};
use crate::dtype::DType;
use crate::ids::{EventId, TaskId};
use crate::op_graph::Role;
use crate::region::MAX_DIMS;
use crate::task_graph::{
    Area, EventType, Operand, Place, Placement, Space, Task, TaskGraph, TensorEntry, core_types,
};
use crate::trust::Trust;

/// Violations kept of each rank: more would not help anybody.
pub(super) const KEEP: usize = 16;

/// Indices in [`core_types::ALL`], and so in [`TaskGraph::type_names`].
const TERMINATE: u16 = 0;
const BEGIN: u16 = 1;
const COPY: u16 = 3;
const SIGNAL: u16 = 4;

/// A copy or a signal: done at a time of its own, which only the event that it triggers tells.
pub(super) fn is_put(task: &Task) -> bool {
    matches!(task.task_type, COPY | SIGNAL)
}

/// Checks every rank by itself, then that the ranks fit together.
pub(super) fn check(graphs: &[TaskGraph]) -> Vec<Violation> {
    let mut violations = check_ranks(graphs, graphs.len());
    if violations.is_empty() {
        symmetric_tensors(graphs, &mut violations);
    }
    violations
}

/// Checks rank 0 by itself, and what all ranks have in common at first sight.
pub(super) fn check_first(graphs: &[TaskGraph]) -> Vec<Violation> {
    check_ranks(graphs, 1)
}

fn check_ranks(graphs: &[TaskGraph], ranks: usize) -> Vec<Violation> {
    let mut violations = Vec::new();
    let say = |message: String| Violation::new(ViolationKind::Structure, &[], message);
    if graphs.is_empty() || graphs.len() > usize::from(u16::MAX) {
        return vec![say(format!("{} ranks: between 1 and {} are possible", graphs.len(), u16::MAX))];
    }
    let mut nodes = 0usize;
    for (rank, graph) in graphs.iter().enumerate() {
        nodes = nodes.saturating_add(graph.tasks.len()).saturating_add(graph.events.len());
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
        violations.push(say(format!("{nodes} tasks and events are more than 31 bits count")));
    }
    if violations.is_empty() {
        let each = crate::parallel::map(ranks, |rank| {
            let mut of_rank = RankCheck { graphs, rank, violations: Vec::new() };
            of_rank.run();
            of_rank.violations
        });
        violations.extend(each.into_iter().flatten());
    }
    violations
}

/// Every rank has the same symmetric tensors in the same order, so that an offset means the same everywhere.
fn symmetric_tensors(graphs: &[TaskGraph], violations: &mut Vec<Violation>) {
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
                format!("rank {rank} has {} symmetric tensors, rank 0 has {}", other.len(), first.len()),
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
                        "symmetric tensor '{}' {:?} of rank 0 stands where rank {rank} has '{}' {:?}: \
                         the offsets of symmetric memory must agree",
                        a.name, a.dims, b.name, b.dims
                    ),
                ));
                break;
            }
        }
    }
}

/// Why a tensor can't lie where it says.
fn overlay_problem(tensor: &TensorEntry) -> Option<String> {
    let overlay = tensor.overlay?;
    if (overlay.area == Area::Flagged) != (tensor.dtype == DType::F32Flagged) {
        return Some("is flagged, but does not lie among flagged words, or the other way round".into());
    }
    if overlay.area.space() != tensor.space {
        return Some(format!("is {:?} memory, but lies in the area {:?}", tensor.space, overlay.area));
    }
    if tensor.role != Role::Activation || tensor.output {
        return Some("shares memory, but its value is wanted beyond the tasks that use it".into());
    }
    if overlay.offset % 16 != 0 || overlay.offset.checked_add(tensor.bytes).is_none() {
        return Some(format!("lies at byte {}, which is no multiple of 16 or too far", overlay.offset));
    }
    None
}

struct RankCheck<'g> {
    graphs: &'g [TaskGraph],
    rank: usize,
    violations: Vec<Violation>,
}

/// Why a trust does not fit its operand.
fn trusted(tensor: &TensorEntry, operand: &Operand, active: u32) -> Option<String> {
    let name = &tensor.name;
    let dims = &tensor.dims[..];
    match operand.trust {
        None => None,
        Some(Trust::PagesOfSlot | Trust::PagesOfRows) => (!is_symbolic(tensor)).then(|| {
            format!(
                "of '{name}' names pages of a slot, but the tensor is no cache with an index space of its own"
            )
        }),
        Some(trust @ (Trust::RowsOfSlot { slot, of } | Trust::RowsOfUnits { task: slot, of })) => {
            let rows = dims.first().copied().unwrap_or(0);
            let share = |a: u32| (u64::from(rows) * u64::from(a) / u64::from(of.max(1))) as u32;
            let region = &operand.region;
            let mut rest = operand.offset / tensor.dtype.size();
            let all_rows = usize::from(operand.ndim) == dims.len()
                && operand.strides.get(..dims.len()) == Some(&tensor.strides[..])
                && operand.dims[0] == rows;
            let in_view = (0..dims.len()).all(|d| {
                let stride = u64::from(tensor.strides[d]).max(1);
                let lo = rest / stride;
                rest %= stride;
                u64::from(region.lo[d]) >= lo && u64::from(region.hi[d]) <= lo + u64::from(operand.dims[d])
            });
            let fits = slot < of
                && (of == active || matches!(trust, Trust::RowsOfUnits { .. }))
                && all_rows
                && in_view
                && (region.lo[0], region.hi[0]) == (share(slot), share(slot + 1));
            (is_symbolic(tensor) || !fits).then(|| {
                format!(
                    "of '{name}' names {trust:?}, the graph has {active} active slots: its view must have all rows and \
                     its region, {region}, those rows' share"
                )
            })
        }
    }
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
            self.say(format!("type_names must start with {:?}", core_types::ALL));
            return;
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
            } else if tensor.strides.len() != tensor.dims.len() {
                self.say(format!("tensor '{}' has not one stride for each dimension", tensor.name));
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
                self.say(format!("event {index} must be of type {wanted:?}"));
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
                    "event {index} has type {:?}, which {:?} placement has no use for there",
                    event.event_type, graph.placement
                ));
            }
        }
    }

    fn task(&mut self, index: u32, task: &Task) {
        let graph = self.graph();
        let operands = task.first_operand as usize + task.num_inputs as usize + task.num_outputs as usize;
        if operands > graph.operands.len() {
            return self.say_task(index, "names operands that don't exist");
        }
        if usize::from(task.task_type) >= graph.type_names.len() {
            return self.say_task(index, "has an unknown type");
        }
        let fixed = index <= TaskId::BEGIN;
        if !fixed && matches!(task.task_type, TERMINATE | BEGIN) {
            return self.say_task(index, "begins or terminates, which only tasks 1 and 0 do");
        }
        let variant = graph.variants.get(usize::from(task.variant));
        if variant.is_some_and(|v| v.task_type != task.task_type && task.task_type > SIGNAL)
            || (variant.is_none() && task.task_type > SIGNAL)
        {
            return self.say_task(index, &format!("has variant {}, which is not of its type", task.variant));
        }
        if !graph.ops.is_empty() && task.op as usize >= graph.ops.len() && !fixed {
            return self.say_task(index, "names an operator that doesn't exist");
        }
        let events = graph.events.len() as u32;
        if task.dependencies.iter().any(|&e| e >= events || e == EventId::TERMINATION) && !fixed {
            return self.say_task(index, "depends on an event that doesn't exist or never happens");
        }
        if fixed && !task.dependencies.is_empty() {
            return self.say_task(index, "must not depend on an event");
        }
        if task.carried.iter().any(|&(e, back)| e >= events || e < 3 || back == 0) {
            return self.say_task(
                index,
                "carries an event that doesn't exist, is fixed, or is not of an earlier epoch",
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
                    if matches!(tensor.role, Role::Weight { .. } | Role::Constant) {
                        let message = format!("writes '{}', which is constant", tensor.name);
                        self.say_task(index, &message);
                        if let Some(last) = self.violations.last_mut() {
                            last.kind = ViolationKind::WritesConstant;
                        }
                    }
                }
            }
        }
        if task.task_type == COPY
            && self.violations.is_empty()
            && let Some(message) = self.copy_shape(task)
        {
            self.say_task(index, &message);
        }
    }

    fn trigger(&self, index: u32, task: &Task) -> Option<String> {
        let Some(event) = task.trigger else {
            return matches!(task.task_type, COPY | SIGNAL)
                .then(|| "must trigger an event: nobody could know that it is done".to_string());
        };
        let owner = usize::from(event.owner());
        let Some(target) = self.graphs.get(owner) else {
            return Some(format!("triggers an event of rank {owner}, which doesn't exist"));
        };
        if event.index() as usize >= target.events.len() {
            return Some(format!("triggers event {} of rank {owner}, which doesn't exist", event.index()));
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
            EventId::TAG_NVSHMEM => {
                return Some(format!(
                    "triggers event {} of rank {owner}: only nvshmem_copy and nvshmem_signal reach another rank",
                    event.index()
                ));
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

    /// A copy takes as much as it gives: one source and one target of the same type and dimensions.
    fn copy_shape(&self, task: &Task) -> Option<String> {
        let graph = self.graph();
        let ([source], [target]) = (graph.inputs(task), graph.outputs(task)) else {
            return Some("must have one input and one output".into());
        };
        let name = |o: &Operand| graph.tensors[o.tensor as usize].name.as_str();
        let dtype = |o: &Operand| graph.tensors[o.tensor as usize].dtype;
        let dims = |o: &Operand| o.dims[..usize::from(o.ndim)].to_vec();
        let same = dtype(source) == dtype(target) && dims(source) == dims(target);
        (!same).then(|| {
            format!(
                "copies {} {:?} of '{}' into {} {:?} of '{}': both must have the same type and dimensions",
                dtype(source),
                dims(source),
                name(source),
                dtype(target),
                dims(target),
                name(target)
            )
        })
    }

    fn operand(&self, task: &Task, operand: &Operand, input: bool) -> Option<String> {
        let graph = self.graph();
        let Some(tensor) = graph.tensors.get(operand.tensor as usize) else {
            return Some("names a tensor that doesn't exist".into());
        };
        let name = &tensor.name;
        let ndim = usize::from(operand.ndim);
        if ndim > MAX_DIMS {
            return Some(format!("of '{name}' has {ndim} dimensions, more than {MAX_DIMS}"));
        }
        let region = &operand.region;
        for d in 0..MAX_DIMS {
            let limit = tensor.region_dims.get(d).copied().unwrap_or(1);
            if region.lo[d] > region.hi[d] || region.hi[d] > limit {
                return Some(format!(
                    "of '{name}' touches {region}, outside its index space {:?}",
                    tensor.region_dims
                ));
            }
        }
        let end = last_byte(operand.offset, &operand.dims[..ndim], &operand.strides[..ndim], tensor.dtype);
        // Of a share without elements the offset says nothing.
        let empty = operand.dims[..ndim].contains(&0);
        if !empty && end > tensor.bytes {
            return Some(format!(
                "of '{name}' ends at byte {end}, but the tensor has {} bytes",
                tensor.bytes
            ));
        }
        if !operand.offset.is_multiple_of(tensor.dtype.size()) {
            return Some(format!("of '{name}' starts at byte {}, inside an element", operand.offset));
        }
        if let Some(message) = trusted(tensor, operand, graph.capacity.active) {
            return Some(message);
        }
        let constant = matches!(tensor.role, Role::Weight { .. } | Role::Constant);
        if operand.trust.is_none() && !constant && !tensor.tiled && !is_symbolic(tensor) {
            let view = || {
                format!(
                    "offset {} bytes, dims {:?}, strides {:?}",
                    operand.offset,
                    &operand.dims[..ndim],
                    &operand.strides[..ndim]
                )
            };
            match boxes(tensor, operand, false) {
                Err(Scattered) => {
                    return Some(format!(
                        "of '{name}' has a view ({}) that takes its elements in too many pieces; use the tensor's own strides",
                        view()
                    ));
                }
                Ok(found) if !found.iter().all(|b| region.contains(b)) => {
                    return Some(format!(
                        "of '{name}' has a view ({}) that leaves its region {region}",
                        view()
                    ));
                }
                Ok(_) => {}
            }
        }
        let is_copy = task.task_type == COPY;
        match operand.place {
            Place::Own if is_copy && !input && task.trigger.is_some_and(|e| e.is_nvshmem()) => {
                Some(format!("of '{name}' lies in its own memory, but the trigger's owner is a peer"))
            }
            Place::Own => None,
            _ if input => Some(format!("of '{name}' lies at another rank: no task loads from a peer")),
            _ if tensor.space != Space::Symmetric => {
                Some(format!("of '{name}' lies at another rank, but the tensor is not symmetric"))
            }
            Place::Peer(peer) if usize::from(peer) >= self.graphs.len() => {
                Some(format!("of '{name}' lies at rank {peer}, which doesn't exist"))
            }
            Place::Peer(_) if !is_copy => {
                Some(format!("of '{name}' lies at another rank: only nvshmem_copy writes there"))
            }
            Place::Peer(peer) if task.trigger.is_none_or(|e| e.owner() != peer) => Some(format!(
                "of '{name}' lies at rank {peer}, which is not the owner of the event that it triggers"
            )),
            Place::Peer(_) => None,
            Place::All if tensor.dtype != DType::F32Flagged => {
                Some(format!("of '{name}' goes to every rank, but the tensor is not flagged"))
            }
            Place::All => None,
        }
    }

    fn static_placement(&mut self) {
        let graphs = self.graphs;
        let graph = &graphs[self.rank];
        if graph.worker_lists.len() != graph.workers as usize {
            return self.say(format!(
                "{} worker lists for {} workers",
                graph.worker_lists.len(),
                graph.workers
            ));
        }
        let mut placed = vec![false; graph.tasks.len()];
        for (worker, list) in graph.worker_lists.iter().enumerate() {
            for &index in list {
                match placed.get_mut(index as usize) {
                    None => {
                        self.say(format!("worker {worker}'s list names task {index}, which doesn't exist"))
                    }
                    Some(true) => self.say_task(index, "is in more than one place of the workers' lists"),
                    Some(place) => {
                        *place = true;
                        if index <= TaskId::BEGIN {
                            self.say_task(index, "is in a worker's list, but belongs to the batch step");
                        } else if graph.tasks[index as usize].worker != Some(worker as u32) {
                            self.say_task(
                                index,
                                &format!("is in worker {worker}'s list, but says otherwise"),
                            );
                        }
                    }
                }
                if self.full() {
                    return;
                }
            }
        }
        for (index, placed) in placed.into_iter().enumerate().skip(2) {
            if !placed && !self.full() {
                self.say_task(index as u32, "is in no worker's list");
            }
        }
    }

    fn dynamic_placement(&mut self) {
        let graphs = self.graphs;
        let graph = &graphs[self.rank];
        if !graph.worker_lists.iter().all(Vec::is_empty) {
            return self.say("dynamic placement has no worker lists".into());
        }
        let mut launched = vec![u32::MAX; graph.tasks.len()];
        for (e, event) in graph.events.iter().enumerate() {
            let launches = matches!(
                event.event_type,
                EventType::LaunchTasks | EventType::LaunchMassiveTasks | EventType::LaunchDependentTasks
            );
            if !launches || event.first_task >= event.last_task || self.full() {
                continue;
            }
            if event.last_task as usize > graph.tasks.len() || event.first_task <= TaskId::BEGIN {
                self.say(format!(
                    "event {e} launches tasks {}..{}, outside 2..{}",
                    event.first_task,
                    event.last_task,
                    graph.tasks.len()
                ));
                continue;
            }
            for index in event.first_task..event.last_task {
                let by = &mut launched[index as usize];
                if *by != u32::MAX && !self.full() {
                    let message = format!("is launched twice, by events {by} and {e}");
                    self.say_task(index, &message);
                }
                launched[index as usize] = e as u32;
            }
        }
        for (index, task) in graph.tasks.iter().enumerate().skip(2) {
            if self.full() {
                return;
            }
            if launched[index] == u32::MAX {
                self.say_task(index as u32, "is launched by no event");
            } else if task.dependencies.as_slice() != [launched[index]] {
                let message = format!(
                    "is launched by event {}, but depends on {:?}: under dynamic placement it must depend on exactly that one",
                    launched[index], task.dependencies
                );
                self.say_task(index as u32, &message);
            } else if task.worker.is_some() {
                self.say_task(index as u32, "names a worker under dynamic placement");
            }
        }
    }
}
