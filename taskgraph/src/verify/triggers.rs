//! Counts the triggers over all ranks.

use super::ranks::Ranks;
use super::report::{Names, Violation, ViolationKind};
use super::structure::KEEP;
use crate::ids::EventId;

/// Checks that every event gets exactly the triggers that it waits for, from the side that it declares.
pub(super) fn triggers(graphs: Ranks<'_>) -> Vec<Violation> {
    let held = graphs.held();
    let mut counts: Vec<Vec<(u32, u32)>> = held.iter().map(|g| vec![(0, 0); g.events.len()]).collect();
    // What rank 0 triggers on a rank that is like it, another such rank triggers on rank 0.
    let alike = graphs.symmetry().is_some();
    for graph in held {
        for event in graph.tasks.iter().filter_map(|t| t.trigger) {
            let owner = if alike { 0 } else { usize::from(event.owner()) };
            let count = &mut counts[owner][event.index() as usize];
            if event.is_nvshmem() {
                count.1 += 1;
            } else {
                count.0 += 1;
            }
        }
    }
    let names = Names { graphs };
    let mut violations = Vec::new();
    for (rank, graph) in held.iter().enumerate() {
        for (index, event) in graph.events.iter().enumerate().skip(1) {
            let (local, remote) = counts[rank][index];
            let sum = u64::from(local) + u64::from(remote);
            let (right, wrong) = if event.remote { (remote, local) } else { (local, remote) };
            let matched = sum == u64::from(event.num_triggers);
            if matched && wrong == 0 && right > 0 || violations.len() >= KEEP {
                continue;
            }
            let id = |e: EventId| usize::from(e.owner()) == rank && e.index() as usize == index;
            let who: Vec<(u16, u32)> = graphs
                .iter()
                .enumerate()
                .flat_map(|(r, g)| {
                    g.tasks
                        .iter()
                        .enumerate()
                        .filter(|(_, t)| t.trigger.is_some_and(id))
                        .map(move |(i, _)| (r as u16, i as u32))
                })
                .take(4)
                .collect();
            let waiters =
                graph.tasks.iter().enumerate().filter(|(_, t)| t.dependencies.contains(&(index as u32)));
            let mut tasks = who.clone();
            tasks.extend(waiters.take(2).map(|(i, _)| (rank as u16, i as u32)));
            let by: Vec<String> = who.iter().map(|&t| names.task(t)).collect();
            let by = if by.is_empty() { "no task".to_string() } else { by.join(", ") };
            let event_name = names.event(rank, index as u32);
            let message = if !matched {
                format!(
                    "{event_name} waits for {} triggers in an iteration, but gets {sum} ({by}{})",
                    event.num_triggers,
                    if sum > who.len() as u64 { ", .." } else { "" }
                )
            } else if right == 0 && wrong == 0 {
                format!("{event_name} is triggered by no task")
            } else {
                format!(
                    "{event_name} says that {} trigger it, but {wrong} of its triggers come from {} ({by})",
                    if event.remote { "other ranks" } else { "its own rank's tasks" },
                    if event.remote { "its own rank" } else { "other ranks" },
                )
            };
            violations.push(Violation::new(ViolationKind::Triggers, &tasks, message));
        }
    }
    violations
}
