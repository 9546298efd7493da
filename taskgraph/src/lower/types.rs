//! What the steps of lowering hand to each other.

use crate::collective::Send;
use crate::dtype::DType;
use crate::op_graph::Rows;
use crate::region::MAX_DIMS;
use crate::task_graph::Space;
use crate::task_type::TaskSpec;
use std::sync::Arc;

/// No part: the slot has no tasks on this rank.
pub(crate) const NONE: u32 = u32::MAX;

/// Events below are the same in every graph: termination, begin, end.
pub(crate) const FIRST_EVENT: u32 = 3;
/// Where ranks end the iteration together: the event that peers trigger when they are through.
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
    /// Number in the op graph, where it is one of its tensors.
    pub source: Option<u32>,
    /// Written by slots of this graph and free to share memory with others.
    pub activation: bool,
    pub space: Space,
    pub output: bool,
    /// It is this rank's block of another tensor: (tensor, dimension, first index for each rank).
    pub alias: Option<(u32, usize, Vec<u32>)>,
    /// Local dimensions for each rank.
    pub dims: Vec<Dims>,
    /// Index space of regions, where it differs from the dimensions.
    pub region_dims: Option<Dims>,
}

/// Sends between ranks, of one operator.
#[derive(Clone, Debug)]
pub(crate) struct PlanExchange {
    /// The table, which operators that look the same share.
    pub table: Arc<Table>,
    /// Where the peers' copies arrive.
    pub target: u32,
    /// For each rank, the index of the first event that peers trigger there for this exchange.
    pub first_event: Vec<u32>,
    /// The slot of the copies of an earlier exchange, where the slot before this one's copies and its arrival
    /// together tell that all of those are done.
    pub completes: Option<u32>,
}

/// Who sends what to whom.
#[derive(Debug)]
pub(crate) struct Table {
    /// For each rank its sends, in the order of its copy tasks.
    pub sends: Vec<Vec<Send>>,
    /// For each rank the triggers of each of its events.
    pub triggers: Vec<Vec<u32>>,
    /// Every rank has an event, and each of them gets a send from every other rank.
    pub from_all: bool,
    /// What a rank sends to one peer, it sends to all.
    pub to_all: bool,
    /// Every rank has one event.
    pub one_event: bool,
}

/// What a slot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotKind {
    /// Tasks of a registered type; where it pushes, the output that goes to every rank.
    Compute { push: Option<u8> },
    /// Tasks of a collective on its own rank (sums, local copies).
    Collective,
    /// Copies to peers. The next slot is their arrival.
    Copy { exchange: u32 },
    /// No tasks: what peers' copies write here. Its "tasks" are the events that they trigger.
    Arrive { exchange: u32 },
}

/// One step of every rank.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    /// Index of its operator's name.
    pub op: u32,
    pub kind: SlotKind,
    pub inputs: Vec<u32>,
    pub outputs: Vec<u32>,
}

/// How a slot is cut into tasks on some rank.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Part {
    pub type_name: String,
    pub params: Vec<u32>,
    /// The parameter that becomes the rank's own number, so that ranks share the part.
    pub rank_param: Option<usize>,
    /// The input whose views get a first dimension of one index.
    pub stacked: Option<u8>,
    pub scratch_bytes: u32,
    pub tasks: Vec<TaskSpec>,
}
