//! What one rank executes: tasks, events, tensors and, for static placement, each worker's list.

use crate::dtype::DType;
use crate::ids::EventId;
use crate::op_graph::{Capacity, Role};
use crate::region::{MAX_DIMS, Region};
use crate::target::Backend;
use crate::trust::Trust;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::ops::Range;

/// Names of the task types that the protocol itself knows.
pub mod core_types {
    /// Task 0: ends the kernel.
    pub const TERMINATE: &str = "terminate";
    /// Task 1: begins the graph.
    pub const BEGIN_TASK_GRAPH: &str = "begin_task_graph";
    /// Fans events in and out.
    pub const EMPTY: &str = "empty";
    /// Copies a region to a peer and signals the peer's event.
    pub const NVSHMEM_COPY: &str = "nvshmem_copy";
    /// Signals a peer's event, no data.
    pub const NVSHMEM_SIGNAL: &str = "nvshmem_signal";
    /// Sums the ranks' partial tiles in rank order, and adds the residual once.
    pub const REDUCE: &str = "reduce";

    /// All of them, in the order of the ABI's numbers.
    pub const ALL: [&str; 6] = [TERMINATE, BEGIN_TASK_GRAPH, EMPTY, NVSHMEM_COPY, NVSHMEM_SIGNAL, REDUCE];
}

/// Who decides where a task runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// The builder: each worker has its list, tasks poll what they depend on.
    #[default]
    Static,
    /// Schedulers, at run time.
    Dynamic,
}

/// How an allreduce is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Allreduce {
    /// By payload size and target.
    #[default]
    Auto,
    /// Copy with signal to every peer, then reduce.
    CopyReduce,
    /// Flagged push by the producer, polled by the reduce.
    OneShot,
    /// Each tile is reduced by one rank, which copies the sum to the others.
    TwoShot,
    /// Over nodes: a sum within each node, an exchange of the nodes' sums, and the result spread within each node.
    Hierarchical,
}

/// Memory that a tensor lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Space {
    /// The rank's own memory.
    Device,
    /// The symmetric heap: same offset on every rank.
    Symmetric,
}

/// A piece of memory in which tensors may lie over each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Area {
    /// The rank's own memory, one area for all graphs.
    Device,
    /// Symmetric, one area for all graphs: what every rank is done with before any rank ends the iteration.
    Settled,
    /// Symmetric, one area for all graphs: what peers write only after every rank has begun the iteration.
    Awaited,
    /// Symmetric, of one graph: flagged words. Their tags tell the writes of one graph apart; another graph may not run
    /// for so long that a tag comes round.
    Flagged,
}

impl Area {
    /// All graphs of a model have it together.
    pub fn is_shared(self) -> bool {
        self != Area::Flagged
    }

    /// All areas.
    pub const ALL: [Area; 4] = [Area::Device, Area::Settled, Area::Awaited, Area::Flagged];

    /// The memory that the area is part of.
    pub fn space(self) -> Space {
        match self {
            Area::Device => Space::Device,
            Area::Settled | Area::Awaited | Area::Flagged => Space::Symmetric,
        }
    }
}

/// Where a tensor lies that shares its memory with others, of its own graph and of those that follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Overlay {
    /// In which area.
    pub area: Area,
    /// Bytes from the area's start to the tensor's.
    pub offset: u64,
}

/// What an event does when it is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EventType {
    /// Polled by tasks.
    Empty,
    /// Its scheduler queues the tasks of its range.
    LaunchTasks,
    /// The same; the local schedulers may share out the tasks.
    LaunchMassiveTasks,
    /// Event 1: starts everything that waits for nothing else.
    LaunchDependentTasks,
    /// The iteration is done.
    EndOfTaskGraph,
    /// The kernel ends.
    Termination,
}

/// Where a weight's values come from: one piece of the local tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalPart {
    /// Name in the checkpoint.
    pub source: String,
    /// Global dimensions there.
    pub dims: Vec<u64>,
    /// Dimension that is dealt to the ranks, and the indices of it that this rank holds; `None`: all.
    pub range: Option<(usize, Range<u64>)>,
}

/// A tensor of one rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorEntry {
    /// Unique in the graph; weights, constants and persistent tensors have the same name in every graph.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// The rank's own dimensions.
    pub dims: Vec<u32>,
    /// In elements.
    pub strides: Vec<u32>,
    /// Memory.
    pub space: Space,
    /// Size, padding included.
    pub bytes: u64,
    /// What it is for.
    pub role: Role,
    /// Of a weight: where its values come from, in order along dimension 0.
    pub parts: Vec<LocalPart>,
    /// Index space of regions; `dims` unless the role names another.
    pub region_dims: Vec<u32>,
    /// Packed in tiles of 16 rows, in the order that [`TaskGraph::backend`] reads: constant matrices.
    pub tiled: bool,
    /// The user wants its value.
    pub output: bool,
    /// What the first dimension counts, for the host that reads an output.
    pub rows: crate::op_graph::Rows,
    /// Where it lies over other tensors; `None`: in memory of its own.
    pub overlay: Option<Overlay>,
}

/// Whose memory an operand lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Place {
    /// The rank's own.
    Own,
    /// One peer's (outputs of a copy).
    Peer(u16),
    /// Every rank's, the own included (a flagged push).
    All,
}

/// What a task reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// Index in [`TaskGraph::tensors`].
    pub tensor: u32,
    /// Bytes from the tensor's start to the view's.
    pub offset: u64,
    /// Dimensions of the view; the first `ndim` count.
    pub dims: [u32; MAX_DIMS],
    /// In elements.
    pub strides: [u32; MAX_DIMS],
    /// Dimensions in use.
    pub ndim: u8,
    /// Whose memory.
    pub place: Place,
    /// What is touched, in the tensor's region space. Without a trust it is what the view covers.
    pub region: Region,
    /// The bytes are known at run time only: what `region` then stands for.
    pub trust: Option<Trust>,
}

/// A task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// Index in [`TaskGraph::type_names`].
    pub task_type: u16,
    /// Index in [`TaskGraph::variants`].
    pub variant: u16,
    /// Index in [`TaskGraph::operands`] of the first input; outputs follow the inputs.
    pub first_operand: u32,
    /// Number of inputs.
    pub num_inputs: u16,
    /// Number of outputs.
    pub num_outputs: u16,
    /// The event that it triggers.
    pub trigger: Option<EventId>,
    /// Events of this iteration that it waits for (indices; its own rank's).
    pub dependencies: SmallVec<[u32; 2]>,
    /// Events of earlier iterations that it waits for: (index, epochs back).
    pub carried: SmallVec<[(u32, u32); 0]>,
    /// Static placement: its worker.
    pub worker: Option<u32>,
    /// Constants of this one task.
    pub args: [i32; 8],
    /// Index in [`TaskGraph::ops`].
    pub op: u32,
}

/// An event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Event {
    /// What it does.
    pub event_type: EventType,
    /// Triggers of one iteration, from all ranks.
    pub num_triggers: u32,
    /// First of the tasks that it launches.
    pub first_task: u32,
    /// One past the last.
    pub last_task: u32,
    /// Other ranks trigger it.
    pub remote: bool,
}

/// One specialised implementation of a task type.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    /// Index in [`TaskGraph::type_names`].
    pub task_type: u16,
    /// Parameters, as words.
    pub params: Vec<u32>,
    /// Scratch memory of a worker, bytes.
    pub scratch_bytes: u32,
}

/// What one rank executes in one iteration.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskGraph {
    /// Name of the op graph.
    pub name: String,
    /// This rank.
    pub rank: u32,
    /// Number of ranks.
    pub world: u32,
    /// Who places tasks.
    pub placement: Placement,
    /// The kind of machine that it is for; it fixes the order of values inside packed matrices.
    pub backend: Backend,
    /// Workers that it was built for.
    pub workers: u32,
    /// What an iteration has room for.
    pub capacity: Capacity,
    /// Task type names in use; index 0..=5 are those of [`core_types`] in the order of the ABI's numbers.
    pub type_names: Vec<String>,
    /// Names of the operators, for the timeline.
    pub ops: Vec<String>,
    /// All tensors.
    pub tensors: Vec<TensorEntry>,
    /// All variants.
    pub variants: Vec<Variant>,
    /// Operands of all tasks.
    pub operands: Vec<Operand>,
    /// All tasks; 0 terminates, 1 begins.
    pub tasks: Vec<Task>,
    /// All events; 0 termination, 1 begin, 2 end of graph.
    pub events: Vec<Event>,
    /// Static placement: each worker's tasks in order.
    pub worker_lists: Vec<Vec<u32>>,
}

impl TaskGraph {
    /// For each tensor its number among the flagged ones. A word of it carries epoch x flagged tensors + number, so that
    /// no two writes of a word have the same tag, whatever lies over what.
    pub fn flag_numbers(&self) -> Vec<Option<u32>> {
        let mut next = 0..;
        self.tensors.iter().map(|t| if t.dtype == DType::F32Flagged { next.next() } else { None }).collect()
    }

    /// Bytes of an area that the tensors of this graph take.
    pub fn area_bytes(&self, area: Area) -> u64 {
        let end = |t: &TensorEntry| {
            t.overlay.filter(|o| o.area == area).map_or(0, |o| o.offset.saturating_add(t.bytes))
        };
        self.tensors.iter().map(end).max().unwrap_or(0)
    }

    /// Inputs of a task.
    pub fn inputs(&self, task: &Task) -> &[Operand] {
        let first = task.first_operand as usize;
        &self.operands[first..first + task.num_inputs as usize]
    }
    /// Outputs of a task.
    pub fn outputs(&self, task: &Task) -> &[Operand] {
        let first = task.first_operand as usize + task.num_inputs as usize;
        &self.operands[first..first + task.num_outputs as usize]
    }
    /// Name of a task's type.
    pub fn type_name(&self, task: &Task) -> &str {
        &self.type_names[task.task_type as usize]
    }
    /// Name of the operator that a task came from.
    pub fn op_name(&self, task: &Task) -> &str {
        self.ops.get(task.op as usize).map_or("", String::as_str)
    }
}
