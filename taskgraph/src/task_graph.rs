//! The task graph of one rank: tasks, events, tensors and, for static placement, the list of each worker.

use crate::dtype::DType;
use crate::ids::EventId;
use crate::op_graph::{Capacity, Role};
use crate::region::{MAX_DIMS, Region};
use crate::target::Backend;
use crate::trust::Trust;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::fmt;
use std::ops::Range;

/// Names of the task types that the protocol knows.
pub mod core_types {
    /// Task 0: ends the kernel.
    pub const TERMINATE: &str = "terminate";
    /// Task 1: begins the graph.
    pub const BEGIN_TASK_GRAPH: &str = "begin_task_graph";
    /// Fans events in and out.
    pub const EMPTY: &str = "empty";
    /// Copies a region to a peer and signals the peer's event.
    pub const NVSHMEM_COPY: &str = "nvshmem_copy";
    /// Signals a peer's event, without data.
    pub const NVSHMEM_SIGNAL: &str = "nvshmem_signal";
    /// Sums the ranks' partial tiles in rank order, and adds the residual once.
    pub const REDUCE: &str = "reduce";

    /// All of these, in the order of the ABI's numbers.
    pub const ALL: [&str; 6] = [TERMINATE, BEGIN_TASK_GRAPH, EMPTY, NVSHMEM_COPY, NVSHMEM_SIGNAL, REDUCE];
}

/// Bits of the last parameter of a `reduce` task (`MPK_REDUCE_*` of the ABI).
pub mod sum_flags {
    /// The summands are flagged words.
    pub const FLAGGED: u32 = 1;
    /// A residual is added.
    pub const RESIDUAL: u32 = 2;
    /// The same task computes something from the sum. The parameters and operands for that follow
    /// ([`crate::TaskType::joins_sum`]).
    pub const FOLLOWED: u32 = 4;
}

/// What decides where a task runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// The builder decides: each worker has a list, and tasks poll the events that they depend on.
    #[default]
    Static,
    /// Schedulers decide at run time.
    Dynamic,
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Placement::Static => "static",
            Placement::Dynamic => "dynamic",
        })
    }
}

/// How an allreduce is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Allreduce {
    /// By payload size and target.
    #[default]
    Auto,
    /// Copies with a signal to every peer, then a reduce.
    CopyReduce,
    /// The producer pushes flagged words, and the reduce polls them.
    OneShot,
    /// Each tile is reduced by one rank, which copies the sum to the others.
    TwoShot,
    /// For several nodes: reduce within each node, exchange between nodes, broadcast within each node.
    Hierarchical,
}

/// The memory of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Space {
    /// The rank's own memory.
    Device,
    /// The symmetric heap: same offset on every rank.
    Symmetric,
}

impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Space::Device => "device",
            Space::Symmetric => "symmetric",
        })
    }
}

/// A block of memory in which tensors may overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Area {
    /// In the rank's own memory. One area for all graphs.
    Device,
    /// Symmetric, one area for all graphs. Every rank is done with these tensors before any rank ends the iteration.
    Settled,
    /// Symmetric, one area for all graphs. Peers write these tensors only after every rank has begun the iteration.
    Awaited,
    /// Symmetric, one area per graph, for flagged words. Their tags distinguish the writes of one graph. Another graph
    /// must not run for so long that a tag repeats.
    Flagged,
}

impl fmt::Display for Area {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Area::Device => "device",
            Area::Settled => "settled",
            Area::Awaited => "awaited",
            Area::Flagged => "flagged",
        })
    }
}

impl Area {
    /// True if all graphs of a model share the area.
    pub fn is_shared(self) -> bool {
        self != Area::Flagged
    }

    /// All areas.
    pub const ALL: [Area; 4] = [Area::Device, Area::Settled, Area::Awaited, Area::Flagged];

    /// The memory that contains the area.
    pub fn space(self) -> Space {
        match self {
            Area::Device => Space::Device,
            Area::Settled | Area::Awaited | Area::Flagged => Space::Symmetric,
        }
    }
}

/// The place of a tensor that shares its memory with others, both of its own graph and of the graphs that follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Overlay {
    /// The area.
    pub area: Area,
    /// Offset in bytes from the start of the area.
    pub offset: u64,
}

/// What happens when an event is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EventType {
    /// Nothing; tasks poll it.
    Empty,
    /// Its scheduler queues the tasks of its range.
    LaunchTasks,
    /// The same, but the local schedulers may share the tasks.
    LaunchMassiveTasks,
    /// Event 1: starts every task without other dependencies.
    LaunchDependentTasks,
    /// The iteration ends.
    EndOfTaskGraph,
    /// The kernel ends.
    Termination,
}

impl EventType {
    /// Its name in files and messages.
    pub const fn name(self) -> &'static str {
        match self {
            EventType::Empty => "empty",
            EventType::LaunchTasks => "launch_tasks",
            EventType::LaunchMassiveTasks => "launch_massive_tasks",
            EventType::LaunchDependentTasks => "launch_dependent_tasks",
            EventType::EndOfTaskGraph => "end_of_task_graph",
            EventType::Termination => "termination",
        }
    }
}

impl fmt::Display for EventType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The source of one part of a local weight.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalPart {
    /// Name in the checkpoint.
    pub source: String,
    /// Global dimensions in the checkpoint.
    pub dims: Vec<u64>,
    /// The dimension that is split over the ranks, and the indices that this rank holds. `None` means all.
    pub range: Option<(usize, Range<u64>)>,
}

/// Rows per tile of a packed matrix ([`TensorEntry::tiled`]).
pub(crate) const TILE_ROWS: u32 = 16;
/// A tile may be cut at multiples of this number of columns, whichever backend reads it. In all layouts, column c of a tile then begins
/// at its element c x [`TILE_ROWS`].
pub(crate) const TILE_COLUMNS: u32 = 16;

/// A tensor of one rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorEntry {
    /// Unique in the graph. Weights, constants and persistent tensors have the same name in every graph.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// The rank's own dimensions.
    pub dims: Vec<u32>,
    /// In elements.
    pub strides: Vec<u32>,
    /// The memory that it is in.
    pub space: Space,
    /// Size including padding.
    pub bytes: u64,
    /// Its purpose.
    pub role: Role,
    /// For a weight: the sources of its values, in order along dimension 0.
    pub parts: Vec<LocalPart>,
    /// Index space of its regions; `dims` unless the role names another.
    pub region_dims: Vec<u32>,
    /// True for constant matrices that are packed in tiles of 16 rows, in the order that [`TaskGraph::backend`] reads.
    pub tiled: bool,
    /// True for a packed matrix whose two halves alternate: [`Backend::pair_rows`] rows of the first half, then the rows of the
    /// second half that belong to them, and so on. Regions and views count rows in this order, `parts` in the order of the source.
    pub paired: bool,
    /// The user wants its value.
    pub output: bool,
    /// What the first dimension counts. The host needs it to read an output.
    pub rows: crate::op_graph::Rows,
    /// Its place among tensors that share memory. `None` if it has its own memory.
    pub overlay: Option<Overlay>,
}

/// The rank whose memory holds an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Place {
    /// The rank's own memory.
    Own,
    /// One peer's memory (for outputs of a copy, and of a task that triggers that peer's event).
    Peer(u16),
    /// The memory of every rank, including its own (for a flagged push).
    All,
}

/// A tensor view that a task reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// Index in [`TaskGraph::tensors`].
    pub tensor: u32,
    /// Offset of the view in bytes from the start of the tensor.
    pub offset: u64,
    /// Dimensions of the view. The first `ndim` are used.
    pub dims: [u32; MAX_DIMS],
    /// In elements.
    pub strides: [u32; MAX_DIMS],
    /// Number of dimensions in use.
    pub ndim: u8,
    /// The rank whose memory it is in.
    pub place: Place,
    /// The region that is accessed, in the tensor's region space. Without a trust, it is what the view covers.
    pub region: Region,
    /// Present if the bytes are known only at run time. Says what `region` stands for.
    pub trust: Option<Trust>,
}

/// A task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// Index in [`TaskGraph::type_names`].
    pub task_type: u16,
    /// Index in [`TaskGraph::variants`].
    pub variant: u16,
    /// Index in [`TaskGraph::operands`] of the first input. The outputs follow the inputs.
    pub first_operand: u32,
    /// Number of inputs.
    pub num_inputs: u16,
    /// Number of outputs.
    pub num_outputs: u16,
    /// The event that it triggers.
    pub trigger: Option<EventId>,
    /// Events of this iteration that it waits for: indices of its own rank's events.
    pub dependencies: SmallVec<[u32; 2]>,
    /// Events of earlier iterations that it waits for: (index, epochs back).
    pub carried: SmallVec<[(u32, u32); 0]>,
    /// Static placement: the worker that runs it.
    pub worker: Option<u32>,
    /// Constants of this particular task.
    pub args: [i32; 8],
    /// Index in [`TaskGraph::ops`].
    pub op: u32,
}

/// An event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Event {
    /// What happens when it is ready.
    pub event_type: EventType,
    /// Number of triggers per iteration, from all ranks.
    pub num_triggers: u32,
    /// First task that it launches.
    pub first_task: u32,
    /// One past the last task that it launches.
    pub last_task: u32,
    /// True if other ranks trigger it.
    pub remote: bool,
}

/// One specialised implementation of a task type.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    /// Index in [`TaskGraph::type_names`].
    pub task_type: u16,
    /// Parameters, as words.
    pub params: Vec<u32>,
    /// Scratch memory per worker, in bytes.
    pub scratch_bytes: u32,
}

/// The tasks that one rank executes in one iteration.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskGraph {
    /// Name of the op graph.
    pub name: String,
    /// This rank.
    pub rank: u32,
    /// Number of ranks.
    pub world: u32,
    /// What decides where tasks run.
    pub placement: Placement,
    /// The kind of machine that it is built for. It determines the order of values inside packed matrices.
    pub backend: Backend,
    /// Number of workers that it is built for.
    pub workers: u32,
    /// The capacity of an iteration.
    pub capacity: Capacity,
    /// Names of the task types in use. Indices 0 to 5 are those of [`core_types`], in the order of the ABI's numbers.
    pub type_names: Vec<String>,
    /// Names of the operators, for the timeline.
    pub ops: Vec<String>,
    /// All tensors.
    pub tensors: Vec<TensorEntry>,
    /// All variants.
    pub variants: Vec<Variant>,
    /// Operands of all tasks.
    pub operands: Vec<Operand>,
    /// All tasks. Task 0 terminates, task 1 begins.
    pub tasks: Vec<Task>,
    /// All events: 0 is termination, 1 begin, 2 end of graph.
    pub events: Vec<Event>,
    /// Static placement: the tasks of each worker, in order.
    pub worker_lists: Vec<Vec<u32>>,
}

impl TaskGraph {
    /// For each flagged tensor, its number among the flagged tensors. A word of it carries epoch x flagged tensors +
    /// number. So no two writes of a word have the same tag, however tensors overlap.
    pub fn flag_numbers(&self) -> Vec<Option<u32>> {
        let mut next = 0..;
        self.tensors.iter().map(|t| if t.dtype == DType::F32Flagged { next.next() } else { None }).collect()
    }

    /// Bytes of an area that this graph's tensors use.
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
    /// Name of the operator that a task belongs to.
    pub fn op_name(&self, task: &Task) -> &str {
        self.ops.get(task.op as usize).map_or("", String::as_str)
    }
}
