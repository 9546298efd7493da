//! Writing `task_graph.json`.

use super::task_graph_file::{
    FileEvent, FileOperand, FilePart, FilePlace, FileTask, FileTensor, FileVariant, FileView,
    TASK_GRAPH_SCHEMA,
};
use crate::ids::{EventId, TaskId};
use crate::region::{MAX_DIMS, Region};
use crate::task_graph::{Event, LocalPart, Operand, Place, Task, TaskGraph, TensorEntry, Variant};
use serde::Serialize;
use std::io::{BufWriter, Write};

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
        paired: tensor.paired,
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
pub(super) fn touched(tensor: &TensorEntry, operand: &Operand) -> Option<FileView> {
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
