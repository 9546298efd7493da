//! Why a run ended early, in words.

use kernels_cu::abi;
use std::fmt::Write;
use taskgraph::task_graph::TaskGraph;
use taskgraph::{EventId, TaskId};

/// What an abort code means.
pub fn abort_reason(code: u32) -> &'static str {
    match code {
        abi::MPK_ABORT_DEADLINE => "no progress within the deadline (--deadline)",
        abi::MPK_ABORT_DIVERGED => "the ranks disagree on the batch state",
        abi::MPK_ABORT_PEER => "another rank aborted or is lost",
        abi::MPK_ABORT_INTERRUPT => "interrupted",
        abi::MPK_ABORT_KERNEL => "a task met something impossible",
        abi::MPK_ABORT_QUEUE => "a queue bound that was proven did not hold",
        _ => "unknown reason",
    }
}

/// The report of one rank: who waits where, for what, and what it saw.
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
    for (index, status) in statuses.iter().enumerate() {
        let who = match (index as u32).checked_sub(workers) {
            None => format!("worker {index}"),
            Some(scheduler) => format!("scheduler {scheduler}"),
        };
        let what = match status.state {
            abi::MPK_WORKER_WAITS_EVENT => "waited for an event",
            abi::MPK_WORKER_WAITS_FLAG => "waited for flagged words",
            abi::MPK_WORKER_RUNS => "was running",
            abi::MPK_WORKER_LEFT if status.timed_out != 0 => "timed out",
            _ => continue,
        };
        let _ = write!(text, "\n  rank {rank} {who} {what}, iteration {}", status.iteration);
        // Of a scheduler: the task that could not be launched.
        if status.task > TaskId::BEGIN
            && let Some(graph) = graphs.get(status.graph as usize)
            && let Some(task) = graph.tasks.get(status.task as usize)
        {
            let _ = write!(
                text,
                ", graph {}, task {} ({} of {})",
                graph.name,
                status.task,
                graph.type_name(task),
                graph.op_name(task)
            );
        }
        if status.state == abi::MPK_WORKER_WAITS_FLAG {
            let _ = write!(text, ": epoch wanted {}, epoch seen {}", status.wanted, status.seen);
        }
        if status.event != EventId::INVALID.0 && status.state != abi::MPK_WORKER_RUNS {
            let event = EventId(status.event);
            let _ = write!(
                text,
                ", event {} of rank {}{}: count wanted {}, count seen {}",
                event.index(),
                event.owner(),
                if event.is_nvshmem() { " (triggered by peers)" } else { "" },
                status.wanted,
                status.seen
            );
        }
        if status.timed_out != 0 {
            text.push_str("  <- this wait ran out of time");
        }
    }
    text
}
