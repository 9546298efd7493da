//! The timeline: every task of every rank as Chrome trace events (`chrome://tracing`, Perfetto).

use crate::world::World;
use kernels_cu::abi::mpk_trace_record;
use serde_json::json;
use std::io::Write;
use taskgraph::task_graph::TaskGraph;

/// Collective: gathers all ranks' records and writes them, at rank 0, to `path`, whole or not at all.
///
/// A process is a rank, a thread is a worker. Each task is one slice from the end of its wait to its end; its
/// wait before that is a slice named `wait`. Times are microseconds since the rank's first record: clocks of
/// different ranks on one node are the same clock, so the smallest of all is taken.
pub fn write(
    world: &World,
    path: &std::path::Path,
    graphs: &[TaskGraph],
    records: &[Vec<mpk_trace_record>],
) -> std::io::Result<()> {
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
    let all = world.gather(own.into_bytes());
    if rank != 0 {
        return Ok(());
    }
    let mut part = path.as_os_str().to_owned();
    part.push(".part");
    let part = std::path::PathBuf::from(part);
    let written = write_file(&part, all).and_then(|()| std::fs::rename(&part, path));
    if written.is_err() {
        // Nothing half-written stays; the first error is the one to tell.
        let _ = std::fs::remove_file(&part);
    }
    written
}

/// Writes the ranks' events, each text with a comma and a line end after every event, as one JSON object.
fn write_file(path: &std::path::Path, all: Vec<Vec<u8>>) -> std::io::Result<()> {
    let mut file = std::io::BufWriter::new(std::fs::File::create(path)?);
    file.write_all(b"{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n")?;
    let last = all.len().saturating_sub(1);
    for (index, mut events) in all.into_iter().enumerate() {
        if index == last {
            events.truncate(events.len().saturating_sub(2));
        }
        file.write_all(&events)?;
    }
    file.write_all(b"\n]}\n")?;
    file.flush()
}
