//! Compares one rank's graph with rank 0's: whether they are alike, and how they differ.
//!
//! A graph's operands are compared as they are made, so they need not be kept. The rest of the graph is compared at the end.

use super::boxes::{boxes, is_region, is_symbolic, last_byte, own_slot};
use super::turn::{Turn, turned, turned_region};
use crate::dtype::DType;
use crate::op_graph::Role;
use crate::region::MAX_DIMS;
use crate::task_graph::{Operand, Place, Task, TaskGraph, TensorEntry, Variant, core_types};

/// A rank that is compared with the first rank.
pub struct Comparing<'a> {
    /// The first rank's graph, which is sound by itself.
    first: &'a TaskGraph,
    rank: usize,
    turns: Vec<Turn>,
    /// Number of compared operands.
    seen: usize,
    /// Operands that access other bytes than the first rank's, in tensors that are not constants.
    differing: Vec<u32>,
    alike: bool,
}

impl<'a> Comparing<'a> {
    pub(super) fn new(first: &'a TaskGraph, rank: usize) -> Comparing<'a> {
        let turns = vec![Turn::Still; first.tensors.len()];
        Comparing { first, rank, turns, seen: 0, differing: Vec::new(), alike: true }
    }

    /// Compares the next operands of the rank, in the order of its graph.
    pub fn operands(&mut self, operands: &[Operand]) {
        let first = self.first;
        let Some(like) = first.operands.get(self.seen..self.seen + operands.len()) else {
            self.alike = false;
            return;
        };
        for (x, y) in like.iter().zip(operands) {
            self.alike = self.alike && self.operand(x, y);
            self.seen += 1;
        }
    }

    /// True if an operand is like the first rank's. If it accesses other bytes, they must be the first rank's, turned.
    fn operand(&mut self, x: &Operand, y: &Operand) -> bool {
        let Some(tensor) = self.first.tensors.get(x.tensor as usize) else { return false };
        let places = match (x.place, y.place) {
            (Place::Peer(x), Place::Peer(y)) => self.peer(x) == usize::from(y),
            (x, y) => x == y,
        };
        let shape = |o: &Operand| (o.tensor, o.ndim, o.dims, o.strides, o.trust);
        if !places || shape(x) != shape(y) {
            return false;
        }
        if (x.offset, &x.region) == (y.offset, &y.region) {
            return true;
        }
        // Nobody writes a constant, so the order does not depend on which of its bytes are read. They only must exist.
        if matches!(tensor.role, Role::Weight { .. } | Role::Constant) {
            return fits(tensor, y);
        }
        let Some(d) = (0..MAX_DIMS).find(|&d| x.region.lo[d] != y.region.lo[d]) else { return false };
        self.differing.push(self.seen as u32);
        self.turn(x.tensor, d);
        self.is_turned(tensor, d, x, y)
    }

    /// The peer that is to the first rank what this peer is to this rank.
    fn peer(&self, of_first: u16) -> usize {
        (usize::from(of_first) + self.rank) % self.first.world as usize
    }

    /// Records that the tensor has slots along this dimension.
    fn turn(&mut self, tensor: u32, d: usize) {
        let turn = &mut self.turns[tensor as usize];
        *turn = match *turn {
            Turn::Still => Turn::Slots(d as u8),
            Turn::Slots(known) if usize::from(known) == d => *turn,
            _ => Turn::Other,
        };
    }

    /// True if, in a tensor with slots, `y` accesses the same as `x`, turned.
    fn is_turned(&self, tensor: &TensorEntry, d: usize, x: &Operand, y: &Operand) -> bool {
        let (world, rank, size) = (self.first.world, self.rank as u32, tensor.dtype.size());
        let dim = tensor.dims.get(d).copied().unwrap_or(0);
        let aligned = x.offset.is_multiple_of(size) && y.offset.is_multiple_of(size);
        if x.trust.is_some() || !aligned || dim < world {
            return false;
        }
        if turned_region(&x.region, d, dim, world, rank) != Some(y.region) {
            return false;
        }
        // The common case: views that cover exactly their regions.
        if is_region(tensor, x) && is_region(tensor, y) {
            return true;
        }
        let (Ok(touched), Ok(there)) = (boxes(tensor, x, false), boxes(tensor, y, false)) else {
            return false;
        };
        turned(&touched, d, dim, world, rank).is_some_and(|turned| turned == there)
    }

    /// How the ranks differ, for each tensor; `None` if they are not alike. `other` is the rank's graph. Its operands have been
    /// compared already, so those that it still has are ignored.
    pub(super) fn finish(mut self, other: &TaskGraph) -> Option<Vec<Turn>> {
        let first = self.first;
        let all = self.alike && self.seen == first.operands.len();
        let own = first.rank == 0 && other.rank as usize == self.rank;
        if !all || !own || !self.same_frame(other) {
            return None;
        }
        if !first.tasks.iter().zip(&other.tasks).all(|(x, y)| self.same_task(x, y)) {
            return None;
        }
        self.sums(other)?;
        let fits = |(tensor, turn): (&TensorEntry, &Turn)| match *turn {
            Turn::Still => true,
            Turn::Other => false,
            Turn::Slots(d) => {
                let dim = tensor.dims.get(usize::from(d)).copied().unwrap_or(0);
                let plain = !tensor.tiled && !is_symbolic(tensor) && tensor.region_dims == tensor.dims;
                // The second dimension of a flagged tensor is rows, and the first row is always in use.
                let sound = d == 0 || tensor.dtype != DType::F32Flagged;
                plain && sound && dim > 0 && dim.is_multiple_of(first.world)
            }
        };
        (first.tensors.iter().zip(&self.turns).all(fits) && self.others_stay()).then_some(self.turns)
    }

    /// Accesses to the same bytes of a tensor with slots must access all of its slots.
    fn others_stay(&self) -> bool {
        if self.turns.iter().all(|t| *t == Turn::Still) {
            return true;
        }
        let mut differing = self.differing.iter().copied().peekable();
        self.first.operands.iter().enumerate().all(|(index, x)| {
            if differing.next_if_eq(&(index as u32)).is_some() {
                return true;
            }
            let Turn::Slots(d) = self.turns[x.tensor as usize] else { return true };
            self.is_turned(&self.first.tensors[x.tensor as usize], usize::from(d), x, x)
        })
    }

    /// Compares everything except tasks and operands.
    fn same_frame(&self, b: &TaskGraph) -> bool {
        let a = self.first;
        let reduce = sum_type(a);
        // Of a sum's parameters, the proof uses the ranks, the rows and the flags. The remaining one is its own rank.
        let same_variant = |x: &Variant, y: &Variant| {
            let known = |v: &Variant| [0, 2, 3].map(|word| v.params.get(word).copied());
            x.task_type == y.task_type && (Some(usize::from(x.task_type)) != reduce || known(x) == known(y))
        };
        a.world == b.world
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
            && a.variants.len() == b.variants.len()
            && a.variants.iter().zip(&b.variants).all(|(x, y)| same_variant(x, y))
    }

    fn same_task(&self, x: &Task, y: &Task) -> bool {
        let triggers = match (x.trigger, y.trigger) {
            (None, None) => true,
            (Some(x), Some(y)) => {
                x.tag() == y.tag() && x.index() == y.index() && self.peer(x.owner()) == usize::from(y.owner())
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
    }

    /// A sum leaves out its own slot of the received ones, which turns too.
    fn sums(&mut self, other: &TaskGraph) -> Option<()> {
        let (a, world) = (self.first, self.first.world as usize);
        let reduce = sum_type(a);
        for (x, y) in
            a.tasks.iter().zip(&other.tasks).filter(|(x, _)| Some(usize::from(x.task_type)) == reduce)
        {
            // The received slots have the same shape on both ranks.
            let Some(operand) = a.inputs(x).get(1) else { continue };
            match (own_slot(a, x, operand), own_slot(other, y, operand)) {
                (None, None) => {}
                (Some(x_hole), Some(y_hole)) if (x_hole as usize + self.rank) % world == y_hole as usize => {
                    let tensor = a.tensors.get(operand.tensor as usize)?;
                    // The slots of the operand are the indices of the tensor's first dimension, one per rank.
                    let slots = tensor.dims.len() == 3
                        && tensor.dims[0] as usize == world
                        && operand.dims[0] as usize == world
                        && operand.strides[0] == tensor.strides[0];
                    if !slots {
                        return None;
                    }
                    self.turn(operand.tensor, 0);
                }
                _ => return None,
            }
        }
        Some(())
    }
}

fn sum_type(graph: &TaskGraph) -> Option<usize> {
    graph.type_names.iter().position(|n| n == core_types::REDUCE)
}

/// True if the view is inside its tensor. Everything else is like rank 0's, which has been checked.
fn fits(tensor: &TensorEntry, operand: &Operand) -> bool {
    let ndim = usize::from(operand.ndim);
    let end = last_byte(operand.offset, &operand.dims[..ndim], &operand.strides[..ndim], tensor.dtype);
    let inside = |d: usize| {
        operand.region.lo[d] <= operand.region.hi[d]
            && operand.region.hi[d] <= tensor.region_dims.get(d).copied().unwrap_or(1)
    };
    end <= tensor.bytes && operand.offset.is_multiple_of(tensor.dtype.size()) && (0..MAX_DIMS).all(inside)
}

/// True if the tensors are the same except for the source of a weight's values.
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
