//! Statistics of a set of task graphs, for `--check`.

use crate::op_graph::Role;
use crate::task_graph::{Area, Space, TaskGraph, TensorEntry};
use crate::verify::Class;
use crate::words::counted;
use std::collections::{BTreeMap, HashMap};
use std::fmt;

/// Counts of one graph class over all ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Ranks.
    pub ranks: usize,
    /// Tasks of all ranks.
    pub tasks: usize,
    /// Events of all ranks.
    pub events: usize,
    /// Tasks of all ranks by type name.
    pub tasks_by_type: BTreeMap<String, usize>,
    /// Events of all ranks by type.
    pub events_by_type: BTreeMap<String, usize>,
    /// Largest number of tasks on a rank.
    pub most_tasks: usize,
    /// Length of the longest list of a worker.
    pub longest_list: usize,
    /// Bytes of weights and constants, on the rank with the most.
    pub constant_bytes: u64,
    /// Bytes of tensors that persist across iterations, on the rank with the most.
    pub persistent_bytes: u64,
    /// Bytes of other tensors in a rank's own memory, on the rank with the most.
    pub device_bytes: u64,
    /// The part of these bytes that only this graph uses. The rest is in areas that all graphs of a model share.
    pub device_bytes_of_its_own: u64,
    /// Bytes of other tensors in the symmetric heap.
    pub symmetric_bytes: u64,
    /// The part of these bytes that only this graph uses.
    pub symmetric_bytes_of_its_own: u64,
    /// Largest number of triggers that one rank sends to another in one iteration. A remote scheduler queue must hold
    /// that many for each epoch in flight.
    pub remote_triggers: usize,
}

/// The statistics of a class whose ranks may be alike.
pub fn class_stats(class: &Class) -> Stats {
    let mut of_held = stats(class.graphs());
    let each = class.ranks() / of_held.ranks.max(1);
    of_held.ranks *= each;
    of_held.tasks *= each;
    of_held.events *= each;
    let counts = of_held.tasks_by_type.values_mut().chain(of_held.events_by_type.values_mut());
    counts.for_each(|count| *count *= each);
    of_held
}

/// The statistics of the graphs of one class, one graph per rank.
pub fn stats(graphs: &[TaskGraph]) -> Stats {
    let mut stats = Stats { ranks: graphs.len(), ..Stats::default() };
    let mut remote: HashMap<(u32, u16), usize> = HashMap::new();
    for graph in graphs {
        stats.tasks += graph.tasks.len();
        stats.events += graph.events.len();
        stats.most_tasks = stats.most_tasks.max(graph.tasks.len());
        let longest = graph.worker_lists.iter().map(Vec::len).max().unwrap_or(0);
        stats.longest_list = stats.longest_list.max(longest);
        let mut by_type = vec![0; graph.type_names.len()];
        for task in &graph.tasks {
            if let Some(count) = by_type.get_mut(usize::from(task.task_type)) {
                *count += 1;
            }
            if let Some(event) = task.trigger.filter(|e| e.is_nvshmem()) {
                *remote.entry((graph.rank, event.owner())).or_default() += 1;
            }
        }
        for (name, count) in graph.type_names.iter().zip(by_type).filter(|(_, count)| *count > 0) {
            *stats.tasks_by_type.entry(name.clone()).or_default() += count;
        }
        for event in &graph.events {
            *stats.events_by_type.entry(event.event_type.name().into()).or_default() += 1;
        }
        let bytes = |wanted: &dyn Fn(&TensorEntry) -> bool| {
            let tensors = graph.tensors.iter().filter(|t| wanted(t));
            tensors.fold(0u64, |sum, t| sum.saturating_add(t.bytes))
        };
        let constant = |t: &TensorEntry| matches!(t.role, Role::Weight { .. } | Role::Constant);
        let persistent = |t: &TensorEntry| matches!(t.role, Role::Persistent { .. });
        stats.constant_bytes = stats.constant_bytes.max(bytes(&constant));
        stats.persistent_bytes = stats.persistent_bytes.max(bytes(&persistent));
        let in_space = |space: Space| {
            let own =
                |t: &TensorEntry| !constant(t) && !persistent(t) && t.space == space && t.overlay.is_none();
            let areas = |shared: bool| {
                let wanted = Area::ALL.into_iter().filter(|a| a.space() == space && a.is_shared() == shared);
                wanted.map(|area| graph.area_bytes(area)).sum::<u64>()
            };
            (bytes(&own).saturating_add(areas(false)), areas(true))
        };
        let (own, shared) = in_space(Space::Device);
        stats.device_bytes = stats.device_bytes.max(own.saturating_add(shared));
        stats.device_bytes_of_its_own = stats.device_bytes_of_its_own.max(own);
        let (own, shared) = in_space(Space::Symmetric);
        stats.symmetric_bytes = stats.symmetric_bytes.max(own.saturating_add(shared));
        stats.symmetric_bytes_of_its_own = stats.symmetric_bytes_of_its_own.max(own);
    }
    stats.remote_triggers = remote.into_values().max().unwrap_or(0);
    stats
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ranks, tasks) = (counted(self.ranks, "rank"), counted(self.tasks, "task"));
        writeln!(f, "{ranks}, {tasks}, {}", counted(self.events, "event"))?;
        for (what, counts) in [("task", &self.tasks_by_type), ("event", &self.events_by_type)] {
            for (name, &count) in counts {
                let things = counted(count, what);
                let indent = 11usize.saturating_sub(count.to_string().len());
                writeln!(f, "{:indent$}{things} of type {name}", "")?;
            }
        }
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        write!(
            f,
            "  maximum per rank: {}, {} in one worker's list; weights and constants {:.1} MiB, persistent {:.1} MiB, \
             activations {:.1} MiB ({:.1} for this graph alone), symmetric {:.1} MiB ({:.1} for this graph alone); \
             remote triggers from one rank to another: {}",
            counted(self.most_tasks, "task"),
            self.longest_list,
            mib(self.constant_bytes),
            mib(self.persistent_bytes),
            mib(self.device_bytes),
            mib(self.device_bytes_of_its_own),
            mib(self.symmetric_bytes),
            mib(self.symmetric_bytes_of_its_own),
            self.remote_triggers
        )
    }
}
