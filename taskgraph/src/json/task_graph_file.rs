//! The format of `task_graph.json`.

use crate::dtype::DType;
use crate::op_graph::{Capacity, Role, Rows};
use crate::target::Backend;
use crate::task_graph::{EventType, Overlay, Placement, Space};
use crate::trust::Trust;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// The value of `schema` in a task graph file.
pub const TASK_GRAPH_SCHEMA: &str = "mpk-task-graph/1";

/// The tasks that one rank executes in one iteration.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "task_graph.json")]
pub(super) struct FileGraph<'a> {
    /// `mpk-task-graph/1`.
    pub(super) schema: Cow<'a, str>,
    /// Name of the graph, e.g. `decode-8`.
    pub(super) name: String,
    /// This rank.
    pub(super) rank: u32,
    /// Number of ranks.
    pub(super) world: u32,
    /// What decides where tasks run.
    pub(super) placement: Placement,
    /// The kind of machine that it is built for. It determines the order of values inside packed matrices.
    #[serde(default)]
    pub(super) backend: Backend,
    /// Number of workers that the graph was built for.
    pub(super) workers: u32,
    /// The capacity of an iteration.
    pub(super) capacity: Capacity,
    /// Names of the task types in use. The first six are those of the protocol.
    pub(super) task_types: Vec<String>,
    /// Names of the operators.
    pub(super) ops: Vec<String>,
    /// All tensors of the rank.
    #[serde(borrow)]
    pub(super) tensors: Vec<FileTensor<'a>>,
    /// Specialised implementations of task types.
    #[serde(borrow)]
    pub(super) variants: Vec<FileVariant<'a>>,
    /// All tasks by index. Task 0 terminates, task 1 begins.
    #[serde(borrow)]
    pub(super) all_tasks: Vec<FileTask<'a>>,
    /// All events by index: 0 is termination, 1 begin, 2 end of graph.
    pub(super) all_events: Vec<FileEvent>,
    /// The task that starts an iteration: the one that triggers event 1.
    pub(super) first_tasks: Vec<u32>,
    /// Static placement: the tasks of each worker, in order.
    pub(super) worker_lists: Vec<Vec<u32>>,
}

/// A tensor of the rank.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct FileTensor<'a> {
    /// Unique in the graph.
    pub(super) name: Cow<'a, str>,
    /// Element type.
    pub(super) dtype: DType,
    /// The rank's own dimensions.
    pub(super) dims: Vec<u32>,
    /// In elements.
    pub(super) strides: Vec<u32>,
    /// The rank's own memory, or the symmetric heap.
    pub(super) space: Space,
    /// Size in bytes, including padding.
    pub(super) bytes: u64,
    /// Its purpose.
    pub(super) role: Role,
    /// For a weight: the sources of its values, in order along dimension 0.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) parts: Vec<FilePart>,
    /// Index space of the operands' regions.
    pub(super) region_dims: Vec<u32>,
    /// Packed in tiles of 16 rows.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) tiled: bool,
    /// The rows of its two halves alternate, 8 by 8. Regions count rows in this order.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) paired: bool,
    /// The user wants its value.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) output: bool,
    /// What the first dimension counts.
    pub(super) rows: Rows,
    /// Its place among tensors that share memory. Absent if it has its own memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) overlay: Option<Overlay>,
}

/// One part of a weight.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct FilePart {
    /// Name in the checkpoint.
    pub(super) source: String,
    /// Global dimensions in the checkpoint.
    pub(super) dims: Vec<u64>,
    /// The dimension that is split over the ranks. Absent if this rank holds all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) dim: Option<usize>,
    /// Indices `[first, one past the last]` of that dimension that this rank holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) range: Option<[u64; 2]>,
}

/// One specialised implementation of a task type.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct FileVariant<'a> {
    /// Name of the task type.
    pub(super) task_type: Cow<'a, str>,
    /// Parameters, as words.
    pub(super) params: Vec<u32>,
    /// Scratch memory per worker, in bytes.
    pub(super) scratch_bytes: u32,
}

/// A view of a tensor.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct FileOperand<'a> {
    /// Name of the tensor.
    pub(super) base_ptr: Cow<'a, str>,
    /// Offset in bytes from the start of the tensor to the accessed part.
    pub(super) offset: u64,
    /// Dimensions of the accessed part.
    pub(super) dims: Vec<u32>,
    /// In elements.
    pub(super) strides: Vec<u32>,
    /// Element type, the same as the tensor's.
    pub(super) data_type: DType,
    /// `[first, one past the last]` accessed index in each dimension of the tensor's region space.
    pub(super) region: Vec<[u32; 2]>,
    /// What the region stands for, if the bytes are known only at run time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) trust: Option<Trust>,
    /// The rank whose memory it is in, or `"all"`. Absent: this rank's own memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) place: Option<FilePlace>,
    /// The kernel's view, if it is larger than the accessed part. The rows of a slot are known only at run time, so its tasks see
    /// all rows, and the rows above are the share that stands for the slot's rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) view: Option<FileView>,
}

/// A strided view into a tensor.
#[derive(Serialize, Deserialize, JsonSchema, PartialEq)]
#[serde(deny_unknown_fields)]
pub(super) struct FileView {
    /// Offset in bytes from the start of the tensor.
    pub(super) offset: u64,
    /// Dimensions.
    pub(super) dims: Vec<u32>,
    /// In elements.
    pub(super) strides: Vec<u32>,
}

/// Memory other than the rank's own.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum FilePlace {
    /// The memory of that rank.
    Peer(u16),
    /// The memory of every rank, including its own.
    All,
}

/// A task.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct FileTask<'a> {
    /// Name of its type.
    pub(super) task_type: Cow<'a, str>,
    /// Index in `variants`.
    pub(super) variant_id: u16,
    /// Index in `ops` of its operator.
    pub(super) op_id: u32,
    /// What it reads.
    #[serde(borrow)]
    pub(super) inputs: Vec<FileOperand<'a>>,
    /// What it writes.
    #[serde(borrow)]
    pub(super) outputs: Vec<FileOperand<'a>>,
    /// Index of its first operand in the builder's list of all operands, if that list is not in the order of the tasks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) operand_id: Option<u32>,
    /// EventId that it triggers: tag in bits 63..48 (1: NVSHMEM), owner in 47..32, index in 31..0. All ones: none.
    pub(super) trigger_event: u64,
    /// The first EventId that it waits for, of the same iteration.
    #[schemars(required, extend("type" = ["integer", "null"]))]
    #[serde(deserialize_with = "present")]
    pub(super) dependent_event: Option<u64>,
    /// All events of this iteration that it waits for, in order, if there is more than one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) dependent_events: Vec<u64>,
    /// Events of earlier iterations that it waits for: pairs of EventId and number of epochs back.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) carried_events: Vec<(u64, u32)>,
    /// Static placement: the worker that runs it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) worker: Option<u32>,
    /// Constants of this particular task. Absent: all zero.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) args: Option<[i32; 8]>,
}

/// A field that may be null, but not absent.
fn present<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    Option::deserialize(deserializer)
}

/// An event.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct FileEvent {
    /// What happens when it is ready.
    pub(super) event_type: EventType,
    /// Number of triggers per iteration, from all ranks.
    pub(super) num_triggers: u32,
    /// First task that it launches.
    pub(super) first_task_id: u32,
    /// One past the last task that it launches.
    pub(super) last_task_id: u32,
    /// True if other ranks trigger it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) remote: bool,
}

/// JSON schema of `task_graph.json`.
pub fn task_graph_schema() -> schemars::Schema {
    schemars::schema_for!(FileGraph<'static>)
}
