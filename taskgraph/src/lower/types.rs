//! Types that the steps of lowering share.

use crate::collective::Send;
use crate::dtype::DType;
use crate::op_graph::{Role, Rows, Tensor};
use crate::region::MAX_DIMS;
use crate::split::Sharding;
use crate::task_graph::Space;
use crate::task_type::{ExpansionOperand, TaskSpec, TaskType, TensorType};
use std::sync::Arc;

/// No part: the slot has no tasks on this rank.
pub(crate) const NONE: u32 = u32::MAX;

/// Events below this are the same in every graph: termination, begin, end.
pub(crate) const FIRST_EVENT: u32 = 3;
/// If ranks end the iteration together, the event that peers trigger when they are done.
pub(crate) const CLOSING_EVENT: u32 = FIRST_EVENT;

/// Local dimensions of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub(crate) struct Dims {
    pub n: u8,
    pub d: [u32; MAX_DIMS],
}

impl Dims {
    pub fn new(dims: &[u64]) -> Self {
        let mut d = [1; MAX_DIMS];
        for (to, &from) in d.iter_mut().zip(dims) {
            *to = from as u32;
        }
        Dims { n: dims.len() as u8, d }
    }
    pub fn as_slice(&self) -> &[u32] {
        &self.d[..self.n as usize]
    }
    pub fn volume(&self) -> u64 {
        self.as_slice().iter().map(|&d| u64::from(d)).product()
    }
}

/// A tensor of the plan: those of the op graph first (same numbers), then buffers and temporaries.
#[derive(Clone, Debug)]
pub(crate) struct PlanTensor {
    pub name: String,
    pub dtype: DType,
    pub rows: Rows,
    /// Its index in the op graph, if it is one of its tensors.
    pub source: Option<u32>,
    /// Written by slots of this graph, and may share memory with other tensors.
    pub activation: bool,
    pub space: Space,
    pub output: bool,
    /// Present if it is this rank's block of another tensor: (tensor, dimension, first index for each rank).
    pub alias: Option<(u32, usize, Vec<u32>)>,
    /// Local dimensions on each rank.
    pub dims: Vec<Dims>,
    /// A weight whose rows lie in pairs.
    pub paired: bool,
    /// Index space of regions, if it differs from the dimensions.
    pub region_dims: Option<Dims>,
}

impl PlanTensor {
    /// A tensor of the op graph, its number there being `index`.
    pub fn new(index: usize, tensor: &Tensor, world: u32) -> Self {
        let region_dims = match &tensor.role {
            Role::Persistent { region_dims: Some(dims) } => Some(Dims::new(dims)),
            _ => None,
        };
        let dims = if tensor.sharding == Sharding::Replicated || tensor.sharding == Sharding::Partial {
            vec![Dims::new(&tensor.dims); world as usize]
        } else {
            (0..world).map(|r| Dims::new(&tensor.sharding.local_dims(&tensor.dims, r, world))).collect()
        };
        PlanTensor {
            name: tensor.name.clone(),
            dtype: tensor.dtype,
            rows: tensor.rows,
            source: Some(index as u32),
            activation: tensor.role == Role::Activation,
            space: Space::Device,
            output: tensor.output,
            alias: None,
            dims,
            paired: false,
            region_dims,
        }
    }
}

/// The sends of one operator between ranks.
#[derive(Clone, Debug)]
pub(crate) struct PlanExchange {
    /// The table. Operators that look the same share it.
    pub table: Arc<Table>,
    /// The tensor in which what peers send arrives.
    pub target: u32,
    /// For each rank, the index of the first event that peers trigger there for this exchange.
    pub first_event: Vec<u32>,
    /// The slot of the copies or stores of an earlier exchange. Present if all of those are known to be done once this exchange has
    /// arrived and the slot before its copies is done.
    pub completes: Option<u32>,
    /// [`Exchange::beside_producer`](crate::collective::Exchange::beside_producer).
    pub beside_producer: bool,
}

/// Which rank sends what to which.
#[derive(Debug)]
pub(crate) struct Table {
    /// The sends of each rank, in the order of its copy tasks.
    pub sends: Vec<Vec<Send>>,
    /// The numbers of triggers of each rank's events.
    pub triggers: Vec<Vec<u32>>,
    /// True if every rank has an event, and every event gets a send from every other rank.
    pub from_all: bool,
    /// True if a rank sends the same data to all peers.
    pub to_all: bool,
    /// True if every rank has one event.
    pub one_event: bool,
}

/// The kind of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotKind {
    /// Tasks of a registered type. `push` is the output that is pushed to every rank, if there is one.
    Compute { push: Option<u8> },
    /// Tasks of a collective on its own rank (sums, local copies).
    Collective,
    /// Copies to peers. The next slot is their arrival.
    Copy { exchange: u32 },
    /// Tasks of a registered type that write their only output into the memory of peers. The next slot is their arrival.
    Store { exchange: u32 },
    /// The data that peers write on this rank with copies or stores, without tasks. Its "tasks" are the events that these trigger.
    Arrive { exchange: u32 },
}

impl SlotKind {
    /// The exchange of which this slot's tasks are the sends.
    pub fn sends(self) -> Option<u32> {
        match self {
            SlotKind::Copy { exchange } | SlotKind::Store { exchange } => Some(exchange),
            _ => None,
        }
    }
}

/// One step of every rank.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    /// Index of the name of its operator.
    pub op: u32,
    pub kind: SlotKind,
    pub inputs: Vec<u32>,
    pub outputs: Vec<u32>,
}

/// The tasks of a slot on some rank.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Part {
    pub type_name: String,
    pub params: Vec<u32>,
    /// The parameter that becomes the rank's own number, so that ranks can share the part.
    pub rank_param: Option<usize>,
    /// The input whose views get an additional first dimension of size 1.
    pub stacked: Option<u8>,
    pub scratch_bytes: u32,
    pub tasks: Vec<TaskSpec>,
}

/// One task type's share of an operator, on one rank.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub task_type: Arc<dyn TaskType>,
    pub suffix: &'static str,
    pub inputs: Vec<ExpansionOperand>,
    pub outputs: Vec<ExpansionOperand>,
    /// One task may do it together with the sum of the rows that it reads ([`TaskType::joins_sum`]).
    pub joins_sum: bool,
    /// Its tasks may do that ([`TaskType::sums_rows`]).
    pub sums_rows: bool,
    /// The output that its tasks can write into a peer's memory ([`TaskType::peer_output`]).
    pub stores: Option<usize>,
    /// Index in the parts, or [`NONE`] if there is nothing to do.
    pub part: u32,
}

/// An operator on one rank: its steps, and the temporaries between them.
#[derive(Clone, Debug)]
pub(crate) struct LocalClass {
    pub temporaries: Vec<(&'static str, TensorType)>,
    pub steps: Vec<Step>,
    /// The step that each rank carries out for its own rows only.
    pub own: Option<OwnStep>,
}

/// The step of an operator that each rank carries out for its own rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OwnStep {
    pub step: usize,
    /// The input of the operator of which each rank has its own rows.
    pub input: usize,
    /// The temporary that the step writes.
    pub temporary: usize,
    /// The indices of the temporary's first dimension that stand for [`OWNED_ROWS`](crate::collective::OWNED_ROWS) rows.
    pub block: u32,
}
