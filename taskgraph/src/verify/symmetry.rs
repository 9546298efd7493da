//! Ranks that are the same up to their numbers: what is proven of one then holds for all.
//!
//! The ranks are alike if rank r's graph is rank 0's with every rank number turned on by r: task i of the one is task i
//! of the other, in the same place of the same list, waits for the same events, and where task i of rank 0 reaches rank
//! p, that of rank r reaches p + r. Turning all numbers on by one is then a symmetry of the whole set: it maps tasks to
//! tasks, events to events and every edge to an edge. So it maps the order to itself, and the accesses to rank 0's memory
//! to those to any other rank's.
//!
//! Bytes must go along. Most tensors are touched at the same bytes on all ranks. The others have a *slot* for each rank
//! along one dimension, which turns too: an access takes the slot of one rank, that is turned, or all of them. This maps
//! bytes to bytes one to one, so accesses share bytes on rank 0 exactly where they do on rank r. Of constants, which nobody
//! writes, a task of rank r may read other bytes than rank 0's.
//!
//! This is checked of the graphs themselves; nothing is taken from the builder's word.

use super::boxes::{Boxes, boxes, hole, is_region, is_symbolic, last_byte};
use crate::dtype::DType;
use crate::op_graph::Role;
use crate::parallel;
use crate::region::{MAX_DIMS, Region};
use crate::task_graph::{Operand, Place, Task, TaskGraph, TensorEntry, Variant, core_types};

/// How the ranks' accesses to a tensor differ.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Turn {
    /// Not at all.
    Still,
    /// By slots of this dimension.
    Slots(u8),
    /// In some other way.
    Other,
}

/// The symmetry of alike ranks.
#[derive(Debug)]
pub(super) struct Symmetry {
    turns: Vec<Turn>,
}

impl Symmetry {
    /// The symmetry of these graphs; `None` where ranks are not alike, or there is one only. Rank 0's graph is sound by
    /// itself.
    pub(super) fn of(graphs: &[TaskGraph]) -> Option<Symmetry> {
        let compared = parallel::map(graphs.len().saturating_sub(1), |i| {
            Symmetry::of_pair(&graphs[0], &graphs[i + 1], i + 1)
        });
        Symmetry::of_all(&compared)
    }

    /// How `rank` differs from the first, if it is alike as far as these two tell. The first is sound by itself.
    pub(super) fn of_pair(first: &TaskGraph, other: &TaskGraph, rank: usize) -> Option<Symmetry> {
        if first.rank != 0 || other.rank as usize != rank {
            return None;
        }
        let symmetry = Symmetry { turns: compare(first, other, rank)? };
        let world = first.world as usize;
        let fits = |(tensor, turn): (&TensorEntry, &Turn)| match *turn {
            Turn::Still => true,
            Turn::Other => false,
            Turn::Slots(d) => {
                let dim = tensor.dims.get(usize::from(d)).copied().unwrap_or(0);
                let plain = !tensor.tiled && !is_symbolic(tensor) && tensor.region_dims == tensor.dims;
                // Of a flagged tensor the second dimension is rows, of which the first is always in use.
                let sound = d == 0 || tensor.dtype != DType::F32Flagged;
                plain && sound && dim > 0 && (dim as usize).is_multiple_of(world)
            }
        };
        if !first.tensors.iter().zip(&symmetry.turns).all(fits) {
            return None;
        }
        let slots = symmetry.turns.iter().any(|t| *t != Turn::Still);
        (!slots || symmetry.slots_turn(first, other, rank)).then_some(symmetry)
    }

    /// The symmetry of all ranks, each of which has been compared with the first. All differ from it by the same slots: a
    /// rank that touches a tensor just as the first does, while another's slots turn, is not alike.
    pub(super) fn of_all(compared: &[Option<Symmetry>]) -> Option<Symmetry> {
        let first = compared.first()?.as_ref()?;
        let same = |other: &Option<Symmetry>| other.as_ref().is_some_and(|s| s.turns == first.turns);
        compared.iter().all(same).then(|| Symmetry { turns: first.turns.clone() })
    }

    /// Both graphs' ranks turn in the same way in what the graphs share.
    pub(super) fn agrees(&self, own: &TaskGraph, other: &Symmetry, others: &TaskGraph) -> bool {
        let turning = |s: &Symmetry, g: &TaskGraph| -> Vec<(String, Turn)> {
            let shared = g.tensors.iter().zip(&s.turns).filter(|(t, _)| t.overlay.is_none());
            shared
                .filter(|(_, turn)| **turn != Turn::Still)
                .map(|(t, turn)| (t.name.clone(), *turn))
                .collect()
        };
        let agree = |turning: Vec<(String, Turn)>, s: &Symmetry, g: &TaskGraph| {
            turning.iter().all(|(name, turn)| {
                let there = g.tensors.iter().position(|t| t.name == *name);
                there.is_none_or(|t| s.turns[t] == *turn)
            })
        };
        agree(turning(self, own), other, others) && agree(turning(other, others), self, own)
    }

    /// Boxes that rank 0 touches of a tensor, as `rank` does.
    pub(super) fn turned(
        &self,
        index: u32,
        tensor: &TensorEntry,
        found: Boxes,
        world: usize,
        rank: usize,
    ) -> Boxes {
        let Turn::Slots(d) = self.turns[index as usize] else { return found };
        let d = usize::from(d);
        turned(&found, d, tensor.dims[d], world as u32, rank as u32).unwrap_or_else(|| {
            // It was looked at: each box is of one slot or of all. All of the tensor is never too little.
            debug_assert!(false, "{found:?}");
            Boxes::from_slice(&[Region::whole(&tensor.dims)])
        })
    }

    /// What `rank` touches of tensors with slots is what rank 0 touches, turned.
    fn slots_turn(&self, first: &TaskGraph, other: &TaskGraph, rank: usize) -> bool {
        let world = first.world;
        first.operands.iter().zip(&other.operands).all(|(a, b)| {
            let Turn::Slots(d) = self.turns[a.tensor as usize] else { return true };
            let (tensor, d) = (&first.tensors[a.tensor as usize], usize::from(d));
            if a.trust.is_some()
                || !a.offset.is_multiple_of(tensor.dtype.size())
                || !b.offset.is_multiple_of(tensor.dtype.size())
            {
                return false;
            }
            let one = turned_region(&a.region, d, tensor.dims[d], world, rank as u32);
            if one != Some(b.region) {
                return false;
            }
            // The common case: views that touch just their regions.
            if is_region(tensor, a) && is_region(tensor, b) {
                return true;
            }
            let (Ok(touched), Ok(there)) = (boxes(tensor, a, false), boxes(tensor, b, false)) else {
                return false;
            };
            turned(&touched, d, tensor.dims[d], world, rank as u32).is_some_and(|turned| turned == there)
        })
    }
}

/// Boxes with the slots of dimension `d` turned on by `rank`; `None` where one has neither a slot nor all of them.
fn turned(from: &[Region], d: usize, dim: u32, world: u32, rank: u32) -> Option<Boxes> {
    from.iter().map(|region| turned_region(region, d, dim, world, rank)).collect()
}

fn turned_region(region: &Region, d: usize, dim: u32, world: u32, rank: u32) -> Option<Region> {
    let slot = dim / world;
    let (lo, hi) = (region.lo[d], region.hi[d]);
    if (lo, hi) == (0, dim) {
        return Some(*region);
    }
    let one = lo < hi && lo / slot == (hi - 1) / slot;
    let start = (lo + rank * slot) % dim;
    one.then(|| region.with(d, start, start + (hi - lo)))
}

/// Compares a rank with rank 0: for each tensor how they differ; `None` where they are not alike.
fn compare(a: &TaskGraph, b: &TaskGraph, rank: usize) -> Option<Vec<Turn>> {
    let world = a.world as usize;
    let turned = |p: u16| (usize::from(p) + rank) % world;
    let alike = a.world == b.world
        && a.placement == b.placement
        && a.backend == b.backend
        && a.workers == b.workers
        && a.capacity == b.capacity
        && a.type_names == b.type_names
        && a.ops.len() == b.ops.len()
        && a.events == b.events
        && a.worker_lists == b.worker_lists
        && a.tensors.len() == b.tensors.len()
        && a.tensors.iter().zip(&b.tensors).all(|(a, b)| same_tensor(a, b))
        && a.tasks.len() == b.tasks.len()
        && a.operands.len() == b.operands.len()
        && a.variants.len() == b.variants.len();
    let reduce = a.type_names.iter().position(|n| n == core_types::REDUCE);
    // Of a sum's parameters the proof knows the ranks, the rows and the flags; the other is its own number.
    let same_variant = |x: &Variant, y: &Variant| {
        let known = |v: &Variant| [0, 2, 3].map(|word| v.params.get(word).copied());
        x.task_type == y.task_type && (Some(usize::from(x.task_type)) != reduce || known(x) == known(y))
    };
    if !alike || !a.variants.iter().zip(&b.variants).all(|(x, y)| same_variant(x, y)) {
        return None;
    }
    let mut turns = vec![Turn::Still; a.tensors.len()];
    let same_task = |x: &Task, y: &Task| {
        let triggers = match (x.trigger, y.trigger) {
            (None, None) => true,
            (Some(x), Some(y)) => {
                x.tag() == y.tag() && x.index() == y.index() && turned(x.owner()) == usize::from(y.owner())
            }
            _ => false,
        };
        triggers
            && x.task_type == y.task_type
            && x.variant == y.variant
            && (x.first_operand, x.num_inputs, x.num_outputs)
                == (y.first_operand, y.num_inputs, y.num_outputs)
            && x.dependencies == y.dependencies
            && x.carried == y.carried
            && x.worker == y.worker
            && x.op == y.op
    };
    if !a.tasks.iter().zip(&b.tasks).all(|(x, y)| same_task(x, y)) {
        return None;
    }
    // What a sum leaves out of the received slots is its own, which turns too.
    for (x, y) in a.tasks.iter().zip(&b.tasks).filter(|(x, _)| Some(usize::from(x.task_type)) == reduce) {
        match (hole(a, x, 1), hole(b, y, 1)) {
            (None, None) => {}
            (Some(x_hole), Some(y_hole)) if (x_hole as usize + rank) % world == y_hole as usize => {
                let operand = &a.inputs(x)[1];
                let tensor = a.tensors.get(operand.tensor as usize)?;
                // The slots that the operand counts are those of the tensor's first dimension, one for each rank.
                let slots = tensor.dims.len() == 3
                    && tensor.dims[0] as usize == world
                    && operand.dims[0] as usize == world
                    && operand.strides[0] == tensor.strides[0];
                let turn = &mut turns[operand.tensor as usize];
                *turn = if slots && *turn != Turn::Other { Turn::Slots(0) } else { Turn::Other };
            }
            _ => return None,
        }
    }
    for (x, y) in a.operands.iter().zip(&b.operands) {
        let tensor = a.tensors.get(x.tensor as usize)?;
        let places = match (x.place, y.place) {
            (Place::Peer(x), Place::Peer(y)) => turned(x) == usize::from(y),
            (x, y) => x == y,
        };
        let shape = |o: &Operand| (o.tensor, o.ndim, o.dims, o.strides, o.trust);
        if !places || shape(x) != shape(y) {
            return None;
        }
        // Nobody writes a constant, so which of its bytes are read matters to no order. They must be there.
        if matches!(tensor.role, Role::Weight { .. } | Role::Constant) {
            if (x.offset, &x.region) != (y.offset, &y.region) && !fits(tensor, y) {
                return None;
            }
        } else if (x.offset, &x.region) != (y.offset, &y.region) {
            let d = (0..x.region.lo.len()).find(|&d| x.region.lo[d] != y.region.lo[d])?;
            let turn = turns.get_mut(x.tensor as usize)?;
            *turn = match *turn {
                Turn::Still => Turn::Slots(d as u8),
                Turn::Slots(known) if usize::from(known) == d => *turn,
                _ => Turn::Other,
            };
        }
    }
    Some(turns)
}

/// The view lies in its tensor. The rest of it is as rank 0's, which has been looked at.
fn fits(tensor: &TensorEntry, operand: &Operand) -> bool {
    let ndim = usize::from(operand.ndim);
    let end = last_byte(operand.offset, &operand.dims[..ndim], &operand.strides[..ndim], tensor.dtype);
    let inside = |d: usize| {
        operand.region.lo[d] <= operand.region.hi[d]
            && operand.region.hi[d] <= tensor.region_dims.get(d).copied().unwrap_or(1)
    };
    end <= tensor.bytes && operand.offset.is_multiple_of(tensor.dtype.size()) && (0..MAX_DIMS).all(inside)
}

/// The same but for where a weight's values come from.
fn same_tensor(a: &TensorEntry, b: &TensorEntry) -> bool {
    a.name == b.name
        && a.dtype == b.dtype
        && a.dims == b.dims
        && a.strides == b.strides
        && a.space == b.space
        && a.bytes == b.bytes
        && a.role == b.role
        && a.region_dims == b.region_dims
        && a.tiled == b.tiled
        && a.output == b.output
        && a.overlay == b.overlay
}
