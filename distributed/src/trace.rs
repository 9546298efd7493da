//! The timeline: every task of every rank as Chrome trace events (`chrome://tracing`, Perfetto).

use crate::world::World;
use kernels_cu::abi::mpk_trace_record;
use serde_json::json;
use std::io::{self, Write};
use taskgraph::task_graph::TaskGraph;

/// Collective: every rank's events, at rank 0, as text: one after the other, each with a comma and a line end.
///
/// A process is a rank, a thread is a worker. Each task is one slice from the end of its wait to its end; its
/// wait before that is a slice named `wait`. Times are microseconds since the rank's first record: clocks of
/// different ranks on one node are the same clock, so the smallest of all is taken.
pub fn gather(world: &World, graphs: &[TaskGraph], records: &[Vec<mpk_trace_record>]) -> Vec<Vec<u8>> {
    let first = records.iter().flatten().map(|r| r.fetched_ns).min().unwrap_or(u64::MAX);
    let begin = world.all_gather(first).into_iter().min().unwrap_or(0);
    let micros = |ns: u64| ns.saturating_sub(begin) as f64 / 1000.0;
    let rank = world.rank();
    let mut own = String::new();
    let mut add = |value: serde_json::Value| {
        own.push_str(&value.to_string());
        own.push_str(",\n");
    };
    add(json!({"ph":"M","name":"process_name","pid":rank,"args":{"name":format!("rank {rank}")}}));
    for (worker, records) in records.iter().enumerate() {
        add(
            json!({"ph":"M","name":"thread_name","pid":rank,"tid":worker,"args":{"name":format!("worker {worker}")}}),
        );
        for record in records {
            let Some(graph) = graphs.get(usize::from(record.graph)) else { continue };
            let Some(task) = graph.tasks.get(record.task as usize) else { continue };
            if record.ready_ns > record.fetched_ns {
                add(json!({"ph":"X","name":"wait","cat":"wait","pid":rank,"tid":worker,
                    "ts":micros(record.fetched_ns),"dur":(record.ready_ns - record.fetched_ns) as f64 / 1000.0,
                    "args":{"task":record.task}}));
            }
            add(json!({"ph":"X","name":graph.type_name(task),"cat":"task","pid":rank,"tid":worker,
                "ts":micros(record.ready_ns),"dur":record.done_ns.saturating_sub(record.ready_ns) as f64 / 1000.0,
                "args":{"op":graph.op_name(task),"task":record.task,"iteration":record.iteration,
                        "graph":graph.name}}));
        }
    }
    world.gather(own.into_bytes())
}

/// Writes the events that [`gather`] gave as one JSON object.
///
/// # Errors
/// Those of `out`.
pub fn write(events: &[Vec<u8>], out: &mut dyn Write) -> io::Result<()> {
    out.write_all(b"{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n")?;
    let last = events.len().saturating_sub(1);
    for (index, events) in events.iter().enumerate() {
        // The last event has no comma after it.
        let length = if index == last { events.len().saturating_sub(2) } else { events.len() };
        out.write_all(&events[..length])?;
    }
    out.write_all(b"\n]}\n")
}
