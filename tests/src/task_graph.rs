//! Emitted task graphs, read from the format's description and without the code that wrote them: the conditions
//! on all ranks' graphs together, and a simulation of one iteration.

use crate::{Job, ModelFile};
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::path::Path;

/// No event.
pub const INVALID_EVENT: u64 = u64::MAX;
/// Tag of an event that a peer triggers.
pub const TAG_NVSHMEM: u64 = 1;

/// rank-R.task_graph.json.
#[derive(Debug, Deserialize)]
pub struct Graph {
    /// "mpk-task-graph/1".
    pub schema: String,
    /// Name, such as `decode-8`.
    pub name: String,
    /// This rank.
    pub rank: u32,
    /// Number of ranks.
    pub world: u32,
    /// "static" or "dynamic".
    pub placement: String,
    /// Workers that it was built for.
    pub workers: u32,
    /// Names of operators.
    pub ops: Vec<String>,
    /// All tensors.
    pub tensors: Vec<Tensor>,
    /// By index; 0 terminates, 1 begins.
    pub all_tasks: Vec<Task>,
    /// By index.
    pub all_events: Vec<Event>,
    /// Where an iteration starts.
    pub first_tasks: Vec<u32>,
    /// Static placement: each worker's tasks in order.
    #[serde(default)]
    pub worker_lists: Vec<Vec<u32>>,
}

/// A tensor.
#[derive(Debug, Deserialize)]
pub struct Tensor {
    /// Unique in the graph.
    pub name: String,
    /// Such as `bf16`.
    pub dtype: String,
    /// The rank's own.
    pub dims: Vec<u64>,
    /// In elements.
    pub strides: Vec<u64>,
    /// "device" or "symmetric".
    pub space: String,
    /// Size.
    pub bytes: u64,
}

/// A view of a tensor.
#[derive(Debug, Deserialize)]
pub struct Operand {
    /// Name of the tensor.
    pub base_ptr: String,
    /// In bytes.
    pub offset: u64,
    /// Dimensions of the view.
    pub dims: Vec<u64>,
    /// In elements.
    pub strides: Vec<u64>,
    /// The tensor's type.
    pub data_type: String,
    /// The owner of the memory, if that is not this rank.
    #[serde(default)]
    pub place: Option<Value>,
}

/// A task.
#[derive(Debug, Deserialize)]
pub struct Task {
    /// Name of its type.
    pub task_type: String,
    /// Index of its implementation.
    pub variant_id: u32,
    /// Index in `ops`.
    #[serde(default)]
    pub op_id: u32,
    /// What it reads.
    pub inputs: Vec<Operand>,
    /// What it writes.
    pub outputs: Vec<Operand>,
    /// What it triggers.
    pub trigger_event: u64,
    /// The first event that it waits for; always present, null if none.
    #[serde(deserialize_with = "present")]
    pub dependent_event: Option<u64>,
    /// All events that it waits for, if there are several.
    #[serde(default)]
    pub dependent_events: Vec<u64>,
    /// Events of earlier iterations.
    #[serde(default)]
    pub carried_events: Vec<(u64, u32)>,
    /// Its worker, if it was placed ahead of time.
    #[serde(default)]
    pub worker: Option<u32>,
}

/// An event.
#[derive(Debug, Deserialize)]
pub struct Event {
    /// Name of its type.
    pub event_type: String,
    /// Triggers of one iteration, from all ranks.
    pub num_triggers: u64,
    /// First task that it launches.
    pub first_task_id: u32,
    /// One past the last.
    pub last_task_id: u32,
}

/// Bits 63..48, 47..32 and 31..0 of an event id.
pub fn event_fields(id: u64) -> (u64, u32, usize) {
    (id >> 48, (id >> 32) as u32 & 0xFFFF, (id & 0xFFFF_FFFF) as usize)
}

/// All graphs of all ranks.
pub struct Emitted {
    /// By file name without `rank-R.` and `.task_graph.json`; the main graph is "".
    by_class: BTreeMap<String, Vec<Graph>>,
}

impl Emitted {
    /// Reads a folder that `--emit-graph` wrote.
    ///
    /// # Panics
    /// A file's name or contents do not match the format.
    pub fn read(folder: &Path, ranks: u32) -> Self {
        let mut by_class: BTreeMap<String, Vec<Graph>> = BTreeMap::new();
        let mut names: Vec<String> = std::fs::read_dir(folder)
            .unwrap_or_else(|e| panic!("{}: {e}", folder.display()))
            .flatten()
            .map(|e| e.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        for name in names {
            let middle = name.strip_prefix("rank-").and_then(|n| n.strip_suffix(".task_graph.json"));
            let middle = middle.unwrap_or_else(|| panic!("unexpected file {name}"));
            let (rank, class) = middle.split_once('.').unwrap_or((middle, ""));
            let text = std::fs::read_to_string(folder.join(&name)).expect("the file");
            let graph: Graph = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(graph.rank.to_string(), rank, "{name}");
            assert_eq!(graph.schema, "mpk-task-graph/1", "{name}");
            assert_eq!(graph.world, ranks, "{name}");
            if !class.is_empty() {
                assert_eq!(graph.name, class, "{name}");
            }
            by_class.entry(class.into()).or_default().push(graph);
        }
        for (class, graphs) in &mut by_class {
            graphs.sort_by_key(|g| g.rank);
            let found: Vec<u32> = graphs.iter().map(|g| g.rank).collect();
            assert_eq!(found, (0..ranks).collect::<Vec<_>>(), "ranks of {class:?}");
        }
        Emitted { by_class }
    }

    /// The main graph of all ranks.
    ///
    /// # Panics
    /// There is none.
    pub fn main(&self) -> &[Graph] {
        self.by_class.get("").expect("rank-R.task_graph.json")
    }

    /// All graphs; each item has those of all ranks.
    pub fn all(&self) -> impl Iterator<Item = &[Graph]> {
        self.by_class.values().map(|g| &g[..])
    }
}

/// Emits the graphs of a model.
///
/// # Panics
/// It fails, or its output does not match the format.
pub fn emit(model: &ModelFile, ranks: u32, arguments: &[&str]) -> Emitted {
    let folder = tempfile::Builder::new().prefix("mpk-graph").tempdir().expect("a temporary folder");
    let target = folder.path().join("graphs");
    let job = Job::alone().arg(model.path()).args(["--ranks", &ranks.to_string()]).args(arguments);
    let finished = job.arg("--emit-graph").arg(&target).run().expect(0).expect_nothing_left();
    assert_eq!(finished.stdout, "");
    Emitted::read(&target, ranks)
}

/// Checks what must hold for the graphs of all ranks together, for any model.
///
/// # Panics
/// Something does not hold.
pub fn check(graphs: &[Graph]) {
    let name = &graphs[0].name;
    let mut triggers: HashMap<(u32, usize), u64> = HashMap::new();
    for graph in graphs {
        let what = format!("{name}, rank {}", graph.rank);
        assert_eq!(graph.all_tasks[0].task_type, "terminate", "{what}");
        assert_eq!(graph.all_tasks[1].task_type, "begin_task_graph", "{what}");
        assert_eq!(graph.all_events[0].event_type, "termination", "{what}");
        assert_eq!(graph.all_events[1].event_type, "launch_dependent_tasks", "{what}");
        let ends = graph.all_events.iter().filter(|e| e.event_type == "end_of_task_graph").count();
        assert_eq!(ends, 1, "{what}: one end");
        assert_eq!(
            event_fields(graph.all_tasks[1].trigger_event),
            (0, graph.rank, 1),
            "{what}: task 1 triggers event 1"
        );
        assert_eq!(graph.first_tasks, [1], "{what}");
        let tensors: HashMap<&str, &Tensor> = graph.tensors.iter().map(|t| (&t.name[..], t)).collect();
        assert_eq!(tensors.len(), graph.tensors.len(), "{what}: names of tensors are unique");
        for (index, task) in graph.all_tasks.iter().enumerate() {
            let what = format!("{what}, task {index} ({})", task.task_type);
            check_operands(task, &tensors, &what);
            check_dependencies(task, graph, &what);
            if task.trigger_event == INVALID_EVENT {
                continue;
            }
            let (tag, owner, event) = event_fields(task.trigger_event);
            *triggers.entry((owner, event)).or_default() += 1;
            if sends(task) {
                assert_eq!(tag, TAG_NVSHMEM, "{what}: tag");
                assert!(owner != graph.rank && owner < graph.world, "{what}: owner {owner}");
            } else {
                assert_eq!(
                    (tag, owner),
                    (0, graph.rank),
                    "{what}: triggers a peer's event, but sends nothing"
                );
            }
        }
        check_placement(graph, &what);
    }
    for graph in graphs {
        for (index, event) in graph.all_events.iter().enumerate() {
            let found = triggers.remove(&(graph.rank, index)).unwrap_or(0);
            assert_eq!(found, event.num_triggers, "{name}: triggers of event {index} of rank {}", graph.rank);
        }
    }
    assert!(triggers.is_empty(), "{name}: events that do not exist are triggered: {triggers:?}");
}

/// True for copies, signals, and tasks that store their result on another rank.
fn sends(task: &Task) -> bool {
    let on_peer = |o: &Operand| o.place.as_ref().is_some_and(|place| place.get("peer").is_some());
    matches!(&task.task_type[..], "nvshmem_copy" | "nvshmem_signal") || task.outputs.iter().any(on_peer)
}

fn check_operands(task: &Task, tensors: &HashMap<&str, &Tensor>, what: &str) {
    for operand in task.inputs.iter().chain(&task.outputs) {
        let tensor = tensors
            .get(&operand.base_ptr[..])
            .unwrap_or_else(|| panic!("{what}: no tensor {}", operand.base_ptr));
        assert_eq!(operand.data_type, tensor.dtype, "{what}: {}", tensor.name);
        assert_eq!(operand.dims.len(), operand.strides.len(), "{what}: {}", tensor.name);
        let empty = operand.dims.contains(&0);
        let steps =
            operand.dims.iter().zip(&operand.strides).map(|(&d, &s)| d.saturating_sub(1) * s).sum::<u64>();
        let end = operand.offset + if empty { 0 } else { (steps + 1) * dtype_bytes(&operand.data_type) };
        assert!(end <= tensor.bytes, "{what}: {} ends at {end}, of {} bytes", tensor.name, tensor.bytes);
    }
    if sends(task) {
        let (_, owner, _) = event_fields(task.trigger_event);
        for operand in &task.outputs {
            assert_eq!(tensors[&operand.base_ptr[..]].space, "symmetric", "{what}: {}", operand.base_ptr);
            if let Some(place) = &operand.place {
                assert_eq!(place["peer"], owner, "{what}: its output lies where its trigger's owner is");
            }
        }
    }
}

fn check_dependencies(task: &Task, graph: &Graph, what: &str) {
    let carried = task.carried_events.iter().map(|c| c.0);
    for id in task.dependent_event.into_iter().chain(task.dependent_events.iter().copied()).chain(carried) {
        let (_, owner, event) = event_fields(id);
        assert_eq!(owner, graph.rank, "{what}: waits for its own rank's events");
        assert!(event < graph.all_events.len(), "{what}: no event {event}");
    }
    if !task.dependent_events.is_empty() {
        assert!(task.dependent_events.len() > 1, "{what}: `dependent_events` only where there are more");
        assert_eq!(task.dependent_event, task.dependent_events.first().copied(), "{what}");
    }
}

/// Every task reaches a worker exactly once.
fn check_placement(graph: &Graph, what: &str) {
    let tasks = graph.all_tasks.len();
    let mut launched = vec![0; tasks];
    for event in &graph.all_events {
        let (first, last) = (event.first_task_id as usize, event.last_task_id as usize);
        assert!(first <= last && last <= tasks, "{what}: an event launches {first}..{last} of {tasks} tasks");
        if matches!(&event.event_type[..], "launch_tasks" | "launch_massive_tasks" | "launch_dependent_tasks")
            && graph.placement == "dynamic"
        {
            launched[first..last].iter_mut().for_each(|l| *l += 1);
        }
    }
    if graph.placement == "static" {
        assert_eq!(graph.worker_lists.len(), graph.workers as usize, "{what}");
        for (worker, list) in graph.worker_lists.iter().enumerate() {
            for &task in list {
                launched[task as usize] += 1;
                assert_eq!(graph.all_tasks[task as usize].worker, Some(worker as u32), "{what}, task {task}");
            }
        }
    }
    assert!(
        launched[2..].iter().all(|&l| l == 1),
        "{what}: each task is placed or launched once: {launched:?}"
    );
}

/// With `copy-reduce`, each tile of an allreduce is one copy to each peer and one reduce.
///
/// # Panics
/// This does not hold.
pub fn check_copy_reduce(graph: &Graph) {
    let mut reduces: HashMap<u32, usize> = HashMap::new();
    for task in graph.all_tasks.iter().filter(|t| t.task_type == "reduce") {
        *reduces.entry(task.op_id).or_default() += 1;
    }
    assert!(!reduces.is_empty(), "rank {}: no reduce", graph.rank);
    // Owners by operator and source tile.
    let mut copies: BTreeMap<(u32, &str, u64), BTreeSet<u32>> = BTreeMap::new();
    for task in
        graph.all_tasks.iter().filter(|t| t.task_type == "nvshmem_copy" && reduces.contains_key(&t.op_id))
    {
        let (_, owner, _) = event_fields(task.trigger_event);
        let tile = (task.op_id, &task.inputs[0].base_ptr[..], task.inputs[0].offset);
        assert!(
            copies.entry(tile).or_default().insert(owner),
            "rank {}: {tile:?} twice to {owner}",
            graph.rank
        );
    }
    let peers: BTreeSet<u32> = (0..graph.world).filter(|&r| r != graph.rank).collect();
    for (tile, owners) in &copies {
        assert_eq!(*owners, peers, "rank {}: copies of {tile:?}", graph.rank);
    }
    for (op, tiles) in reduces {
        let found = copies.keys().filter(|k| k.0 == op).count();
        assert_eq!(found, tiles, "rank {}: tiles of operator {}", graph.rank, graph.ops[op as usize]);
    }
}

/// Runs one iteration of all ranks with events alone: every task runs once, and every rank reaches its end.
///
/// # Panics
/// A task is left waiting.
pub fn simulate(graphs: &[Graph]) {
    let mut ranks: Vec<Simulated<'_>> = graphs.iter().map(Simulated::new).collect();
    let mut triggers: Vec<u64> = graphs.iter().map(|g| g.all_tasks[1].trigger_event).collect();
    loop {
        for id in std::mem::take(&mut triggers) {
            let (_, owner, event) = event_fields(id);
            ranks[owner as usize].trigger(event);
        }
        for rank in &mut ranks {
            rank.step(&mut triggers);
        }
        if triggers.is_empty() && ranks.iter_mut().all(|r| !r.step(&mut triggers)) && triggers.is_empty() {
            break;
        }
    }
    for rank in &ranks {
        let graph = rank.graph;
        let left: Vec<usize> = (2..graph.all_tasks.len()).filter(|&t| !rank.done[t]).collect();
        assert!(left.is_empty(), "{}, rank {}: tasks {left:?} never run", graph.name, graph.rank);
        let end = graph.all_events.iter().position(|e| e.event_type == "end_of_task_graph").expect("an end");
        assert_eq!(
            rank.counters[end], graph.all_events[end].num_triggers,
            "{}, rank {}",
            graph.name, graph.rank
        );
    }
}

struct Simulated<'a> {
    graph: &'a Graph,
    counters: Vec<u64>,
    done: Vec<bool>,
    queues: Vec<VecDeque<u32>>,
}

impl<'a> Simulated<'a> {
    fn new(graph: &'a Graph) -> Self {
        let queues = match &graph.placement[..] {
            "static" => graph.worker_lists.iter().map(|l| l.iter().copied().collect()).collect(),
            _ => vec![VecDeque::new()],
        };
        let counters = vec![0; graph.all_events.len()];
        Simulated { graph, counters, done: vec![false; graph.all_tasks.len()], queues }
    }

    fn trigger(&mut self, event: usize) {
        self.counters[event] += 1;
        let found = &self.graph.all_events[event];
        if self.graph.placement == "dynamic" && self.counters[event] == found.num_triggers {
            // Termination and the end of the graph launch nothing in this iteration.
            if found.event_type.starts_with("launch") {
                self.queues[0].extend((found.first_task_id..found.last_task_id).filter(|&t| t > 1));
            }
        }
    }

    /// Runs what can run; true if anything ran.
    fn step(&mut self, triggers: &mut Vec<u64>) -> bool {
        let mut ran = false;
        for queue in &mut self.queues {
            while let Some(&index) = queue.front() {
                let task = &self.graph.all_tasks[index as usize];
                let ready = |&id: &u64| {
                    let (_, _, event) = event_fields(id);
                    self.counters[event] >= self.graph.all_events[event].num_triggers
                };
                if index > 1 && !task.dependent_event.iter().chain(&task.dependent_events).all(ready) {
                    break;
                }
                queue.pop_front();
                assert!(!self.done[index as usize], "{}: task {index} runs twice", self.graph.name);
                self.done[index as usize] = true;
                ran = true;
                if task.trigger_event != INVALID_EVENT && index > 1 {
                    triggers.push(task.trigger_event);
                }
            }
        }
        ran
    }
}

fn dtype_bytes(dtype: &str) -> u64 {
    match dtype {
        "f32_flagged" | "i64" | "u64" => 8,
        "f32" | "i32" | "u32" => 4,
        "bf16" | "f16" => 2,
        "u8" | "i8" => 1,
        other => panic!("unknown data type {other}"),
    }
}

/// A field that may be null but not absent.
fn present<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    Option::deserialize(deserializer)
}
