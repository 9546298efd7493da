//! Explains why a run ended early.

use crate::arrays::any_dynamic;
use crate::error::{Error, Result};
use kernels_cu::abi;
use std::fmt::Write;
use taskgraph::task_graph::TaskGraph;
use taskgraph::words::counted;
use taskgraph::{EventId, TaskId};

/// What an abort code means.
pub fn abort_reason(code: u32) -> &'static str {
    match code {
        abi::MPK_ABORT_DEADLINE => "no progress within the deadline (RunConfig::deadline)",
        abi::MPK_ABORT_DIVERGED => "the ranks disagree on the batch state",
        abi::MPK_ABORT_PEER => "another rank aborted or is lost",
        abi::MPK_ABORT_INTERRUPT => "interrupted",
        abi::MPK_ABORT_KERNEL => "a task found an impossible state",
        abi::MPK_ABORT_QUEUE => "a queue exceeded its proven limit",
        abi::MPK_ABORT_ITERATIONS => {
            "the run has reached 4,294,967,294 iterations, the maximum for one launch; start it again"
        }
        _ => "unknown reason",
    }
}

/// Maximum number of lines of a rank's report. Waits that are only consequences come last and are left out first.
const MOST_LINES: usize = 12;
/// Maximum number of ranges in a list of workers.
const MOST_PIECES: usize = 8;

/// The report of one rank: what was running or waited for, with causes first, and by which workers. There is one line per awaited
/// event and per running operator, however many workers there are.
pub fn report(
    rank: u32,
    code: u32,
    first: u32,
    graphs: &[TaskGraph],
    statuses: &[abi::mpk_status],
    workers: u32,
) -> String {
    let mut text = format!("rank {rank}: run aborted: {}", abort_reason(code));
    if first != rank {
        let _ = write!(text, " (first at rank {first})");
    }
    let mut groups = groups(graphs, statuses);
    let shown = if groups.len() > MOST_LINES { MOST_LINES - 1 } else { groups.len() };
    // The wait that ended the run is always shown.
    if let Some(hidden) = groups.iter().skip(shown).position(|group| group.timed_out)
        && !groups[..shown].iter().any(|group| group.timed_out)
    {
        groups[shown - 1..=shown + hidden].rotate_right(1);
    }
    for group in &groups[..shown] {
        let _ = write!(text, "\n  rank {rank} {}", group.line(graphs, workers));
    }
    if let Some(left) = groups.get(shown..).filter(|left| !left.is_empty()) {
        let loops: usize = left.iter().map(|group| group.who.len()).sum();
        let (waits, of) = (counted(left.len(), "more wait"), counted(loops, "worker"));
        let _ = write!(text, "\n  rank {rank}: {waits}, of {of}, which follow from those above");
    }
    text
}

/// How a rank's launch ended, from what its host met while the kernel ran (`looked`) and how the kernel ended: `aborted` has the abort
/// code and this rank's report. If another rank's error has arrived first, this rank still reports what it waited for, unless its kernel
/// was only interrupted because of that error.
pub(crate) fn outcome(looked: Result<()>, aborted: Option<(u32, String)>) -> Result<()> {
    match (looked, aborted) {
        (Err(error @ Error::AtRank { .. }), Some((abi::MPK_ABORT_INTERRUPT, _))) => Err(error),
        (Err(Error::AtRank { .. }) | Ok(()), Some((_, report))) => Err(Error::Aborted(report)),
        (looked, _) => looked,
    }
}

/// What several workers and schedulers were doing.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Tasks of one operator.
    Runs {
        op: Option<u32>,
    },
    Event {
        event: EventId,
        wanted: u64,
    },
    /// Flagged words that tasks of one operator read.
    Flags {
        op: Option<u32>,
        tag: u64,
    },
    /// Waiting for the next task or iteration. Reported only if this wait ran out of time.
    Work,
}

struct Group {
    iteration: u32,
    graph: u32,
    place: Place,
    /// Indices of statuses.
    who: Vec<u32>,
    /// Their current tasks; for a scheduler, the tasks that could not be launched.
    tasks: Vec<u32>,
    /// The largest count that any of them saw.
    seen: u64,
    timed_out: bool,
}

/// Groups of all workers and schedulers that were not idle. Operators are numbered in the order of their data. So a wait at an
/// earlier operator of an earlier iteration is the cause of a wait at a later one.
fn groups(graphs: &[TaskGraph], statuses: &[abi::mpk_status]) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for (index, status) in statuses.iter().enumerate() {
        let op = graphs
            .get(status.graph as usize)
            .and_then(|graph| graph.tasks.get(status.task as usize))
            .filter(|_| status.task > TaskId::BEGIN)
            .map(|task| task.op);
        let place = match status.state {
            abi::MPK_WORKER_RUNS => Place::Runs { op },
            abi::MPK_WORKER_WAITS_EVENT => {
                Place::Event { event: EventId(status.event), wanted: status.wanted }
            }
            abi::MPK_WORKER_WAITS_FLAG => Place::Flags { op, tag: status.wanted },
            _ if status.timed_out != 0 => Place::Work,
            _ => continue,
        };
        let same =
            |g: &&mut Group| (g.iteration, g.graph, g.place) == (status.iteration, status.graph, place);
        let group = match groups.iter_mut().find(same) {
            Some(group) => group,
            None => {
                groups.push(Group {
                    iteration: status.iteration,
                    graph: status.graph,
                    place,
                    who: Vec::new(),
                    tasks: Vec::new(),
                    seen: status.seen,
                    timed_out: false,
                });
                groups.last_mut().expect("just pushed")
            }
        };
        group.who.push(index as u32);
        if op.is_some() && !group.tasks.contains(&status.task) {
            group.tasks.push(status.task);
        }
        group.seen = group.seen.max(status.seen);
        group.timed_out |= status.timed_out != 0;
    }
    for group in &mut groups {
        group.tasks.sort_unstable();
    }
    groups.sort_by_key(|group| (group.iteration, group.order(graphs)));
    groups
}

impl Group {
    /// The first operator of the group, then its first task. Groups without either come last.
    fn order(&self, graphs: &[TaskGraph]) -> (u32, u32) {
        let graph = graphs.get(self.graph as usize);
        let op = |task: &u32| graph.and_then(|g| g.tasks.get(*task as usize)).map(|task| task.op);
        let first = self.tasks.iter().filter_map(op).min();
        (first.unwrap_or(u32::MAX), self.tasks.first().copied().unwrap_or(u32::MAX))
    }

    fn line(&self, graphs: &[TaskGraph], workers: u32) -> String {
        let graph = graphs.get(self.graph as usize);
        let scheduled = graph.is_none() || any_dynamic(graphs);
        let mut text = names(&self.who, workers, scheduled);
        let many = self.who.len() > 1;
        match self.place {
            Place::Runs { .. } => text.push_str(if many { " were running" } else { " was running" }),
            Place::Event { event, wanted } => {
                let _ = write!(
                    text,
                    " waited for event {} of rank {}{}: count wanted {wanted}, count seen {}",
                    event.index(),
                    event.owner(),
                    if event.is_nvshmem() { " (triggered by peers)" } else { "" },
                    self.seen
                );
            }
            Place::Flags { tag, .. } => {
                let _ = write!(text, " waited for flagged words: tag wanted {tag}, tag seen {}", self.seen);
            }
            Place::Work => text.push_str(" waited for work"),
        }
        let _ = write!(text, ", iteration {}", self.iteration);
        if let Some(graph) = graph
            && let Some(&task) = self.tasks.first()
            && let Some(entry) = graph.tasks.get(task as usize)
        {
            let (kind, op) = (graph.type_name(entry), graph.op_name(entry));
            let _ = write!(text, ", graph {}, ", graph.name);
            if self.tasks.len() > 1 {
                let _ = write!(text, "{} tasks, the first is ", self.tasks.len());
            }
            let _ = write!(text, "task {task} ({kind} of {op})");
        }
        if self.timed_out {
            text.push_str("  <- this wait ran out of time");
        }
        text
    }
}

/// `worker 3`, `workers 0-5, 9 and scheduler 1`. `who` is ascending. Numbers after the workers are schedulers, or the batch step
/// if there are none (not `scheduled`).
fn names(who: &[u32], workers: u32, scheduled: bool) -> String {
    let split = who.partition_point(|&index| index < workers);
    let others: Vec<u32> = who[split..].iter().map(|index| index - workers).collect();
    let list = |name: &str, list: &[u32]| match list {
        [] => None,
        [one] => Some(format!("{name} {one}")),
        several => Some(format!("{name}s {}", ranges(several))),
    };
    let others = if scheduled || others.is_empty() {
        list("scheduler", &others)
    } else {
        Some("the batch step".to_string())
    };
    let texts: Vec<String> = list("worker", &who[..split]).into_iter().chain(others).collect();
    texts.join(" and ")
}

/// `0-5, 9`. If there are many ranges, only the first ones, and how many numbers the others contain.
fn ranges(numbers: &[u32]) -> String {
    let mut pieces: Vec<(u32, u32)> = Vec::new();
    for &number in numbers {
        match pieces.last_mut() {
            Some(last) if last.1 + 1 == number => last.1 = number,
            _ => pieces.push((number, number)),
        }
    }
    let shown = pieces.len().min(MOST_PIECES);
    let mut texts: Vec<String> = pieces[..shown]
        .iter()
        .map(|&(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") })
        .collect();
    let left: u32 = pieces[shown..].iter().map(|(a, b)| b - a + 1).sum();
    if left > 0 {
        texts.push(format!("{left} more"));
    }
    texts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use taskgraph::Placement;
    use taskgraph::op_graph::Capacity;
    use taskgraph::task_graph::Task;

    /// A graph of three operators with `tasks` tasks each: 2, 3 ..., in the order of the operators.
    fn graph(tasks: u32, placement: Placement) -> TaskGraph {
        let task = |op| Task {
            task_type: 0,
            variant: 0,
            first_operand: 0,
            num_inputs: 0,
            num_outputs: 0,
            trigger: None,
            dependencies: Default::default(),
            carried: Default::default(),
            worker: None,
            args: [0; 8],
            op,
        };
        let mut all = vec![task(u32::MAX); 2];
        all.extend((0..3).flat_map(|op| (0..tasks).map(move |_| op)).map(task));
        TaskGraph {
            name: "decode1".into(),
            rank: 0,
            world: 2,
            placement,
            backend: Default::default(),
            workers: tasks,
            capacity: Capacity { rows: 1, samples: 1, active: 1 },
            type_names: vec!["linear".into()],
            ops: ["qkv", "o", "down"].map(String::from).to_vec(),
            tensors: Vec::new(),
            variants: Vec::new(),
            operands: Vec::new(),
            tasks: all,
            events: Vec::new(),
            worker_lists: Vec::new(),
        }
    }

    fn status(state: u32, task: u32) -> abi::mpk_status {
        abi::mpk_status { state, task, iteration: 3, event: u64::MAX, ..Default::default() }
    }

    fn waits(task: u32, event: EventId, wanted: u64, seen: u64) -> abi::mpk_status {
        let state = abi::MPK_WORKER_WAITS_EVENT;
        abi::mpk_status { event: event.0, wanted, seen, ..status(state, task) }
    }

    fn lines(graph: TaskGraph, statuses: &[abi::mpk_status], workers: u32) -> Vec<String> {
        let text = report(0, abi::MPK_ABORT_DEADLINE, 1, &[graph], statuses, workers);
        let mut lines = text.lines();
        assert_eq!(
            lines.next(),
            Some(
                "rank 0: run aborted: no progress within the deadline (RunConfig::deadline) (first at rank 1)"
            )
        );
        lines.map(str::to_string).collect()
    }

    #[test]
    fn causes_come_first_and_idle_workers_are_not_listed() {
        let mut last = waits(8, EventId::nvshmem(0, 5), 12, 8);
        last.timed_out = 1;
        let statuses = [
            waits(6, EventId::local(0, 9), 3, 2),
            waits(5, EventId::local(0, 9), 3, 1),
            status(abi::MPK_WORKER_IDLE, 7),
            status(abi::MPK_WORKER_RUNS, 3),
            last,
            status(abi::MPK_WORKER_LEFT, 4),
        ];
        assert_eq!(
            lines(graph(3, Placement::Dynamic), &statuses, 4),
            [
                "  rank 0 worker 3 was running, iteration 3, graph decode1, task 3 (linear of qkv)",
                "  rank 0 workers 0-1 waited for event 9 of rank 0: count wanted 3, count seen 2, iteration 3, \
                 graph decode1, 2 tasks, the first is task 5 (linear of o)",
                "  rank 0 scheduler 0 waited for event 5 of rank 0 (triggered by peers): count wanted 12, \
                 count seen 8, iteration 3, graph decode1, task 8 (linear of down)  <- this wait ran out of time",
            ]
        );
    }

    #[test]
    fn a_thousand_workers_are_a_line() {
        let mut statuses: Vec<_> = (0..1000).map(|w| waits(1002 + w, EventId::local(0, 7), 8, 4)).collect();
        for flagged in statuses.iter_mut().step_by(2) {
            *flagged = abi::mpk_status { wanted: 6, seen: 5, ..status(abi::MPK_WORKER_WAITS_FLAG, 2) };
        }
        assert_eq!(
            lines(graph(1000, Placement::Static), &statuses, 1000),
            [
                "  rank 0 workers 0, 2, 4, 6, 8, 10, 12, 14, 492 more waited for flagged words: tag wanted 6, \
                 tag seen 5, iteration 3, graph decode1, task 2 (linear of qkv)",
                "  rank 0 workers 1, 3, 5, 7, 9, 11, 13, 15, 492 more waited for event 7 of rank 0: count wanted 8, \
                 count seen 4, iteration 3, graph decode1, 500 tasks, the first is task 1003 (linear of o)",
            ]
        );
    }

    #[test]
    fn only_the_first_of_many_waits_are_listed() {
        let statuses: Vec<_> = (0..100).map(|w| waits(2 + w, EventId::local(0, 7 + w), 8, 4)).rev().collect();
        let told = lines(graph(100, Placement::Static), &statuses, 100);
        assert_eq!(told.len(), MOST_LINES);
        assert!(told[0].contains("worker 99 waited for event 7 "), "{told:?}");
        assert_eq!(
            told.last().map(String::as_str),
            Some("  rank 0: 89 more waits, of 89 workers, which follow from those above")
        );
    }

    #[test]
    fn waits_without_a_task() {
        let mut idle = status(abi::MPK_WORKER_IDLE, 0);
        idle.timed_out = 1;
        let end = waits(0, EventId::local(0, EventId::END_OF_GRAPH), 3, 2);
        assert_eq!(
            lines(graph(1, Placement::Static), &[idle, end], 1),
            [
                "  rank 0 worker 0 waited for work, iteration 3  <- this wait ran out of time",
                "  rank 0 the batch step waited for event 2 of rank 0: count wanted 3, count seen 2, iteration 3",
            ]
        );
    }

    /// If there are very many waits, only some are listed. The one that ran out of time is always listed, even if its
    /// operator is a late one.
    #[test]
    fn the_wait_that_ran_out_of_time_is_always_listed() {
        let graph = graph(20, Placement::Static);
        let mut statuses: Vec<_> = (0..20).map(|i| waits(2 + i, EventId::local(0, 3 + i), 1, 0)).collect();
        statuses[17].timed_out = 1;
        let lines = lines(graph, &statuses, 20);
        assert_eq!(lines.len(), MOST_LINES);
        assert!(lines[0].contains("worker 0 waited for event 3 "), "{lines:?}");
        assert!(lines[MOST_LINES - 2].contains("worker 17 waited for event 20 "), "{lines:?}");
        assert!(lines[MOST_LINES - 2].ends_with("<- this wait ran out of time"), "{lines:?}");
        assert_eq!(
            lines[MOST_LINES - 1],
            "  rank 0: 9 more waits, of 9 workers, which follow from those above"
        );
    }

    /// Another rank's error often arrives before this rank's kernel has ended. This rank's own report must not be lost
    /// then.
    #[test]
    fn a_rank_reports_what_it_waited_for_although_another_rank_has_failed_first() {
        let other = || Err(Error::AtRank { rank: 0, status: 4, message: "its report".into() });
        let own = |code| Some((code, "own report".to_string()));
        let text = |looked, aborted| outcome(looked, aborted).map_err(|error| error.to_string());
        assert_eq!(text(other(), own(abi::MPK_ABORT_DEADLINE)), Err("own report".into()));
        assert_eq!(text(other(), own(abi::MPK_ABORT_INTERRUPT)), Err("rank 0: its report".into()));
        assert_eq!(text(other(), None), Err("rank 0: its report".into()));
        assert_eq!(text(Ok(()), own(abi::MPK_ABORT_INTERRUPT)), Err("own report".into()));
        assert_eq!(text(Ok(()), None), Ok(()));
        let host = Err(Error::Aborted("the host's own error".into()));
        assert_eq!(text(host, own(abi::MPK_ABORT_INTERRUPT)), Err("the host's own error".into()));
    }
}
