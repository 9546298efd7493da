//! Dynamic placement: every task is launched by exactly one event.

use crate::ids::EventId;
use crate::task_graph::{Event, EventType, Task, TaskGraph};
use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

/// Adds `empty` tasks for tasks that wait for several events. Then orders tasks so that those of one event are contiguous, and
/// sets what each event launches.
pub(crate) fn launch_by_one_event(graph: &mut TaskGraph, empty_variant: u16, empty_type: u16) {
    let rank = graph.rank as u16;
    let mut joined: FxHashMap<SmallVec<[u32; 2]>, u32> = FxHashMap::default();
    let mut fan_in: Vec<Task> = Vec::new();
    for task in &mut graph.tasks[2..] {
        if task.dependencies.len() < 2 {
            continue;
        }
        let mut key = task.dependencies.clone();
        key.sort_unstable();
        let event = *joined.entry(key.clone()).or_insert_with(|| {
            let event = graph.events.len() as u32;
            graph.events.push(Event {
                event_type: EventType::LaunchTasks,
                num_triggers: key.len() as u32,
                first_task: 0,
                last_task: 0,
                remote: false,
            });
            fan_in.extend(key.iter().map(|&dependency| {
                empty_task(
                    empty_type,
                    empty_variant,
                    smallvec![dependency],
                    EventId::local(rank, event),
                    None,
                    task.op,
                )
            }));
            event
        });
        task.dependencies = smallvec![event];
    }
    graph.tasks.extend(fan_in);

    let launcher = |task: &Task| task.dependencies.first().copied().unwrap_or(EventId::BEGIN) as usize;
    let mut first = vec![2u32; graph.events.len() + 1];
    graph.tasks[2..].iter().for_each(|t| first[launcher(t) + 1] += 1);
    let counts: Vec<u32> = first[1..].iter().map(|f| f - 2).collect();
    let mut next = 2;
    for (event, count) in graph.events.iter_mut().zip(&counts) {
        if *count == 0 {
            continue;
        }
        (event.first_task, event.last_task) = (next, next + count);
        next += count;
        if event.event_type == EventType::LaunchTasks && !event.remote && *count >= graph.workers {
            event.event_type = EventType::LaunchMassiveTasks;
        }
    }
    let mut at: Vec<u32> = graph.events.iter().map(|e| e.first_task).collect();
    let mut place: Vec<u32> = vec![0, 1];
    place.extend(graph.tasks[2..].iter().map(|task| {
        let slot = &mut at[launcher(task)];
        *slot += 1;
        *slot - 1
    }));
    let mut order: Vec<u32> = vec![0; graph.tasks.len()];
    place.iter().enumerate().for_each(|(from, &to)| order[to as usize] = from as u32);
    let mut taken: Vec<Option<Task>> = std::mem::take(&mut graph.tasks).into_iter().map(Some).collect();
    graph.tasks = order.iter().filter_map(|&from| taken[from as usize].take()).collect();
}

/// A task without operands.
pub(crate) fn empty_task(
    task_type: u16,
    variant: u16,
    dependencies: SmallVec<[u32; 2]>,
    trigger: EventId,
    worker: Option<u32>,
    op: u32,
) -> Task {
    Task {
        task_type,
        variant,
        first_operand: 0,
        num_inputs: 0,
        num_outputs: 0,
        trigger: Some(trigger),
        dependencies,
        carried: SmallVec::new(),
        worker,
        args: [0; 8],
        op,
    }
}
