//! Writing and reading `task_graph.json`.

use super::error::GraphFileError;
use super::task_graph_file::{
    FileEvent, FileGraph, FileOperand, FilePart, FilePlace, FileTask, FileTensor, FileVariant, FileView,
    TASK_GRAPH_SCHEMA,
};
use crate::ids::{EventId, TaskId};
use crate::region::{MAX_DIMS, Region};
use crate::task_graph::{Event, LocalPart, Operand, Place, Task, TaskGraph, TensorEntry, Variant};
use crate::words::counted;
use serde::Serialize;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::io::{BufWriter, Read, Write};

/// The text of `task_graph.json`.
pub fn to_json(graph: &TaskGraph) -> String {
    let mut bytes = Vec::new();
    // Writing to memory does not fail.
    let _ = write_json(graph, &mut bytes);
    String::from_utf8(bytes).unwrap_or_default()
}

/// Writes `task_graph.json`, with one task, event, tensor or variant per line.
///
/// # Errors
/// Those of the writer; or an operand, task or variant refers to something that the graph does not have.
pub fn write_json(graph: &TaskGraph, writer: impl Write) -> std::io::Result<()> {
    let mut writer = BufWriter::with_capacity(1 << 16, writer);
    let w = &mut writer;
    write!(w, "{{\n\"schema\":\"{TASK_GRAPH_SCHEMA}\"")?;
    field(w, "name", &graph.name)?;
    field(w, "rank", &graph.rank)?;
    field(w, "world", &graph.world)?;
    field(w, "placement", &graph.placement)?;
    field(w, "backend", &graph.backend)?;
    field(w, "workers", &graph.workers)?;
    field(w, "capacity", &graph.capacity)?;
    field(w, "task_types", &graph.type_names)?;
    lines(w, "ops", graph.ops.iter().map(Ok))?;
    lines(w, "tensors", graph.tensors.iter().map(|t| Ok(tensor_to_file(t))))?;
    lines(w, "variants", graph.variants.iter().map(|v| variant_to_file(graph, v)))?;
    let mut next_operand = 0;
    lines(w, "all_tasks", graph.tasks.iter().map(|t| task_to_file(graph, t, &mut next_operand)))?;
    lines(w, "all_events", graph.events.iter().map(|e| Ok(event_to_file(e))))?;
    field(w, "first_tasks", &[TaskId::BEGIN])?;
    lines(w, "worker_lists", graph.worker_lists.iter().map(Ok))?;
    w.write_all(b"\n}\n")?;
    w.flush()
}

fn field(w: &mut impl Write, name: &str, value: &impl Serialize) -> std::io::Result<()> {
    write!(w, ",\n\"{name}\":")?;
    Ok(serde_json::to_writer(w, value)?)
}

fn lines<T: Serialize>(
    w: &mut impl Write,
    name: &str,
    items: impl Iterator<Item = std::io::Result<T>>,
) -> std::io::Result<()> {
    write!(w, ",\n\"{name}\":[")?;
    for (i, item) in items.enumerate() {
        w.write_all(if i == 0 { b"\n" } else { b",\n" })?;
        serde_json::to_writer(&mut *w, &item?)?;
    }
    w.write_all(b"]")
}

fn missing(what: &str) -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::InvalidInput, format!("{what} does not exist in the graph"))
}

fn tensor_to_file(tensor: &TensorEntry) -> FileTensor<'_> {
    let part = |p: &LocalPart| FilePart {
        source: p.source.clone(),
        dims: p.dims.clone(),
        dim: p.range.as_ref().map(|(dim, _)| *dim),
        range: p.range.as_ref().map(|(_, range)| [range.start, range.end]),
    };
    FileTensor {
        name: tensor.name.as_str().into(),
        dtype: tensor.dtype,
        dims: tensor.dims.clone(),
        strides: tensor.strides.clone(),
        space: tensor.space,
        bytes: tensor.bytes,
        role: tensor.role.clone(),
        parts: tensor.parts.iter().map(part).collect(),
        region_dims: tensor.region_dims.clone(),
        tiled: tensor.tiled,
        output: tensor.output,
        rows: tensor.rows,
        overlay: tensor.overlay,
    }
}

fn type_name(graph: &TaskGraph, task_type: u16) -> std::io::Result<&str> {
    graph.type_names.get(usize::from(task_type)).map(String::as_str).ok_or_else(|| missing("a task type"))
}

fn variant_to_file<'g>(graph: &'g TaskGraph, variant: &Variant) -> std::io::Result<FileVariant<'g>> {
    Ok(FileVariant {
        task_type: type_name(graph, variant.task_type)?.into(),
        params: variant.params.clone(),
        scratch_bytes: variant.scratch_bytes,
    })
}

fn operand_to_file<'g>(graph: &'g TaskGraph, operand: &Operand) -> std::io::Result<FileOperand<'g>> {
    let tensor = graph.tensors.get(operand.tensor as usize).ok_or_else(|| missing("a tensor"))?;
    let ndim = usize::from(operand.ndim).min(MAX_DIMS);
    let region = &operand.region;
    let used = (0..MAX_DIMS).rev().find(|&d| (region.lo[d], region.hi[d]) != (0, 1)).map_or(0, |d| d + 1);
    let used = used.max(tensor.region_dims.len().min(MAX_DIMS));
    let view = FileView {
        offset: operand.offset,
        dims: operand.dims[..ndim].to_vec(),
        strides: operand.strides[..ndim].to_vec(),
    };
    let (touched, view) = match touched(tensor, operand) {
        Some(touched) => (touched, Some(view)),
        None => (view, None),
    };
    Ok(FileOperand {
        base_ptr: tensor.name.as_str().into(),
        offset: touched.offset,
        dims: touched.dims,
        strides: touched.strides,
        view,
        data_type: tensor.dtype,
        region: (0..used).map(|d| [region.lo[d], region.hi[d]]).collect(),
        trust: operand.trust,
        place: match operand.place {
            Place::Own => None,
            Place::Peer(peer) => Some(FilePlace::Peer(peer)),
            Place::All => Some(FilePlace::All),
        },
    })
}

/// The region that an operand accesses, if its view is the whole tensor but its region is smaller.
fn touched(tensor: &TensorEntry, operand: &Operand) -> Option<FileView> {
    let ndim = tensor.dims.len();
    let region = &operand.region;
    let sees_all = operand.offset == 0
        && usize::from(operand.ndim) == ndim
        && operand.dims.get(..ndim) == Some(&tensor.dims[..])
        && operand.strides.get(..ndim) == Some(&tensor.strides[..]);
    let whole = Region::whole(&tensor.dims);
    if !sees_all
        || tensor.tiled
        || tensor.region_dims != tensor.dims
        || *region == whole
        || !whole.contains(region)
    {
        return None;
    }
    let first: u64 = (0..ndim).map(|d| u64::from(region.lo[d]) * u64::from(tensor.strides[d])).sum();
    Some(FileView {
        offset: first * tensor.dtype.size(),
        dims: (0..ndim).map(|d| region.hi[d].saturating_sub(region.lo[d])).collect(),
        strides: tensor.strides.clone(),
    })
}

fn task_to_file<'g>(
    graph: &'g TaskGraph,
    task: &Task,
    next_operand: &mut u32,
) -> std::io::Result<FileTask<'g>> {
    let first = task.first_operand as usize;
    let count = u32::from(task.num_inputs) + u32::from(task.num_outputs);
    let in_order = task.first_operand == if count == 0 { 0 } else { *next_operand };
    *next_operand += count;
    let (inputs, outputs) = (usize::from(task.num_inputs), usize::from(task.num_outputs));
    let operands =
        graph.operands.get(first..first + inputs + outputs).ok_or_else(|| missing("an operand"))?;
    let own = |index: u32| match graph.events.get(index as usize) {
        Some(event) if event.remote => Ok(EventId::nvshmem(graph.rank as u16, index).0),
        Some(_) => Ok(EventId::local(graph.rank as u16, index).0),
        None => Err(missing("an event")),
    };
    let dependencies = task.dependencies.iter().map(|&e| own(e)).collect::<Result<Vec<u64>, _>>()?;
    let carried = task.carried.iter().map(|&(e, back)| Ok((own(e)?, back)));
    let files = operands.iter().map(|o| operand_to_file(graph, o)).collect::<Result<Vec<_>, _>>()?;
    let mut inputs_to_file = files;
    let outputs_to_file = inputs_to_file.split_off(inputs);
    Ok(FileTask {
        task_type: type_name(graph, task.task_type)?.into(),
        variant_id: task.variant,
        op_id: task.op,
        inputs: inputs_to_file,
        outputs: outputs_to_file,
        operand_id: (!in_order).then_some(task.first_operand),
        trigger_event: task.trigger.unwrap_or(EventId::INVALID).0,
        dependent_event: dependencies.first().copied(),
        dependent_events: if dependencies.len() > 1 { dependencies } else { Vec::new() },
        carried_events: carried.collect::<std::io::Result<_>>()?,
        worker: task.worker,
        args: (task.args != [0; 8]).then_some(task.args),
    })
}

fn event_to_file(event: &Event) -> FileEvent {
    FileEvent {
        event_type: event.event_type,
        num_triggers: event.num_triggers,
        first_task_id: event.first_task,
        last_task_id: event.last_task,
        remote: event.remote,
    }
}

/// Reads `task_graph.json`. A file that [`write_json`] wrote for a built graph is read back without loss: in a built graph every
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
