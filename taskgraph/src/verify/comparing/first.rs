//! Facts of rank 0's graph, derived once for all ranks that are compared with it.
//!
//! The builder may declare that operands and tasks of a rank are those of an earlier slot with other tensors
//! ([`super::Comparing::repeat`]), as in the layers of a model. The earlier ones have been compared with rank 0's one by one. The
//! later ones need no comparison of their own *if* rank 0's repeat in the same way, and each tensor has the same layout as the
//! one that it replaces. Both conditions are checked here.

use crate::ids::EventId;
use crate::task_graph::{Operand, Task, TaskGraph, TensorEntry, core_types};
use smallvec::SmallVec;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Operands and tasks that are earlier ones with other tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct Repeat {
    /// The earlier operands, which were compared one by one: index of the first, and their number.
    pub operands: (u32, u32),
    /// The earlier tasks, which have these operands: index of the first, and their number.
    pub tasks: (u32, u32),
    /// The operator of the later tasks.
    pub op: u32,
    /// Pairs of tensors: the later tasks have the second in place of the first.
    pub tensors: SmallVec<[(u32, u32); 8]>,
}

impl Repeat {
    /// The tensor in place of another.
    pub(super) fn renamed(&self, old: u32) -> Option<u32> {
        self.tensors.iter().find(|(from, _)| *from == old).map(|&(_, to)| to)
    }
}

/// Rank 0's graph, with the facts that were derived from it.
pub(crate) struct First<'g> {
    pub(super) graph: &'g TaskGraph,
    /// By index of a task: the repetition that was declared to start there, and whether rank 0 has it.
    repeats: Mutex<HashMap<u32, Arc<(Repeat, bool)>>>,
    columns: OnceLock<Columns>,
    sums: OnceLock<Vec<u32>>,
}

/// The tasks after the first two, in columns.
pub(super) struct Columns {
    /// Where the dependencies of each task begin, and the end.
    pub first_dependency: Vec<u32>,
    pub dependencies: Vec<u32>,
    pub workers: Vec<u32>,
    /// [`EventId::INVALID`]: none.
    pub triggers: Vec<EventId>,
    /// True if each task is in one worker's list, lists are in the order of tasks, and no events are carried. Then nothing is
    /// missing from the columns.
    pub tell_all: bool,
}

impl<'g> First<'g> {
    /// The graph is sound by itself.
    pub(crate) fn new(graph: &'g TaskGraph) -> First<'g> {
        First { graph, repeats: Mutex::default(), columns: OnceLock::new(), sums: OnceLock::new() }
    }

    /// True if rank 0's operands from `operand` on and tasks from `task` on repeat as `repeat` declares.
    pub(super) fn repeats(&self, operand: u32, task: u32, repeat: &Repeat) -> bool {
        let known = || self.repeats.lock().unwrap_or_else(PoisonError::into_inner);
        let found = known().get(&task).cloned();
        if let Some(said) = found
            && said.0 == *repeat
        {
            return said.1;
        }
        let holds =
            same_operands(self.graph, operand, repeat) && same_tasks(self.graph, operand, task, repeat);
        known().insert(task, Arc::new((repeat.clone(), holds)));
        holds
    }

    pub(super) fn columns(&self) -> &Columns {
        self.columns.get_or_init(|| Columns::of(self.graph))
    }

    /// The tasks that sum.
    pub(super) fn sums(&self) -> &[u32] {
        self.sums.get_or_init(|| {
            let tasks = self.graph.tasks.iter().enumerate();
            let sum = sum_type(self.graph);
            let sums = tasks.filter(|(_, task)| Some(usize::from(task.task_type)) == sum);
            sums.map(|(number, _)| number as u32).collect()
        })
    }
}

pub(super) fn sum_type(graph: &TaskGraph) -> Option<usize> {
    graph.type_names.iter().position(|n| n == core_types::REDUCE)
}

impl Columns {
    fn of(graph: &TaskGraph) -> Columns {
        let tasks = graph.tasks.get(2..).unwrap_or_default();
        let mut dependencies = Vec::with_capacity(tasks.len());
        let mut first_dependency = Vec::with_capacity(tasks.len() + 1);
        first_dependency.push(0);
        for task in tasks {
            dependencies.extend_from_slice(&task.dependencies);
            first_dependency.push(dependencies.len() as u32);
        }
        let in_order = graph.worker_lists.iter().all(|list| list.is_sorted());
        let plain = |task: &Task| task.worker.is_some() && task.carried.is_empty();
        Columns {
            first_dependency,
            dependencies,
            workers: tasks.iter().map(|task| task.worker.unwrap_or(u32::MAX)).collect(),
            triggers: tasks.iter().map(|task| task.trigger.unwrap_or(EventId::INVALID)).collect(),
            tell_all: in_order && tasks.iter().all(plain),
        }
    }
}

fn same_operands(graph: &TaskGraph, at: u32, repeat: &Repeat) -> bool {
    let (first, count) = repeat.operands;
    let range = |start: u32| graph.operands.get(start as usize..start as usize + count as usize);
    let entry = |tensor: u32| graph.tensors.get(tensor as usize);
    let alike = |&(old, new): &(u32, u32)| match (entry(old), entry(new)) {
        (Some(old), Some(new)) => laid_out_alike(old, new),
        _ => false,
    };
    let (Some(earlier), Some(later)) = (range(first), range(at)) else { return false };
    let same = |(x, y): (&Operand, &Operand)| {
        repeat.renamed(x.tensor).is_some_and(|tensor| *y == Operand { tensor, ..*x })
    };
    repeat.tensors.iter().all(alike) && earlier.iter().zip(later).all(same)
}

fn same_tasks(graph: &TaskGraph, operand: u32, at: u32, repeat: &Repeat) -> bool {
    let (first, count) = repeat.tasks;
    let range = |start: u32| graph.tasks.get(start as usize..start as usize + count as usize);
    let (Some(earlier), Some(later)) = (range(first), range(at)) else { return false };
    let shape = |t: &Task| (t.task_type, t.variant, t.num_inputs, t.num_outputs);
    let same = |(x, y): (&Task, &Task)| {
        shape(x) == shape(y)
            && x.first_operand.wrapping_sub(repeat.operands.0) == y.first_operand.wrapping_sub(operand)
            && y.op == repeat.op
    };
    earlier.iter().zip(later).all(same)
}

/// True if the tensors agree in everything that the comparison of two ranks asks of an operand's tensor.
fn laid_out_alike(a: &TensorEntry, b: &TensorEntry) -> bool {
    let role = |t: &TensorEntry| std::mem::discriminant(&t.role);
    role(a) == role(b)
        && a.dtype == b.dtype
        && a.dims == b.dims
        && a.strides == b.strides
        && a.bytes == b.bytes
        && a.region_dims == b.region_dims
        && a.tiled == b.tiled
        && a.paired == b.paired
}
