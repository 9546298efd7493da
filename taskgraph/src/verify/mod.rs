//! Proof that a set of task graphs is safe to launch, over all ranks at once.
//!
//! What is proven for one graph class ([`verify`]):
//! 1. *Structure*: every index is in range; operands are inside their tensors; symmetric tensors agree on all ranks; no task writes
//!    a weight, a constant or an input; only activations have flagged words, which belong to one graph; tasks that do nothing have no
//!    operands; copies and sums have the operands and parameters that their code reads; no task writes bytes that it also reads, unless
//!    through the same view of the same tensor; what a task writes on another rank is on the rank of its trigger's owner, and a task that triggers another rank's event
//!    writes nowhere else; every task is in one worker's list, or is launched by exactly one event, which is the one it depends on.
//! 2. *Triggers*: the triggers of all ranks' tasks add up to what each event waits for.
//! 3. *Reach*: every task comes after the begin event and before the end event of its rank. With dynamic placement a signal,
//!    which reads nothing of the iteration, may come later: the last message between two ranks has no answer.
//! 4. *No cycle*, with the order of the workers' lists and the flagged words as edges.
//! 5. *Memory*: any two accesses to the same byte are ordered if at least one of them writes, within an iteration and between an
//!    iteration and the next. A tensor that overlaps another is written only after all accesses to the other one. Everything that is
//!    read has been written. A flagged word has exactly one writer. Bytes are computed from the kernels' views; where they are known
//!    only at run time, [`crate::trust`] lists the assumptions. A flagged word orders itself and reuse, no more; a put is done when
//!    the event that it triggers is.
//! 6. *Counters*: no trigger of the next iteration can be counted before all triggers of this one.
//!
//! Ranks that are the same up to their numbers are proven once (`symmetry`).
//!
//! Iterations of one rank are separated by its end event, the batch step and the next begin event. Ranks are ordered only by
//! NVSHMEM events, flagged words and carried events. If an iteration and the next are safe, then any number is: a conflict with a
//! later one is ordered through the same task in between. [`verify_succession`] also proves that any graph of a model may follow
//! any other.

mod access;
mod alike;
mod boxes;
mod comparing;
mod flagged;
mod grid;
mod lists;
mod memory;
mod order;
mod overlay;
mod proven;
mod ranks;
mod report;
mod structure;
mod succession;
mod symmetry;
mod triggers;
mod turn;

pub use alike::{Alike, Class};
pub use comparing::{Comparing, Repeat, TaskColumns, TaskShape};
pub use proven::{Proven, may_follow};
pub use report::{Report, Violation, ViolationKind};

use crate::op_graph::Role;
use crate::parallel;
use crate::task_graph::{Placement, TaskGraph, core_types};
use access::{Memory, Symmetric};
use memory::{Sweep, across_message};
use order::{Kind, Order, Search};
use ranks::Ranks;
use report::Names;
use succession::{Summary, Verified};

/// Verifies one graph class; `graphs[r]` is the graph of rank r.
///
/// # Errors
/// The violations, structural ones first. The other properties are only checked in structurally sound graphs, and memory only if
/// there is an order. Long lists of similar violations are shortened.
pub fn verify(graphs: &[TaskGraph]) -> Result<Report, Vec<Violation>> {
    let symmetry = alike::symmetry(graphs);
    class(&OfClass { all: Some(graphs), ranks: Ranks::of_graphs(graphs, symmetry.as_ref()) })
        .map(|verified| verified.report)
}

/// Like [`verify_succession`], but checks each rank even if ranks are alike, and each access of graphs that follow each other. Tests
/// use it to show that this makes no difference.
#[doc(hidden)]
pub fn verify_every_rank(classes: &[Vec<TaskGraph>]) -> Result<Report, Vec<Violation>> {
    all_classes(&classes.iter().map(|graphs| of_all(graphs)).collect::<Vec<_>>(), true)
}

/// True if ranks are alike, so that one stands for all. Tests use it to check that they are alike where that matters.
#[doc(hidden)]
pub fn ranks_are_alike(graphs: &[TaskGraph]) -> bool {
    alike::symmetry(graphs).is_some()
}

/// Verifies all graph classes of a model (`classes[c][r]` is the graph of rank r and class c), and that any of them may follow
/// any other. Graphs share weights, constants, persistent tensors and symmetric tensors with the same name.
///
/// # Errors
/// Those of [`verify`]. A violation in a class names the class.
pub fn verify_succession(classes: &[Vec<TaskGraph>]) -> Result<Report, Vec<Violation>> {
    let symmetries = parallel::map(classes.len(), |c| alike::symmetry(&classes[c]));
    let mut list = Vec::with_capacity(classes.len());
    for (graphs, symmetry) in classes.iter().zip(&symmetries) {
        list.push(OfClass { all: Some(graphs), ranks: Ranks::of_graphs(graphs, symmetry.as_ref()) });
    }
    all_classes(&list, false)
}

/// What is known about a class: its ranks, and all of their graphs if they are kept.
struct OfClass<'g> {
    all: Option<&'g [TaskGraph]>,
    ranks: Ranks<'g>,
}

fn of_all(graphs: &[TaskGraph]) -> OfClass<'_> {
    OfClass { all: Some(graphs), ranks: Ranks::all(graphs) }
}

impl Proven {
    /// Proves a class by itself. The kept graphs go to `done` with their tasks and events, without their tensors.
    ///
    /// # Errors
    /// Those of [`verify`]. If ranks are alike, violations are reported for rank 0 only.
    pub fn new(kept: Class, done: impl FnMut(TaskGraph)) -> Result<Proven, Vec<Violation>> {
        let (all, mut symmetry) = match &kept {
            Class::All(graphs) => (Some(&graphs[..]), alike::symmetry(graphs)),
            Class::Alike(_) => (None, None),
        };
        let ranks = match &kept {
            Class::All(graphs) => Ranks::of_graphs(graphs, symmetry.as_ref()),
            Class::Alike(alike) => alike.ranks(),
        };
        let Verified { report, order, summaries, .. } = class(&OfClass { all, ranks })?;
        let alike = order.graphs.symmetry().is_some();
        drop(order);
        if !alike {
            // Each rank was proven by itself.
            symmetry = None;
        }
        Ok(Proven::of(kept, symmetry, report, summaries, done))
    }
}

fn all_classes(classes: &[OfClass<'_>], by_access: bool) -> Result<Report, Vec<Violation>> {
    let mut total = Report::default();
    let mut violations = Vec::new();
    let mut verified = Vec::new();
    let tasks = |c: usize| classes[c].ranks.held().iter().map(|graph| graph.tasks.len()).sum();
    let each = parallel::map_largest_first(classes.len(), tasks, |c| class(&classes[c]));
    for (of, checked) in classes.iter().zip(each) {
        match checked {
            Ok(class) => {
                total.ranks = total.ranks.max(class.report.ranks);
                total.tasks += class.report.tasks;
                total.events += class.report.events;
                total.accesses += class.report.accesses;
                total.searches += class.report.searches;
                verified.push(class);
            }
            Err(found) => violations.extend(found.into_iter().map(|mut violation| {
                let name = of.ranks.get(0).map_or("", |g| g.name.as_str());
                violation.message = format!("graph '{name}': {}", violation.message);
                violation
            })),
        }
    }
    if violations.is_empty() {
        violations.extend(succession::check(&verified, by_access));
    }
    if violations.is_empty() { Ok(total) } else { Err(violations) }
}

/// Ranks that are alike are proven once. Violations are reported for every rank nevertheless, if all graphs are kept.
fn class<'g>(of: &OfClass<'g>) -> Result<Verified<'g>, Vec<Violation>> {
    let pass = |violations: Vec<Violation>| if violations.is_empty() { Ok(()) } else { Err(violations) };
    match (proof(of.ranks, &pass), of.all) {
        (Ok((report, order, symmetric, summaries)), _) => {
            Ok(Verified { report, order, symmetric, summaries })
        }
        (Err(_), Some(graphs)) if of.ranks.symmetry().is_some() => class(&of_all(graphs)),
        (Err(violations), _) => Err(violations),
    }
}

type Proof<'g> = (Report, Order<'g>, Symmetric, Vec<Summary>);

fn proof<'g>(
    graphs: Ranks<'g>,
    pass: &dyn Fn(Vec<Violation>) -> Result<(), Vec<Violation>>,
) -> Result<Proof<'g>, Vec<Violation>> {
    // If ranks are alike, rank 0 has been checked and stands for the others.
    if graphs.symmetry().is_none() {
        pass(structure::check(graphs))?;
    }
    let ranks = graphs.held().len();
    pass(triggers::triggers(graphs))?;
    let symmetric = Symmetric::new(graphs);
    let mut violations = Vec::new();
    let flags = flagged::edges(graphs, &symmetric, ranks, &mut violations);
    pass(violations)?;
    let (order, cycle) = Order::new(graphs, flags);
    if let Some(cycle) = cycle {
        return Err(vec![cycle_violation(&order, &cycle)]);
    }
    pass(reach(&order, ranks))?;

    let own_order = order.in_order(ranks);
    let checked = parallel::map(ranks, |rank| {
        let tensors = &graphs[rank].tensors;
        let changes = |t: usize| !matches!(tensors[t].role, Role::Weight { .. } | Role::Constant);
        let mut memory = Memory::new(graphs, &symmetric, rank, &own_order[rank], changes);
        memory.sort_remote(|a| {
            let node = order.events() + order.task_number(usize::from(a.rank), a.task);
            order.position(node)
        });
        let mut sweep = Sweep::new(&order, &memory);
        for tensor in 0..tensors.len() {
            sweep.tensor(tensor);
        }
        let mut violations = std::mem::take(&mut sweep.violations);
        let uses = overlay::Uses::new(&order, &memory);
        violations.extend(overlay::check(&order, &memory, &uses, &mut sweep.search));
        violations.extend(counters(&order, rank, &mut sweep.search));
        (memory.len(), sweep.search.searches, violations, Summary::new(&order, &memory, &uses))
    });
    let mut report = Report {
        ranks: graphs.len(),
        tasks: order.tasks() as usize,
        events: order.events() as usize,
        ..Report::default()
    };
    let mut violations = Vec::new();
    let mut summaries = Vec::with_capacity(ranks);
    for (accesses, searches, found, summary) in checked {
        report.accesses += accesses * (graphs.len() / ranks);
        report.searches += searches;
        violations.extend(found);
        summaries.push(summary);
    }
    pass(violations)?;
    Ok((report, order, symmetric, summaries))
}

fn late_signal(graphs: Ranks<'_>, rank: usize, task: u32) -> bool {
    let graph = &graphs[rank];
    graph.placement == Placement::Dynamic
        && graph.type_name(&graph.tasks[task as usize]) == core_types::NVSHMEM_SIGNAL
}

/// True if the task is done before its rank's iteration ends, so that the next iteration can see what it wrote there. The effect
/// of a put on another rank may end later; the rules for reuse cover that.
fn ends(order: &Order<'_>, task: u32, rank: usize) -> bool {
    let writes = order.task(task).num_outputs > 0 && !structure::is_put(order.task(task));
    order.reaches_end(task, rank, !writes)
}

/// Checks that every task of the first `ranks` ranks waits for something that leads back to the begin event, and leads to its
/// rank's end event.
fn reach(order: &Order<'_>, ranks: usize) -> Vec<Violation> {
    let names = Names { graphs: order.graphs };
    let mut violations = Vec::new();
    for task in 0..order.tasks() {
        let (rank, index) = order.task_place(task);
        if rank >= ranks {
            break;
        }
        if index < 2 || violations.len() >= 16 {
            continue;
        }
        let place = (rank as u16, index);
        if order.waits_for_nothing(task) {
            let message = format!(
                "{} waits for nothing, so the begin event does not reach it: it must depend on event 1",
                names.task(place)
            );
            violations.push(Violation::new(ViolationKind::Unreachable, &[place], message));
        } else if !late_signal(order.graphs, rank, index) && !ends(order, task, rank) {
            let message = format!(
                "{} may still run when the iteration of rank {rank} has ended: nothing leads from it to event 2 of \
                 rank {rank} ({})",
                names.task(place),
                match order.task(task).trigger {
                    Some(event) =>
                        format!("it triggers {}", names.event(event.owner().into(), event.index())),
                    None => "it triggers no event".to_string(),
                }
            );
            violations.push(Violation::new(ViolationKind::Residual, &[place], message));
        }
    }
    violations
}

fn cycle_violation(order: &Order<'_>, cycle: &[u32]) -> Violation {
    let names = Names { graphs: order.graphs };
    let mut tasks = Vec::new();
    let mut steps = Vec::new();
    for &node in cycle {
        if node >= order.events() {
            let (rank, index) = order.task_place(node - order.events());
            tasks.push((rank as u16, index));
            steps.push(names.task((rank as u16, index)));
        } else {
            let (rank, index) = order.event_place(node);
            steps.push(format!("event {index} of rank {rank}"));
        }
    }
    if steps.len() > 16 {
        let left = steps.len() - 16;
        steps.truncate(16);
        steps.push(format!(".. {left} more"));
    }
    let message = format!(
        "tasks wait for each other, each for the one before it and the first for the last (through events, \
         the order of a worker's list or flagged words): {}",
        steps.join(" -> ")
    );
    Violation::new(ViolationKind::Cycle, &tasks, message)
}

/// Counters only grow, and an event is ready at triggers x epoch. So no trigger of the next iteration may arrive before all
/// triggers of this one. The rank's own barrier separates local triggers.
fn counters(order: &Order<'_>, rank: usize, search: &mut Search) -> Vec<Violation> {
    let names = Names { graphs: order.graphs };
    let mut violations = Vec::new();
    for (index, event) in order.graphs[rank].events.iter().enumerate() {
        let node = order.event_node(rank, index as u32);
        let tasks = order.triggerers(node);
        if !event.remote || tasks.len() < 2 || violations.len() >= 16 {
            continue;
        }
        let mut all = order.no_tasks(true);
        tasks.iter().for_each(|&t| order.add(&mut all, t));
        if all.all_cross_barrier(&all) {
            continue;
        }
        let pairs = tasks.iter().flat_map(|&b| tasks.iter().map(move |&a| (b, a)));
        let mut pairs = pairs.filter(|(b, a)| b != a);
        if let Some((b, a)) = pairs.find(|&(b, a)| !order.before_in_next(b, a, Kind::Reuse, search)) {
            let place = |t: u32| {
                let (rank, index) = order.task_place(t);
                (rank as u16, index)
            };
            let (first, second) = (place(b), place(a));
            let message = across_message(order, order, b, a, (&names.task(first), &names.task(second)))
                + &format!(
                    ": both trigger {}, whose counter would then be complete without the former",
                    names.event(rank, index as u32)
                );
            violations.push(Violation::new(ViolationKind::CounterAcrossEpochs, &[first, second], message));
        }
    }
    violations
}
