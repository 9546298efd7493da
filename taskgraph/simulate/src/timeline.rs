//! The result of a simulation: when each task ran, and the timeline in the format of `mpk-run --trace`.

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
    /// When the worker became free.
    pub free: Ps,
    /// When it began.
    pub begin: Ps,
    /// When it ended.
    pub end: Ps,
    /// Time between begin and end spent waiting for streamed weights.
    pub page: Ps,
    /// What it waited for before `begin`.
    pub waited: Waited,
}

/// The result for one iteration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Each rank's tasks, in the order in which they ended.
    pub records: Vec<Vec<Record>>,
    /// From the start of the iteration to the end of its last task.
    pub iteration: Ps,
    /// From there to the start of the next iteration.
    pub between: Ps,
    /// Bytes that each rank read from its memory.
    pub bytes_read: Vec<u64>,
}

impl Outcome {
    /// Milliseconds per token: an iteration and the time between two.
    pub fn ms_per_token(&self) -> f64 {
        (self.iteration + self.between) as f64 / 1e9
    }
}

/// Writes a timeline of two iterations. The second is a copy of the first, because programs that read timelines
/// expect successive iterations. `ranks`: the number of ranks written, from 0.
///
/// # Errors
/// Errors of `out`.
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
