//! The timeline: every task of every rank as Chrome trace events (`chrome://tracing`, Perfetto).
//!
//! A process is a rank, and a thread is a worker. A task is a slice from the end of its wait to its end. The time before it is a slice
//! with the category `wait`, named after what was missing:
//!
//! - `wait event`: an event that this rank's tasks trigger;
//! - `wait peer`: an event that peers trigger, or flagged words. A wait for words happens inside the task; it is drawn at the task's
//!   begin;
//! - `wait queue`: with dynamic placement, the worker's queues were empty;
//! - `wait end`: the worker has done its share of an iteration, and others still work on it;
//! - `wait batch step`: nothing runs on the rank until the next iteration is published.
//!
//! On a GPU, the time that a task waits for streamed weights is its argument `page_us`. One more thread shows the batch steps: each until
//! it publishes its result, and then the time to hand out results.

use crate::world::World;
use kernels_cu::abi::{self, mpk_trace_record as Record};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::ops::Range;
use taskgraph::task_graph::TaskGraph;

/// Maximum number of records of a row.
const MOST_RECORDS: u64 = 1 << 17;
/// Unless a number of iterations is requested, as many of the last iterations are written as fit in this many bytes, and at least one.
const MOST_BYTES: usize = 19_500_000;

/// The clock of a rank's records. It is the same for the ranks of a node, and may differ between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// The host's clock. Messages measure the difference between two nodes.
    Host,
    /// The GPUs' clocks. The first records of all nodes are assumed to be at the same moment.
    Device,
}

/// The clock of the CPU target's loops (`clock_ns` in protocol/platform/cpu.h).
fn monotonic_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a valid out-pointer; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Number of rows of records: one per worker, and one for the batch step.
pub(crate) fn rows(workers: u32) -> u64 {
    u64::from(workers) + 1
}

/// Number of records per row, a power of two, if all rows together have at most `bytes`.
pub(crate) fn capacity(workers: u32, bytes: u64) -> u64 {
    let fit = bytes / size_of::<Record>() as u64 / rows(workers);
    if fit >= MOST_RECORDS { MOST_RECORDS } else { (fit / 2 + 1).next_power_of_two() }
}

/// The newest records of a row, oldest first.
#[derive(Clone, Debug, Default)]
pub struct Row {
    /// The records.
    pub records: Vec<Record>,
    /// True if older records are lost.
    pub cut: bool,
}

impl Row {
    /// Reads the row's memory. `count` records have been written; if there were too many, the oldest were overwritten.
    pub(crate) fn new(mut ring: Vec<Record>, count: u64) -> Row {
        let places = ring.len() as u64;
        if count > places {
            ring.rotate_left((count % places) as usize);
        } else {
            ring.truncate(count as usize);
        }
        Row { records: ring, cut: count > places }
    }

    /// Indices of an iteration's records.
    fn of(&self, iteration: u32) -> Range<usize> {
        let first = self.records.partition_point(|r| r.iteration < iteration);
        first..self.records.partition_point(|r| r.iteration <= iteration)
    }
}

/// One rank's timeline.
struct Timeline<'a> {
    rank: u32,
    graphs: &'a [TaskGraph],
    workers: &'a [Row],
    steps: &'a Row,
    /// The job's first moment.
    begin_ns: u64,
    /// When the last task of each iteration ended.
    ends: BTreeMap<u32, u64>,
}

impl<'a> Timeline<'a> {
    fn new(rank: u32, graphs: &'a [TaskGraph], workers: &'a [Row], steps: &'a Row, begin_ns: u64) -> Self {
        let mut ends = BTreeMap::new();
        for record in workers.iter().flat_map(|row| &row.records) {
            let end = ends.entry(record.iteration).or_insert(0);
            *end = record.done_ns.max(*end);
        }
        Timeline { rank, graphs, workers, steps, begin_ns, ends }
    }

    /// The first iteration with complete records.
    fn first_whole(&self) -> u32 {
        let cut = self.workers.iter().filter(|row| row.cut);
        cut.filter_map(|row| row.records.first()).map(|record| record.iteration + 1).max().unwrap_or(0)
    }

    /// Names of the process and its threads.
    fn names(&self) -> String {
        let (rank, mut out) = (self.rank, String::new());
        let mut name = |what: &str, thread: &str, name: &str| {
            line(
                &mut out,
                format_args!(
                    r#"{{"ph":"M","name":"{what}","pid":{rank}{thread},"args":{{"name":"{name}"}}}}"#
                ),
            );
        };
        name("process_name", "", &format!("rank {rank}"));
        for worker in 0..self.workers.len() {
            name("thread_name", &format!(r#","tid":{worker}"#), &format!("worker {worker}"));
        }
        name("thread_name", &format!(r#","tid":{}"#, self.workers.len()), "between iterations");
        // The origin of all times. On the CPU target it is a time of CLOCK_MONOTONIC, which other programs can read too.
        line(
            &mut out,
            format_args!(
                r#"{{"ph":"M","name":"begin","pid":{rank},"args":{{"name":"begin","ns":{}}}}}"#,
                self.begin_ns
            ),
        );
        out
    }

    /// All slices of an iteration, and of the wait before it.
    fn iteration(&self, iteration: u32) -> String {
        let mut out = String::new();
        let step = self.steps.records[self.steps.of(iteration)].first();
        if let Some(step) = step {
            let thread = self.workers.len();
            let graph = self.graphs.get(usize::from(step.graph)).map_or("", |g| &g.name);
            let arguments = format!(
                r#","args":{{"iteration":{iteration},"graph":{},"active":{},"rows":{},"context":{}}}"#,
                quoted(graph),
                step.waited_for,
                step.peer_ns,
                step.page_ns
            );
            self.slice(&mut out, thread, "batch step", "step", step.fetched_ns..step.ready_ns, &arguments);
            self.slice(&mut out, thread, "hand out", "step", step.ready_ns..step.done_ns, "");
        }
        for (worker, row) in self.workers.iter().enumerate() {
            let places = row.of(iteration);
            if places.is_empty() {
                continue;
            }
            let before = places.start.checked_sub(1).map(|before| row.records[before]);
            let mut free = before.map_or(0, |record| record.done_ns);
            if let (Some(before), Some(step)) = (before, step) {
                let end = self.ends.get(&before.iteration).map_or(free, |&end| end.max(free));
                let published = step.ready_ns.max(end);
                self.slice(&mut out, worker, "wait end", "wait", free..end, "");
                self.slice(&mut out, worker, "wait batch step", "wait", end..published, "");
                free = published;
            }
            for record in &row.records[places] {
                self.task(&mut out, worker, record, free);
                free = record.done_ns;
            }
        }
        out
    }

    /// A task, and the wait before it. The worker was `free` from that time on.
    fn task(&self, out: &mut String, worker: usize, record: &Record, free: u64) {
        let Some(graph) = self.graphs.get(usize::from(record.graph)) else { return };
        let Some(task) = graph.tasks.get(record.task as usize) else { return };
        let remote = |event: u32| graph.events.get(event as usize).is_some_and(|e| e.remote);
        let wait = match record.waited_for {
            abi::MPK_TRACE_NO_WAIT => None,
            abi::MPK_TRACE_QUEUE => Some("wait queue"),
            abi::MPK_TRACE_HELD => Some("wait peer"),
            number => {
                // In the order of the ABI: those of this iteration, then those of earlier ones.
                let carried = task.carried.iter().map(|&(event, _)| event);
                let event = task.dependencies.iter().copied().chain(carried).nth(number as usize);
                Some(if event.is_some_and(remote) { "wait peer" } else { "wait event" })
            }
        };
        if let Some(wait) = wait {
            self.slice(out, worker, wait, "wait", record.fetched_ns.max(free)..record.ready_ns, "");
        }
        let begin = record.done_ns.min(record.ready_ns + u64::from(record.peer_ns));
        self.slice(out, worker, "wait peer", "wait", record.ready_ns..begin, "");
        let page = match record.page_ns {
            0 => String::new(),
            ns => format!(r#","page_us":{}"#, Micros(ns.into())),
        };
        let arguments = format!(
            r#","args":{{"op":{},"task":{},"iteration":{},"graph":{}{page}}}"#,
            quoted(graph.op_name(task)),
            record.task,
            record.iteration,
            quoted(&graph.name)
        );
        // Has length 0 if it has only waited, so that every task has a slice.
        self.write(out, worker, graph.type_name(task), "task", begin..record.done_ns, &arguments);
    }

    fn slice(
        &self,
        out: &mut String,
        thread: usize,
        name: &str,
        category: &str,
        ns: Range<u64>,
        arguments: &str,
    ) {
        if !ns.is_empty() {
            self.write(out, thread, name, category, ns, arguments);
        }
    }

    fn write(
        &self,
        out: &mut String,
        thread: usize,
        name: &str,
        category: &str,
        ns: Range<u64>,
        arguments: &str,
    ) {
        let (from, took) = (ns.start.saturating_sub(self.begin_ns), ns.end.saturating_sub(ns.start));
        line(
            out,
            format_args!(
                r#"{{"ph":"X","name":{},"cat":"{category}","pid":{},"tid":{thread},"ts":{},"dur":{}{arguments}}}"#,
                quoted(name),
                self.rank,
                Micros(from),
                Micros(took)
            ),
        );
    }
}

/// A number of nanoseconds that is shown in microseconds.
struct Micros(u64);

impl std::fmt::Display for Micros {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{:03}", self.0 / 1000, self.0 % 1000)
    }
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

fn line(out: &mut String, event: std::fmt::Arguments<'_>) {
    // Writing to memory does not fail.
    let _ = writeln!(out, "{event},");
}

/// Collective: returns all ranks' events as text on rank 0, one after the other, each followed by a comma and a line end. They cover the
/// last `iterations` iterations, or without that number as many as make a file of 20 MB.
///
/// `rows` are those of the workers, then that of the batch step, with times of `clock`. Written times are microseconds since the job's
/// first record.
pub fn gather(
    world: &World,
    graphs: &[TaskGraph],
    rows: &[Row],
    clock: Clock,
    iterations: Option<u32>,
) -> Vec<Vec<u8>> {
    let first = rows.iter().filter_map(|row| row.records.first()).map(|r| r.fetched_ns).min();
    let firsts = world.all_gather(first.unwrap_or(u64::MAX));
    let lead = match clock {
        Clock::Host => world.clock_lead(monotonic_ns),
        Clock::Device => {
            let first = |rank: u32| {
                let nodes = world.nodes();
                let others = (0..world.size()).filter(|&other| nodes.share(rank, other));
                others.map(|other| firsts[other as usize]).min()
            };
            first(0).unwrap_or(0).wrapping_sub(first(world.rank()).unwrap_or(0)) as i64
        }
    };
    let leads = world.all_gather(lead as u64);
    let begin = firsts.iter().zip(leads).filter(|(first, _)| **first != u64::MAX);
    let begin = begin.map(|(first, lead)| first.wrapping_add(lead)).min().unwrap_or(0);
    let begin_ns = begin.wrapping_sub(lead as u64);
    let none = Row::default();
    let (steps, workers) = rows.split_last().unwrap_or((&none, &[]));
    let timeline = Timeline::new(world.rank(), graphs, workers, steps, begin_ns);
    // Starts with the newest, and stops when this rank alone fills the file.
    let (mut own, mut bytes) = (Vec::new(), 0);
    let whole = timeline.ends.keys().rev().take_while(|&&iteration| iteration >= timeline.first_whole());
    for &iteration in whole.take(iterations.map_or(usize::MAX, |count| count as usize)) {
        if iterations.is_none() && bytes > MOST_BYTES {
            break;
        }
        let text = timeline.iteration(iteration);
        bytes += text.len();
        own.push((iteration, text));
    }
    let sizes = own.iter().flat_map(|(iteration, text)| [u64::from(*iteration), text.len() as u64]);
    let sizes = world.gather(sizes.flat_map(u64::to_le_bytes).collect());
    let from = if world.rank() == 0 { first_iteration(&sizes, iterations) } else { 0 };
    let from = world.broadcast(0, from.to_le_bytes().to_vec());
    let from = from.try_into().map_or(0, u32::from_le_bytes);
    let mut out = timeline.names();
    for (_, text) in own.iter().rev().filter(|(iteration, _)| *iteration >= from) {
        out.push_str(text);
    }
    world.gather(out.into_bytes())
}

/// The first iteration to write: all ranks have it and all later ones, and there is room for them. `sizes` has each rank's pairs of
/// iteration and bytes.
fn first_iteration(sizes: &[Vec<u8>], iterations: Option<u32>) -> u32 {
    let mut totals: BTreeMap<u64, (usize, u64)> = BTreeMap::new();
    for sizes in sizes {
        let (words, _) = sizes.as_chunks::<8>();
        for pair in words.chunks_exact(2) {
            let (iteration, bytes) = (u64::from_le_bytes(pair[0]), u64::from_le_bytes(pair[1]));
            let total = totals.entry(iteration).or_default();
            *total = (total.0 + 1, total.1 + bytes);
        }
    }
    let (mut first, mut all) = (None, 0);
    for (&iteration, &(ranks, bytes)) in totals.iter().rev() {
        all += bytes;
        if ranks < sizes.len() || (first.is_some() && iterations.is_none() && all > MOST_BYTES as u64) {
            break;
        }
        first = Some(iteration);
    }
    first.map_or(u32::MAX, |iteration| iteration as u32)
}

/// Writes the events that [`gather`] gave as one JSON object.
///
/// # Errors
/// Those of `out`.
pub fn write(events: &[Vec<u8>], out: &mut dyn Write) -> io::Result<()> {
    out.write_all(b"{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n")?;
    let last = events.len().saturating_sub(1);
    for (index, events) in events.iter().enumerate() {
        // The last event has no comma.
        let length = if index == last { events.len().saturating_sub(2) } else { events.len() };
        out.write_all(&events[..length])?;
    }
    out.write_all(b"\n]}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(iteration: u32, done_ns: u64) -> Record {
        Record { iteration, done_ns, ..Record::default() }
    }

    #[test]
    fn capacities_are_powers_of_two_that_fit() {
        for (workers, bytes) in [(1, 1 << 30), (132, 512 << 20), (132, 1 << 20), (8, 1000)] {
            let capacity = capacity(workers, bytes);
            assert!(capacity.is_power_of_two());
            let taken = capacity * rows(workers) * size_of::<Record>() as u64;
            assert!(taken <= bytes || capacity == 1, "{workers} workers, {bytes} bytes: {capacity}");
        }
        assert_eq!(capacity(2, 1 << 40), MOST_RECORDS);
    }

    #[test]
    fn a_row_keeps_the_newest_records_in_order() {
        let ring = |times: &[u64]| times.iter().map(|&t| record(t as u32, t)).collect::<Vec<_>>();
        let times = |row: &Row| row.records.iter().map(|r| r.done_ns).collect::<Vec<_>>();
        let row = Row::new(ring(&[1, 2, 0, 0]), 2);
        assert_eq!((times(&row), row.cut), (vec![1, 2], false));
        let row = Row::new(ring(&[1, 2, 3, 4]), 4);
        assert_eq!((times(&row), row.cut), (vec![1, 2, 3, 4], false));
        let row = Row::new(ring(&[5, 6, 3, 4]), 6);
        assert_eq!((times(&row), row.cut), (vec![3, 4, 5, 6], true));
        assert_eq!(row.of(5), 2..3);
        assert_eq!(row.of(7), 4..4);
    }

    #[test]
    fn a_file_has_the_last_iterations_of_all_ranks_that_have_room() {
        let sizes = |pairs: &[(u64, u64)]| {
            pairs.iter().flat_map(|&(i, b)| [i, b]).flat_map(u64::to_le_bytes).collect::<Vec<u8>>()
        };
        let most = MOST_BYTES as u64;
        let big = [sizes(&[(9, most / 2), (8, most / 4), (7, most)]), sizes(&[(9, 10), (8, 10), (7, 10)])];
        assert_eq!(first_iteration(&big, None), 8);
        assert_eq!(first_iteration(&big, Some(3)), 7, "as many as are asked for");
        let one = [sizes(&[(9, 5 * most)])];
        assert_eq!(first_iteration(&one, None), 9, "one at least");
        let uneven = [sizes(&[(9, 1), (8, 1)]), sizes(&[(9, 1)])];
        assert_eq!(first_iteration(&uneven, None), 9, "what one rank has lost is left out");
    }

    #[test]
    fn the_step_between_iterations_is_a_slice_of_its_own() {
        let none: [TaskGraph; 0] = [];
        let workers = [Row { records: vec![record(1, 100), record(2, 500)], cut: false }];
        let step = Record {
            fetched_ns: 120,
            ready_ns: 200,
            done_ns: 260,
            waited_for: 3,
            peer_ns: 5,
            page_ns: 77,
            ..record(2, 260)
        };
        let steps = Row { records: vec![step], cut: false };
        let text = Timeline::new(0, &none, &workers, &steps, 0).iteration(2);
        assert!(
            text.contains(r#""name":"batch step","cat":"step","pid":0,"tid":1,"ts":0.120,"dur":0.080"#),
            "{text}"
        );
        assert!(text.contains(r#""active":3,"rows":5,"context":77}"#), "{text}");
        assert!(
            text.contains(r#""name":"hand out","cat":"step","pid":0,"tid":1,"ts":0.200,"dur":0.060"#),
            "{text}"
        );
        assert!(
            text.contains(r#""name":"wait batch step","cat":"wait","pid":0,"tid":0,"ts":0.100,"dur":0.100"#),
            "{text}"
        );
    }
}
