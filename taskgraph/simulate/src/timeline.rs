//! What a simulation gives: when each task ran, and the timeline in the format of `mpk-run --trace`.

use crate::time::Ps;
use std::io::{self, Write};
use taskgraph::TaskGraph;

/// What a task waited for before it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Waited {
    /// Nothing.
    #[default]
    No,
    /// An event of its rank.
    Event,
    /// Peers: their events, or their flagged words.
    Peer,
    /// Dynamic placement: a task for the worker.
    Queue,
}

/// One task's times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Index of the task.
    pub task: u32,
    /// Its worker.
    pub worker: u32,
    /// From when on the worker had nothing else to do.
    pub free: Ps,
    /// Begin.
    pub begin: Ps,
    /// End.
    pub end: Ps,
    /// Of the time between, waiting for streamed weights.
    pub page: Ps,
    /// What it waited for before `begin`.
    pub waited: Waited,
}

/// One iteration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Each rank's tasks, in the order of their ends.
    pub records: Vec<Vec<Record>>,
    /// From the begin of the iteration to its last end.
    pub iteration: Ps,
    /// From there to the begin of the next one.
    pub between: Ps,
    /// Bytes that each rank read from its memory.
    pub bytes_read: Vec<u64>,
}

impl Outcome {
    /// A token's time, milliseconds: an iteration and what is between two.
    pub fn ms_per_token(&self) -> f64 {
        (self.iteration + self.between) as f64 / 1e9
    }
}

/// Writes a timeline of two iterations, the second one a copy of the first: what reads timelines wants to see one
/// follow another. `ranks`: how many of them, from 0 on.
///
/// # Errors
/// Those of `out`.
pub fn write(outcome: &Outcome, graphs: &[TaskGraph], ranks: usize, out: &mut dyn Write) -> io::Result<()> {
    out.write_all(b"{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n")?;
    let mut first = true;
    let mut line = |out: &mut dyn Write, text: std::fmt::Arguments<'_>| {
        let comma = if std::mem::take(&mut first) { "" } else { ",\n" };
        write!(out, "{comma}{text}")
    };
    for (rank, records) in outcome.records.iter().enumerate().take(ranks) {
        let graph = &graphs[rank];
        let (workers, name) = (graph.workers, quoted(&graph.name));
        line(
            out,
            format_args!(
                r#"{{"ph":"M","name":"process_name","pid":{rank},"args":{{"name":"rank {rank} (simulated)"}}}}"#
            ),
        )?;
        for worker in 0..workers {
            line(
                out,
                format_args!(
                    r#"{{"ph":"M","name":"thread_name","pid":{rank},"tid":{worker},"args":{{"name":"worker {worker}"}}}}"#
                ),
            )?;
        }
        for iteration in 1..=2 {
            let shift = (iteration - 1) * (outcome.iteration + outcome.between);
            if iteration == 2 {
                line(
                    out,
                    format_args!(
                        r#"{{"ph":"X","name":"batch step","cat":"step","pid":{rank},"tid":{workers},"ts":{},"dur":{},"args":{{"iteration":2,"graph":{name}}}}}"#,
                        Micros(outcome.iteration),
                        Micros(outcome.between)
                    ),
                )?;
            }
            for record in records {
                let task = &graph.tasks[record.task as usize];
                let wait = match record.waited {
                    Waited::No => None,
                    Waited::Event => Some("wait event"),
                    Waited::Peer => Some("wait peer"),
                    Waited::Queue => Some("wait queue"),
                };
                if let Some(wait) = wait.filter(|_| record.begin > record.free) {
                    line(
                        out,
                        format_args!(
                            r#"{{"ph":"X","name":"{wait}","cat":"wait","pid":{rank},"tid":{},"ts":{},"dur":{}}}"#,
                            record.worker,
                            Micros(record.free + shift),
                            Micros(record.begin - record.free)
                        ),
                    )?;
                }
                line(
                    out,
                    format_args!(
                        r#"{{"ph":"X","name":{},"cat":"task","pid":{rank},"tid":{},"ts":{},"dur":{},"args":{{"op":{},"task":{},"iteration":{iteration},"graph":{name},"page_us":{}}}}}"#,
                        quoted(graph.type_name(task)),
                        record.worker,
                        Micros(record.begin + shift),
                        Micros(record.end - record.begin),
                        quoted(graph.op_name(task)),
                        record.task,
                        Micros(record.page)
                    ),
                )?;
            }
        }
    }
    out.write_all(b"\n]}\n")
}

/// Picoseconds, shown as microseconds.
struct Micros(Ps);

impl std::fmt::Display for Micros {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{:06}", self.0 / 1_000_000, self.0 % 1_000_000)
    }
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
