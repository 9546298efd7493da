//! From a sharded op graph to each rank's tasks and events.
//!
//! [`Plan`] is what all ranks share: the sequence of **slots** (an operator's tasks, a collective's copies,
//! arrivals and sums), the tensors they touch, and for each rank how each slot is cut into tasks. From it
//! `events` derives a rank's dependencies, `order` what is ordered before what over all ranks, `memory` the
//! buffers, and `emit` the finished [`TaskGraph`](crate::TaskGraph).

mod classes;
mod collective;
mod dynamic;
mod emit;
mod entries;
mod events;
mod memory;
mod order;
mod overlap;
mod place;
mod plan;
mod shared;

use emit::emit;
pub(crate) use plan::{Plan, Prepared};
pub(crate) use shared::Shared;

use crate::dtype::DType;
use crate::op_graph::Rows;
use crate::region::{MAX_DIMS, Region};
use crate::task_graph::Space;
use crate::task_type::TaskSpec;
use std::ops::Range;

/// No part: the slot has no tasks on this rank.
const NONE: u32 = u32::MAX;

/// Local dimensions of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub(crate) struct Dims {
    pub n: u8,
    pub d: [u32; MAX_DIMS],
}

impl Dims {
    fn new(dims: &[u64]) -> Self {
        let mut d = [1; MAX_DIMS];
        for (to, &from) in d.iter_mut().zip(dims) {
            *to = from as u32;
        }
        Dims { n: dims.len() as u8, d }
    }
    fn as_slice(&self) -> &[u32] {
        &self.d[..self.n as usize]
    }
    fn volume(&self) -> u64 {
        self.as_slice().iter().map(|&d| u64::from(d)).product()
    }
}

/// A tensor of the plan: those of the op graph first (same numbers), then receive buffers and temporaries.
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

/// How a collective is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Lowering {
    CopyReduce,
    OneShot,
    TwoShot,
    Gather,
    /// One rank: a sum of one summand.
    Alone,
}

/// A block that a rank sends in a gather.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GatherPiece {
    /// In the rank's own tensor.
    pub source: Region,
    /// In the gathered tensor.
    pub target: Region,
}

/// A collective.
#[derive(Clone, Debug)]
pub(crate) struct Exchange {
    pub lowering: Lowering,
    /// Where the peers' copies or pushes arrive (of a gather: the gathered tensor).
    pub receive: u32,
    /// The result.
    pub output: u32,
    pub rows: u32,
    /// Column tiles (of a gather: none).
    pub tiles: Vec<Range<u32>>,
    /// 0 tokens, 1 samples, 2 fixed.
    pub rows_kind: u32,
    /// Gather: what each rank sends; nothing but a signal where empty.
    pub pieces: Vec<Vec<GatherPiece>>,
    /// Gather: ranks copy their own block too.
    pub to_self: bool,
    /// For each rank, the index of the first event that peers trigger there for this exchange.
    pub first_event: Vec<u32>,
}

impl Exchange {
    /// The rank that sums a tile in a two-shot allreduce.
    fn owner(&self, tile: usize, world: u32) -> u32 {
        tile as u32 % world
    }
    /// Tiles that `rank` sums in a two-shot allreduce.
    fn owned(&self, rank: u32, world: u32) -> u32 {
        (self.tiles.len() as u32).saturating_sub(rank).div_ceil(world)
    }
}

/// What a slot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotKind {
    /// Tasks of a registered type; where it pushes, the output that goes to every rank.
    Compute { push: Option<u8> },
    /// Copies to peers; `stage` 1 is the second half of a two-shot allreduce.
    Copy { exchange: u32, stage: u8 },
    /// No tasks: what peers' copies write here. Its "tasks" are the events that they trigger.
    Arrive { exchange: u32, stage: u8 },
    /// Sums of tiles.
    Reduce { exchange: u32 },
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
#[derive(Debug, PartialEq)]
pub(crate) struct Part {
    pub type_name: String,
    pub params: Vec<u32>,
    pub scratch_bytes: u32,
    pub tasks: Vec<TaskSpec>,
}
