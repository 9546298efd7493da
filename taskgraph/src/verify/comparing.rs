//! Compares one rank's graph with rank 0's: whether they are alike, and how they differ.
//!
//! A graph's operands are compared as they are made, so they need not be kept. If operands repeat earlier ones with other
//! tensors, it is enough that rank 0's do so too (see `first`). Tasks may be compared in the same way; their dependencies and
//! triggers then come in columns ([`TaskColumns`]). The rest of the graph is compared at the end.

mod first;

use super::boxes::{boxes, end_of, is_region, is_symbolic, own_slot};
use super::turn::Turn;
use crate::blocks::Blocks;
use crate::dtype::DType;
use crate::ids::EventId;
use crate::op_graph::Role;
use crate::region::MAX_DIMS;
use crate::task_graph::{Operand, Place, Task, TaskGraph, TensorEntry, Variant, core_types};
use crate::trust::RowShares;
pub(super) use first::First;
pub use first::Repeat;
use first::sum_type;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::ops::Range;

/// A rank that is compared with the first rank.
pub struct Comparing<'a> {
    /// The first rank's graph, which is sound by itself.
    first: &'a TaskGraph,
    rank: usize,
    turns: Vec<Turn>,
    known: &'a First<'a>,
    /// Number of compared operands.
    seen: usize,
    /// Operands that were compared one by one.
    one_by_one: Vec<Range<usize>>,
    /// Those of these operands that access other bytes than the first rank's, in tensors that are not constants, with
    /// their blocks.
    differing: Vec<(u32, Blocks)>,
    repeated: Vec<Repeated>,
    /// By the operands that are repeated: the tensors that have blocks there.
    turning: HashMap<(usize, usize), Turning>,
    /// Number of tasks whose shapes have been compared, including the first two.
    seen_tasks: usize,
    /// Number of tasks after the first two that came in columns.
    in_columns: Option<usize>,
    alike: bool,
}

type Turning = SmallVec<[(u32, Blocks); 4]>;

/// The operands from `at` on are those of `like` with other tensors.
struct Repeated {
    at: usize,
    like: Range<usize>,
    tensors: SmallVec<[(u32, u32); 8]>,
}

/// What a task is, without its dependencies and its trigger.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TaskShape {
    /// As in [`Task`].
    pub task_type: u16,
    /// As in [`Task`].
    pub variant: u16,
    /// As in [`Task`].
    pub first_operand: u32,
    /// As in [`Task`].
    pub num_inputs: u16,
    /// As in [`Task`].
    pub num_outputs: u16,
    /// As in [`Task`].
    pub op: u32,
}

impl TaskShape {
    fn of(task: &Task) -> TaskShape {
        TaskShape {
            task_type: task.task_type,
            variant: task.variant,
            first_operand: task.first_operand,
            num_inputs: task.num_inputs,
            num_outputs: task.num_outputs,
            op: task.op,
        }
    }
}

/// Dependencies and triggers of all tasks whose shapes have been compared. The tasks are in this order in their workers' lists,
/// and carry no events.
#[derive(Clone, Copy, Debug)]
pub struct TaskColumns<'c> {
    /// Where the dependencies of each task begin, and the end.
    pub first_dependency: &'c [u32],
    /// Events that the tasks wait for.
    pub dependencies: &'c [u32],
    /// The worker of each.
    pub workers: &'c [u32],
    /// The event that each triggers; [`EventId::INVALID`]: none.
    pub triggers: &'c [EventId],
}

impl<'a> Comparing<'a> {
    pub(super) fn new(known: &'a First<'a>, rank: usize) -> Comparing<'a> {
        let first = known.graph;
        Comparing {
            first,
            rank,
            turns: vec![Turn::Still; first.tensors.len()],
            known,
            seen: 0,
            one_by_one: Vec::new(),
            differing: Vec::new(),
            repeated: Vec::new(),
            turning: HashMap::new(),
            seen_tasks: 2,
            in_columns: None,
            alike: true,
        }
    }

    /// Compares the next operands of the rank, in the order of its graph.
    pub fn operands(&mut self, operands: &[Operand]) {
        let first = self.first;
        let Some(like) = first.operands.get(self.seen..self.seen + operands.len()) else {
            self.alike = false;
            return;
        };
        match self.one_by_one.last_mut() {
            Some(last) if last.end == self.seen => last.end += operands.len(),
            _ => self.one_by_one.push(self.seen..self.seen + operands.len()),
        }
        for (x, y) in like.iter().zip(operands) {
            self.alike = self.alike && self.operand(x, y);
            self.seen += 1;
        }
    }

    /// Compares the next task of the rank. The first two tasks are not compared here.
    pub fn task(&mut self, shape: &TaskShape) {
        let like = self.first.tasks.get(self.seen_tasks).map(TaskShape::of);
        self.alike = self.alike && like == Some(*shape);
        self.seen_tasks += 1;
    }

    /// The next operands and tasks of the rank are earlier ones with other tensors.
    pub fn repeat(&mut self, repeat: &Repeat) {
        let ((first, count), (first_task, tasks)) = (repeat.operands, repeat.tasks);
        let (at, like) = (self.seen, first as usize..first as usize + count as usize);
        let at_task = self.seen_tasks;
        self.seen += count as usize;
        self.seen_tasks += tasks as usize;
        let place = self.one_by_one.partition_point(|range| range.start <= like.start);
        let came = count == 0 || self.one_by_one[..place].last().is_some_and(|range| like.end <= range.end);
        let tasks_came = first_task >= 2 && first_task as usize + tasks as usize <= at_task;
        let known = came && tasks_came && self.known.repeats(at as u32, at_task as u32, repeat);
        self.alike = self.alike && known;
        if !self.alike || count == 0 {
            return;
        }
        // Each pair of operands compares as the earlier pair did, so the same blocks turn.
        let turning = match self.turning.get(&(like.start, like.end)) {
            Some(turning) => turning.clone(),
            None => {
                let mut turning = Turning::new();
                for &(index, blocks) in self.differing_in(&like) {
                    let turned = (self.first.operands[index as usize].tensor, blocks);
                    if !turning.contains(&turned) {
                        turning.push(turned);
                    }
                }
                self.turning.insert((like.start, like.end), turning.clone());
                turning
            }
        };
        for (tensor, blocks) in turning {
            if let Some(tensor) = repeat.renamed(tensor) {
                self.turn(tensor, blocks);
            }
        }
        self.repeated.push(Repeated { at, like, tensors: repeat.tensors.clone() });
    }

    /// Compares the rest of all tasks whose shapes have been compared. The tasks after them are in the rank's graph.
    pub fn columns(&mut self, columns: &TaskColumns<'_>) {
        let (known, count) = (self.known.columns(), columns.workers.len());
        let (first, all) = (columns.first_dependency, columns.dependencies);
        let triggers = known.triggers.iter().zip(columns.triggers);
        self.alike = self.alike
            && known.tell_all
            && self.in_columns.is_none()
            && self.seen_tasks == 2 + count
            && columns.triggers.len() == count
            && first.len() == count + 1
            && first[count] as usize == all.len()
            && known.first_dependency.get(..=count) == Some(first)
            && known.dependencies.get(..all.len()) == Some(all)
            && known.workers.get(..count) == Some(columns.workers)
            && triggers.fold(true, |alike, (&x, &y)| alike & self.same_trigger(x, y));
        self.in_columns = Some(count);
    }

    /// True if both trigger nothing, or the second triggers the first's event, turned.
    fn same_trigger(&self, x: EventId, y: EventId) -> bool {
        let turned =
            || x.tag() == y.tag() && x.index() == y.index() && self.peer(x.owner()) == usize::from(y.owner());
        x == EventId::INVALID && y == EventId::INVALID
            || x != EventId::INVALID && y != EventId::INVALID && turned()
    }

    fn differing_in(&self, range: &Range<usize>) -> &[(u32, Blocks)] {
        let place = |end: usize| self.differing.partition_point(|&(index, _)| (index as usize) < end);
        &self.differing[place(range.start)..place(range.end)]
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
        // No task writes a constant, so the order does not depend on which of its bytes are read. The bytes only have
        // to exist.
        if matches!(tensor.role, Role::Weight { .. } | Role::Constant) {
            return fits(tensor, y);
        }
        let Some(d) = (0..MAX_DIMS).find(|&d| x.region.lo[d] != y.region.lo[d]) else { return false };
        let (first, there) = (x.region.lo[d], y.region.lo[d]);
        let blocks = Blocks::between(d as u8, first, there, self.first.world, self.rank as u32);
        let Some(blocks) = blocks else { return false };
        self.differing.push((self.seen as u32, blocks));
        self.turn(x.tensor, blocks);
        self.is_turned(tensor, blocks, x, y)
    }

    /// The peer that is to the first rank what this peer is to this rank.
    fn peer(&self, of_first: u16) -> usize {
        (usize::from(of_first) + self.rank) % self.first.world as usize
    }

    /// Records that the tensor has these blocks.
    fn turn(&mut self, tensor: u32, blocks: Blocks) {
        let turn = &mut self.turns[tensor as usize];
        *turn = match *turn {
            Turn::Still => Turn::Blocks(blocks),
            Turn::Blocks(known) if known == blocks => *turn,
            _ => Turn::Other,
        };
    }

    /// True if, in a tensor with blocks, `y` accesses the same as `x`, turned.
    fn is_turned(&self, tensor: &TensorEntry, blocks: Blocks, x: &Operand, y: &Operand) -> bool {
        let (world, rank, size) = (self.first.world, self.rank as u32, tensor.dtype.size());
        let dim = tensor.dims.get(usize::from(blocks.dim)).copied().unwrap_or(0);
        let aligned = x.offset.is_multiple_of(size) && y.offset.is_multiple_of(size);
        if x.trust.is_some() || !aligned || !blocks.divide(dim, world) {
            return false;
        }
        if blocks.turned(&x.region, world, rank) != Some(y.region) {
            return false;
        }
        // The common case: views that cover exactly their regions.
        if is_region(tensor, x) && is_region(tensor, y) {
            return true;
        }
        let (Ok(touched), Ok(there)) =
            (boxes(tensor, x, RowShares::default()), boxes(tensor, y, RowShares::default()))
        else {
            return false;
        };
        blocks.turned_all(&touched, world, rank).is_some_and(|turned| turned == there)
    }

    /// How the ranks differ, for each tensor; `None` if they are not alike. `other` is the rank's graph. Its operands have been
    /// compared already, so those that it still has are ignored. It has all tasks that have not been compared.
    pub(super) fn finish(mut self, other: &TaskGraph) -> Option<Vec<Turn>> {
        let first = self.first;
        let all = self.alike && self.seen == first.operands.len();
        let own = first.rank == 0 && other.rank as usize == self.rank;
        if !all || !own || !self.same_frame(other) {
            return None;
        }
        // Tasks after the first two may have come in columns.
        let came = self.in_columns.unwrap_or(0);
        let (fixed, rest) = first.tasks.split_at_checked(2)?;
        let there = fixed.iter().chain(rest.get(came..)?);
        let all_came = self.seen_tasks == 2 + came && other.tasks.len() + came == first.tasks.len();
        if !all_came || !there.zip(&other.tasks).all(|(x, y)| self.same_task(x, y)) {
            return None;
        }
        self.sums(other)?;
        let fits = |(tensor, turn): (&TensorEntry, &Turn)| match *turn {
            Turn::Still => true,
            Turn::Other => false,
            Turn::Blocks(blocks) => {
                let dim = tensor.dims.get(usize::from(blocks.dim)).copied().unwrap_or(0);
                let plain = !tensor.tiled && !is_symbolic(tensor) && tensor.region_dims == tensor.dims;
                // The second dimension of a flagged tensor is rows, and the first row is always in use.
                let sound = blocks.dim == 0 || tensor.dtype != DType::F32Flagged;
                plain && sound && blocks.divide(dim, first.world)
            }
        };
        (first.tensors.iter().zip(&self.turns).all(fits) && self.others_stay()).then_some(self.turns)
    }

    /// Accesses to the same bytes of a tensor with blocks must access whole groups of them.
    fn others_stay(&self) -> bool {
        if self.turns.iter().all(|t| *t == Turn::Still) {
            return true;
        }
        let one_by_one = |range: &Range<usize>| self.stay(range.start, range);
        self.one_by_one.iter().all(one_by_one)
            && self.repeated.iter().all(|repeated| {
                // If tensors turn like those that they replace, what holds for those holds here.
                let turns = |tensor: u32| self.turns[tensor as usize];
                repeated.tensors.iter().all(|&(old, new)| turns(old) == turns(new))
                    || self.stay(repeated.at, &repeated.like)
            })
    }

    /// The same for the operands from `at` on, which differ from the first rank's wherever those of `like` do.
    fn stay(&self, at: usize, like: &Range<usize>) -> bool {
        let mut differing = self.differing_in(like).iter().map(|&(index, _)| index as usize).peekable();
        self.first.operands[at..at + like.len()].iter().zip(like.clone()).all(|(x, index)| {
            if differing.next_if_eq(&index).is_some() {
                return true;
            }
            let Turn::Blocks(blocks) = self.turns[x.tensor as usize] else { return true };
            self.is_turned(&self.first.tensors[x.tensor as usize], blocks, x, x)
        })
    }

    /// Compares everything except tasks and operands.
    fn same_frame(&self, b: &TaskGraph) -> bool {
        let a = self.first;
        let reduce = sum_type(a);
        let copy = a.type_names.iter().position(|name| name == core_types::NVSHMEM_COPY);
        // The proof uses these parameters of a sum: the ranks, the rows and the flags. The next one is its own rank.
        let known = |v: &Variant| (v.params.len(), [0, 2, 3].map(|word| v.params.get(word).copied()));
        let same_variant = |x: &Variant, y: &Variant| {
            let of_type = Some(usize::from(x.task_type));
            x.task_type == y.task_type
                && (of_type != reduce || known(x) == known(y))
                && (of_type != copy || x.params == y.params)
        };
        a.world == b.world
            && a.placement == b.placement
            && a.backend == b.backend
            && a.workers == b.workers
            && a.capacity == b.capacity
            && a.type_names == b.type_names
            && a.ops.len() == b.ops.len()
            && a.events == b.events
            && (self.in_columns.is_some() || a.worker_lists == b.worker_lists)
            && a.tensors.len() == b.tensors.len()
            && a.tensors.iter().zip(&b.tensors).all(|(a, b)| same_tensor(a, b))
            && a.variants.len() == b.variants.len()
            && a.variants.iter().zip(&b.variants).all(|(x, y)| same_variant(x, y))
    }

    fn same_task(&self, x: &Task, y: &Task) -> bool {
        let event = |task: &Task| task.trigger.unwrap_or(EventId::INVALID);
        x.trigger.is_some() == y.trigger.is_some()
            && self.same_trigger(event(x), event(y))
            && TaskShape::of(x) == TaskShape::of(y)
            && x.dependencies == y.dependencies
            && x.carried == y.carried
            && x.worker == y.worker
    }

    /// A sum leaves out its own slot among the received ones; this hole turns too.
    fn sums(&mut self, other: &TaskGraph) -> Option<()> {
        let (a, world) = (self.first, self.first.world as usize);
        for x in self.known.sums().iter().filter_map(|&number| a.tasks.get(number as usize)) {
            // The received slots have the same shape on both ranks.
            let Some(operand) = a.inputs(x).get(1) else { continue };
            // The variants may differ only in the rank that they name.
            match (own_slot(a, x, operand), own_slot(other, x, operand)) {
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
                    self.turn(operand.tensor, Blocks { dim: 0, size: 1 });
                }
                _ => return None,
            }
        }
        Some(())
    }
}

/// True if the view is inside its tensor. Everything else is like rank 0's, which has been checked.
fn fits(tensor: &TensorEntry, operand: &Operand) -> bool {
    let end = end_of(tensor, operand);
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
        && a.paired == b.paired
        && a.output == b.output
        && a.rows == b.rows
        && a.overlay == b.overlay
}
