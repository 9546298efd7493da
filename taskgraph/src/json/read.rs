//! Reading `task_graph.json`.

use super::error::GraphFileError;
use super::task_graph_file::{
    FileGraph, FileOperand, FilePlace, FileTask, FileTensor, FileView, TASK_GRAPH_SCHEMA,
};
use super::write::touched;
use crate::ids::{EventId, TaskId};
use crate::region::{MAX_DIMS, Region};
use crate::task_graph::{Event, LocalPart, Operand, Place, Task, TaskGraph, TensorEntry, Variant};
use crate::words::counted;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::io::Read;

/// Reads `task_graph.json`. A file that [`write_json`](super::write_json) wrote for a built graph is read back without loss: in a built graph every
/// operand belongs to one task, and unused dimensions and strides of a view are 1.
///
/// # Errors
/// JSON that does not match the schema (with line and column), or names, indices and event ids that do not exist (with the path
/// of the value). A graph that can be read may still be wrong: [`crate::verify`] checks that.
pub fn from_json(mut reader: impl Read) -> Result<TaskGraph, GraphFileError> {
    let mut bytes = Vec::new();
    reader.read_to_end(&mut bytes)?;
    let file: FileGraph<'_> = serde_json::from_slice(&bytes)?;
    if file.schema != TASK_GRAPH_SCHEMA {
        return Err(GraphFileError::at(
            "schema",
            format!("is '{}'; this program reads '{TASK_GRAPH_SCHEMA}'", file.schema),
        ));
    }
    if file.first_tasks != [TaskId::BEGIN] {
        return Err(GraphFileError::at("first_tasks", format!("must be [{}]", TaskId::BEGIN)));
    }
    if file.rank >= file.world || file.world > u32::from(u16::MAX) {
        return Err(GraphFileError::at(
            "rank",
            format!("rank {} of {} is impossible", file.rank, file.world),
        ));
    }
    let types: HashMap<&str, u16> =
        file.task_types.iter().enumerate().map(|(i, name)| (name.as_str(), i as u16)).collect();
    if types.len() != file.task_types.len() || types.len() > usize::from(u16::MAX) {
        return Err(GraphFileError::at("task_types", "names a type twice, or has too many types"));
    }
    let tensors = file
        .tensors
        .into_iter()
        .enumerate()
        .map(|(i, t)| tensor_from_file(t).map_err(|e| prefix(&format!("tensors[{i}]"), e)))
        .collect::<Result<Vec<_>, _>>()?;
    let mut names = HashMap::new();
    for (i, tensor) in tensors.iter().enumerate() {
        if names.insert(tensor.name.as_str(), i as u32).is_some() {
            return Err(GraphFileError::at(
                format!("tensors[{i}].name"),
                format!("'{}' appears twice", tensor.name),
            ));
        }
    }
    let task_type = |name: &str, place: &dyn Fn() -> String| {
        types.get(name).copied().ok_or_else(|| {
            GraphFileError::at(format!("{}.task_type", place()), format!("'{name}' is not in task_types"))
        })
    };
    let mut variants = Vec::with_capacity(file.variants.len());
    for (i, v) in file.variants.into_iter().enumerate() {
        variants.push(Variant {
            task_type: task_type(&v.task_type, &|| format!("variants[{i}]"))?,
            params: v.params,
            scratch_bytes: v.scratch_bytes,
        });
    }
    let events: Vec<Event> = file
        .all_events
        .iter()
        .map(|e| Event {
            event_type: e.event_type,
            num_triggers: e.num_triggers,
            first_task: e.first_task_id,
            last_task: e.last_task_id,
            remote: e.remote,
        })
        .collect();
    let context = Context { rank: file.rank, tensors: &tensors, names: &names, events: &events };
    let total: usize = file.all_tasks.iter().map(|t| t.inputs.len() + t.outputs.len()).sum();
    let mut operands = Operands { list: vec![None; total], next: 0 };
    let mut tasks = Vec::with_capacity(file.all_tasks.len());
    for (i, task) in file.all_tasks.into_iter().enumerate() {
        let task_type = task_type(&task.task_type, &|| format!("all_tasks[{i}]"))?;
        let task = context
            .task(task, task_type, &mut operands)
            .map_err(|e| prefix(&format!("all_tasks[{i}]"), e))?;
        tasks.push(task);
    }
    Ok(TaskGraph {
        name: file.name,
        rank: file.rank,
        world: file.world,
        placement: file.placement,
        backend: file.backend,
        workers: file.workers,
        capacity: file.capacity,
        type_names: file.task_types,
        ops: file.ops,
        tensors,
        variants,
        // There are as many places as operands and none is used twice, so all are used.
        operands: operands.list.into_iter().flatten().collect(),
        tasks,
        events,
        worker_lists: file.worker_lists,
    })
}

fn prefix(prefix: &str, error: GraphFileError) -> GraphFileError {
    match error {
        GraphFileError::Value { place, message } => GraphFileError::at(format!("{prefix}.{place}"), message),
        other => other,
    }
}

fn tensor_from_file(tensor: FileTensor<'_>) -> Result<TensorEntry, GraphFileError> {
    let mut parts = Vec::with_capacity(tensor.parts.len());
    for (i, part) in tensor.parts.into_iter().enumerate() {
        let range = match (part.dim, part.range) {
            (None, None) => None,
            (Some(dim), Some([start, end])) => Some((dim, start..end)),
            _ => {
                return Err(GraphFileError::at(
                    format!("parts[{i}]"),
                    "needs both of `dim` and `range`, or neither",
                ));
            }
        };
        parts.push(LocalPart { source: part.source, dims: part.dims, range });
    }
    Ok(TensorEntry {
        name: tensor.name.into_owned(),
        dtype: tensor.dtype,
        dims: tensor.dims,
        strides: tensor.strides,
        space: tensor.space,
        bytes: tensor.bytes,
        role: tensor.role,
        parts,
        region_dims: tensor.region_dims,
        tiled: tensor.tiled,
        paired: tensor.paired,
        output: tensor.output,
        rows: tensor.rows,
        overlay: tensor.overlay,
    })
}

/// The operands of all tasks. Those of one task are contiguous.
struct Operands {
    list: Vec<Option<Operand>>,
    /// First operand of the next task, if operands are in the order of the tasks.
    next: u32,
}

/// What tasks refer to.
struct Context<'a> {
    rank: u32,
    tensors: &'a [TensorEntry],
    names: &'a HashMap<&'a str, u32>,
    events: &'a [Event],
}

impl Context<'_> {
    fn own_event(&self, id: u64, place: &str) -> Result<u32, GraphFileError> {
        let event = EventId(id);
        let known = self.events.get(event.index() as usize);
        let tag = |remote: bool| if remote { EventId::TAG_NVSHMEM } else { EventId::TAG_LOCAL };
        if u32::from(event.owner()) != self.rank || known.is_none_or(|e| tag(e.remote) != event.tag()) {
            let message = format!(
                "{id:#x} is not an event of rank {}, which has {}; local ones have tag 0, remote ones tag 1",
                self.rank,
                counted(self.events.len(), "event")
            );
            return Err(GraphFileError::at(place, message));
        }
        Ok(event.index())
    }

    fn task(
        &self,
        task: FileTask<'_>,
        task_type: u16,
        operands: &mut Operands,
    ) -> Result<Task, GraphFileError> {
        let count = |n: usize, place: &str| {
            u16::try_from(n).map_err(|_| GraphFileError::at(place, "has too many operands"))
        };
        let num_inputs = count(task.inputs.len(), "inputs")?;
        let num_outputs = count(task.outputs.len(), "outputs")?;
        let none = task.inputs.is_empty() && task.outputs.is_empty();
        let in_order = if none { 0 } else { operands.next };
        let first_operand = task.operand_id.unwrap_or(in_order);
        let mut at = first_operand as usize;
        for (list, name) in [(task.inputs, "inputs"), (task.outputs, "outputs")] {
            for (i, operand) in list.into_iter().enumerate() {
                let operand = self.operand(operand).map_err(|e| prefix(&format!("{name}[{i}]"), e))?;
                match operands.list.get_mut(at) {
                    Some(place @ None) => *place = Some(operand),
                    _ => {
                        return Err(GraphFileError::at(
                            "operand_id",
                            format!("operand {at} does not exist, or belongs to another task"),
                        ));
                    }
                }
                at += 1;
            }
        }
        operands.next = operands.next.saturating_add(u32::from(num_inputs) + u32::from(num_outputs));
        let mut dependencies = SmallVec::new();
        if task.dependent_events.is_empty() {
            if let Some(id) = task.dependent_event {
                dependencies.push(self.own_event(id, "dependent_event")?);
            }
        } else {
            if task.dependent_event != task.dependent_events.first().copied()
                || task.dependent_events.len() < 2
            {
                return Err(GraphFileError::at(
                    "dependent_events",
                    "must be absent, or hold several events and start with `dependent_event`",
                ));
            }
            for (i, &id) in task.dependent_events.iter().enumerate() {
                dependencies.push(self.own_event(id, &format!("dependent_events[{i}]"))?);
            }
        }
        let mut carried = SmallVec::new();
        for (i, &(id, back)) in task.carried_events.iter().enumerate() {
            carried.push((self.own_event(id, &format!("carried_events[{i}]"))?, back));
        }
        Ok(Task {
            task_type,
            variant: task.variant_id,
            first_operand,
            num_inputs,
            num_outputs,
            trigger: Some(EventId(task.trigger_event)).filter(|&e| e != EventId::INVALID),
            dependencies,
            carried,
            worker: task.worker,
            args: task.args.unwrap_or_default(),
            op: task.op_id,
        })
    }

    fn operand(&self, operand: FileOperand<'_>) -> Result<Operand, GraphFileError> {
        let Some(&tensor) = self.names.get(operand.base_ptr.as_ref()) else {
            return Err(GraphFileError::at("base_ptr", format!("there is no tensor '{}'", operand.base_ptr)));
        };
        let dtype = self.tensors[tensor as usize].dtype;
        if operand.data_type != dtype {
            return Err(GraphFileError::at(
                "data_type",
                format!("is {}, but '{}' is {dtype}", operand.data_type, operand.base_ptr),
            ));
        }
        let given = FileView { offset: operand.offset, dims: operand.dims, strides: operand.strides };
        let (view, given) = match operand.view {
            Some(view) => (view, Some(given)),
            None => (given, None),
        };
        let FileView { offset, dims: view_dims, strides: view_strides } = view;
        let ndim = view_dims.len();
        if ndim > MAX_DIMS || view_strides.len() != ndim {
            return Err(GraphFileError::at(
                "dims",
                format!("expected at most {MAX_DIMS} dimensions, each with a stride"),
            ));
        }
        if operand.region.len() > MAX_DIMS {
            return Err(GraphFileError::at("region", format!("has more than {MAX_DIMS} dimensions")));
        }
        let (mut dims, mut strides) = ([1; MAX_DIMS], [1; MAX_DIMS]);
        dims[..ndim].copy_from_slice(&view_dims);
        strides[..ndim].copy_from_slice(&view_strides);
        let mut region = Region::whole(&[]);
        for (d, &[lo, hi]) in operand.region.iter().enumerate() {
            (region.lo[d], region.hi[d]) = (lo, hi);
        }
        let place = match operand.place {
            None => Place::Own,
            Some(FilePlace::Peer(peer)) => Place::Peer(peer),
            Some(FilePlace::All) => Place::All,
        };
        let operand =
            Operand { tensor, offset, dims, strides, ndim: ndim as u8, place, region, trust: operand.trust };
        if given.is_some() && given != touched(&self.tensors[tensor as usize], &operand) {
            let problem = "`offset`, `dims` and `strides` beside a `view` must be those of the region";
            return Err(GraphFileError::at("view", problem));
        }
        Ok(operand)
    }
}
