//! Graphs of one model that follow each other: what they share is the same everywhere, and what one touches
//! at its end is ordered before what another touches at its start.

use super::access::{Access, Memory, Symmetric};
use super::memory::across_message;
use super::order::{Bound, Kind, Order};
use super::overlay;
use super::report::{Names, Violation, ViolationKind};
use crate::dtype::DType;
use crate::op_graph::Role;
use crate::task_graph::{Space, TaskGraph, TensorEntry};
use std::collections::HashMap;

/// The tensor is the same memory in every graph that has one of its name.
fn keeps(tensor: &TensorEntry) -> bool {
    matches!(tensor.role, Role::Weight { .. } | Role::Constant | Role::Persistent { .. })
}

/// Accesses of one class to a shared tensor of one rank that other ranks touch in some class.
struct Shared<'g> {
    memory: &'g Memory<'g>,
    tensor: usize,
    bound: Bound,
    writes: bool,
}

pub(super) fn check(classes: &[(Order<'_>, Symmetric)]) -> Vec<Violation> {
    let mut violations = same_tensors(classes);
    if !violations.is_empty() || classes.len() < 2 {
        return violations;
    }
    let world = classes[0].0.graphs.len();
    for rank in 0..world {
        // Within one rank its barrier orders everything; only what other ranks write needs a look.
        let mut remote: std::collections::HashSet<&str> = std::collections::HashSet::new();
        // What lies over other tensors is compared by its bytes.
        let by_name = |t: &TensorEntry| t.overlay.is_none();
        let shared = |t: &TensorEntry| keeps(t) || t.space == Space::Symmetric || t.overlay.is_some();
        let memories: Vec<Memory<'_>> = classes
            .iter()
            .map(|(order, symmetric)| {
                let graphs = order.graphs;
                let own: Vec<u32> = (0..graphs[rank].tasks.len() as u32).collect();
                let wanted = |t: usize| {
                    let tensor = &graphs[rank].tensors[t];
                    shared(tensor) && !matches!(tensor.role, Role::Weight { .. } | Role::Constant)
                };
                Memory::new(graphs, symmetric, rank, &own, wanted)
            })
            .collect();
        for ((order, _), memory) in classes.iter().zip(&memories) {
            let tensors = order.graphs[rank].tensors.iter().enumerate();
            let tensors = tensors.filter(|(t, tensor)| memory.is_remote(*t) && by_name(tensor));
            remote.extend(tensors.map(|(_, t)| t.name.as_str()));
        }
        violations.extend(overlay::across(classes, &memories));
        if violations.len() >= 16 {
            return violations;
        }
        let tables: Vec<HashMap<&str, Shared<'_>>> = classes
            .iter()
            .zip(&memories)
            .map(|((order, _), memory)| {
                let mut table = HashMap::new();
                for (t, tensor) in order.graphs[rank].tensors.iter().enumerate() {
                    let compared = by_name(tensor) && remote.contains(tensor.name.as_str());
                    if compared && !memory.accesses(t).is_empty() {
                        let mut bound = order.no_tasks(tensor.dtype == DType::F32Flagged);
                        for a in memory.accesses(t) {
                            order.add(&mut bound, order.task_number(a.rank.into(), a.task));
                        }
                        let writes = memory.accesses(t).iter().any(|a| a.write);
                        table.insert(tensor.name.as_str(), Shared { memory, tensor: t, bound, writes });
                    }
                }
                table
            })
            .collect();
        for (from, before) in tables.iter().enumerate() {
            for (to, after) in tables.iter().enumerate() {
                if from == to {
                    continue;
                }
                for (name, first) in before {
                    let Some(second) = after.get(name) else { continue };
                    if (first.writes || second.writes) && !first.bound.all_cross_barrier(&second.bound) {
                        let orders = (&classes[from].0, &classes[to].0);
                        violations.extend(pairs(orders, (first, second), rank, name));
                        if violations.len() >= 16 {
                            return violations;
                        }
                    }
                }
            }
        }
    }
    violations
}

/// The first unordered pair of accesses to a shared tensor.
fn pairs(
    (order, next): (&Order<'_>, &Order<'_>),
    (first, second): (&Shared<'_>, &Shared<'_>),
    rank: usize,
    name: &str,
) -> Option<Violation> {
    let space = |o: &Order<'_>, s: &Shared<'_>| o.graphs[rank].tensors[s.tensor].region_dims.clone();
    let comparable = space(order, first) == space(next, second);
    let flagged = order.graphs[rank].tensors[first.tensor].dtype == DType::F32Flagged;
    let number = |o: &Order<'_>, x: &Access| o.task_number(x.rank.into(), x.task);
    let overlap = |b: &Access, a: &Access| !comparable || b.region.overlaps(&a.region);
    let accesses = first.memory.accesses(first.tensor);
    for b in accesses {
        // Who has read a flagged word has seen its write: what comes after the read comes after both.
        let read = flagged && accesses.iter().any(|r| !r.write && overlap(b, r));
        for a in second.memory.accesses(second.tensor) {
            if !(a.write || b.write) || !overlap(b, a) {
                continue;
            }
            let kind = Kind::of(b.write, a.write);
            if flagged && (kind == Kind::Data || kind == Kind::Overwrite && read) {
                continue;
            }
            let (earlier, later) = (number(order, b), number(next, a));
            if !order.crosses_barrier(earlier, next, later, kind) {
                let named = |graphs: &[TaskGraph], x: &Access| {
                    format!("{} in graph '{}'", Names { graphs }.task(x.place()), graphs[0].name)
                };
                let names = (named(order.graphs, b), named(next.graphs, a));
                let message = across_message(order, next, earlier, later, (&names.0, &names.1))
                    + &format!(": both touch '{name}' in rank {rank}'s memory, and at least one writes");
                return Some(Violation::new(
                    ViolationKind::UnorderedAcrossEpochs,
                    &[b.place(), a.place()],
                    message,
                ));
            }
        }
    }
    None
}

/// Tensors that live across graphs are the same in all of them.
fn same_tensors(classes: &[(Order<'_>, Symmetric)]) -> Vec<Violation> {
    let mut violations = Vec::new();
    let say = |message: String| Violation::new(ViolationKind::Shared, &[], message);
    let Some((first, _)) = classes.first() else { return violations };
    if let Some((other, _)) = classes.iter().find(|(o, _)| o.graphs.len() != first.graphs.len()) {
        violations.push(say(format!(
            "graph '{}' is for {} ranks, graph '{}' for {}",
            first.graphs[0].name,
            first.graphs.len(),
            other.graphs[0].name,
            other.graphs.len()
        )));
        return violations;
    }
    for rank in 0..first.graphs.len() {
        let mut known: HashMap<&str, (&TensorEntry, &str)> = HashMap::new();
        for (order, _) in classes {
            let graph = &order.graphs[rank];
            for tensor in graph.tensors.iter().filter(|t| keeps(t)) {
                let (other, name) = *known.entry(&tensor.name).or_insert((tensor, &graph.name));
                let same = tensor.dtype == other.dtype
                    && tensor.dims == other.dims
                    && tensor.strides == other.strides
                    && tensor.space == other.space
                    && tensor.bytes == other.bytes
                    && tensor.parts == other.parts
                    && tensor.tiled == other.tiled
                    && keeps(other);
                if !same && violations.len() < 16 {
                    violations.push(say(format!(
                        "rank {rank}: '{}' is {} {:?} ({} bytes) in graph '{}' and {} {:?} ({} bytes) in graph '{name}', \
                         but lives across graphs",
                        tensor.name, tensor.dtype, tensor.dims, tensor.bytes, graph.name, other.dtype, other.dims, other.bytes
                    )));
                }
            }
        }
    }
    violations
}
