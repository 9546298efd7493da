//! Graphs whose times have been computed by hand.

use simulate::{Cluster, Load, Outcome, simulate};
use smallvec::smallvec;
use taskgraph::op_graph::{Capacity, Rows};
use taskgraph::task_graph::{
    Event, EventType, Operand, Place, Space, Task, TensorEntry, Variant, core_types,
};
use taskgraph::{Backend, DType, EventId, Placement, Region, Registry, Role, TaskGraph};

const US: u64 = 1_000_000;
const LOAD: Load = Load { active: 1, context: 0 };

fn cluster() -> Cluster {
    Cluster::parse(include_str!("plain.json")).unwrap()
}

fn event(num_triggers: u32, remote: bool) -> Event {
    Event { event_type: EventType::Empty, num_triggers, first_task: 0, last_task: 0, remote }
}

/// A task without operands on a worker: it waits for `after` and triggers `trigger`.
fn task(worker: u32, after: Option<u32>, trigger: Option<EventId>) -> Task {
    Task {
        task_type: 2,
        variant: 0,
        first_operand: 0,
        num_inputs: 0,
        num_outputs: 0,
        trigger,
        dependencies: after.into_iter().collect(),
        carried: smallvec![],
        worker: Some(worker),
        args: [0; 8],
        op: 0,
    }
}

/// A graph of `tasks` (numbers from 2 on) and events (numbers from 3 on).
fn graph(rank: u32, world: u32, tasks: Vec<Task>, events: Vec<Event>) -> TaskGraph {
    let begin = |trigger| Task { worker: None, ..task(0, None, trigger) };
    let mut all = vec![begin(None), begin(Some(EventId::local(rank as u16, EventId::BEGIN)))];
    all.extend(tasks);
    let mut lists = vec![Vec::new(); 2];
    for (index, task) in all.iter().enumerate().skip(2) {
        lists[task.worker.unwrap() as usize].push(index as u32);
    }
    let mut all_events = vec![event(1, false); 3];
    all_events.extend(events);
    TaskGraph {
        name: "decode-1".into(),
        rank,
        world,
        placement: Placement::Static,
        backend: Backend::Cpu,
        workers: 2,
        capacity: Capacity { rows: 1, samples: 1, active: 1 },
        type_names: core_types::ALL.iter().map(ToString::to_string).collect(),
        ops: vec!["op".into()],
        tensors: Vec::new(),
        variants: vec![Variant { task_type: 2, params: Vec::new(), scratch_bytes: 0 }],
        operands: Vec::new(),
        tasks: all,
        events: all_events,
        worker_lists: lists,
    }
}

fn run(graphs: &[TaskGraph], cluster: &Cluster) -> Outcome {
    simulate(graphs, &Registry::default(), cluster, LOAD).unwrap()
}

/// A tensor of `bytes` bytes, and an operand for all of it, among the task's inputs or outputs.
fn give(
    graph: &mut TaskGraph,
    task: u32,
    dtype: DType,
    elements: u32,
    output: bool,
    place: Place,
    name: &str,
) {
    let region = Region::whole(&[elements]);
    let tensor = match graph.tensors.iter().position(|t| t.name == name) {
        Some(tensor) => tensor as u32,
        None => {
            graph.tensors.push(TensorEntry {
                name: name.into(),
                dtype,
                dims: vec![elements],
                strides: vec![1],
                space: Space::Symmetric,
                bytes: u64::from(elements) * dtype.size(),
                role: Role::Activation,
                parts: Vec::new(),
                region_dims: vec![elements],
                tiled: false,
                paired: false,
                output: false,
                rows: Rows::Fixed,
                overlay: None,
            });
            graph.tensors.len() as u32 - 1
        }
    };
    let operand = Operand {
        tensor,
        offset: 0,
        dims: [elements, 1, 1, 1],
        strides: [1, 1, 1, 1],
        ndim: 1,
        place,
        region,
        trust: None,
    };
    let first = graph.operands.len() as u32;
    graph.operands.push(operand);
    let task = &mut graph.tasks[task as usize];
    assert_eq!(task.num_inputs + task.num_outputs, 0, "one operand a task here");
    task.first_operand = first;
    if output {
        task.num_outputs = 1;
    } else {
        task.num_inputs = 1;
    }
}

/// Tasks that each wait for the one before, alternating between workers.
fn chain(length: u32) -> TaskGraph {
    let local = |event| Some(EventId::local(0, event));
    let tasks = (0..length).map(|k| {
        let after = if k == 0 { None } else { Some(2 + k) };
        task(k % 2, after, local(3 + k))
    });
    graph(0, 1, tasks.collect(), vec![event(1, false); length as usize])
}

#[test]
fn a_chain_of_k_hops_takes_k_hops() {
    let cluster = cluster();
    // The first task starts 0.25 us (`task_us`) after the iteration, and each of the others a hop of 2 us after the one
    // before.
    for length in [1, 2, 5, 40] {
        let outcome = run(&[chain(length)], &cluster);
        assert_eq!(outcome.iteration, US / 4 + u64::from(length - 1) * 2 * US, "{length}");
        assert_eq!(outcome.between, 30 * US);
    }
}

#[test]
fn dynamic_hops_are_those_of_the_scheduler() {
    let mut graph = chain(4);
    graph.placement = Placement::Dynamic;
    let outcome = run(&[graph], &cluster());
    assert_eq!(outcome.iteration, US / 4 + 3 * 7 * US);
}

#[test]
fn an_event_waits_for_all_its_triggers() {
    // Tasks 2 and 3 on worker 0, one after the other, and task 4 on worker 1 after both.
    let three = Some(EventId::local(0, 3));
    let tasks = vec![task(0, None, three), task(0, None, three), task(1, Some(3), None)];
    let outcome = run(&[graph(0, 1, tasks, vec![event(2, false)])], &cluster());
    let begins: Vec<_> = outcome.records[0].iter().map(|r| (r.task, r.begin)).collect();
    assert_eq!(begins, [(2, US / 4), (3, US / 2), (4, US / 2 + 2 * US)]);
}

#[test]
fn a_put_takes_its_latency_and_its_bytes() {
    // 100 kB at 100 GB/s take 1 us, after 2 us for the put; the copy itself reads nothing.
    let copy = Task { task_type: 3, ..task(0, None, Some(EventId::nvshmem(1, 3))) };
    let mut zero = graph(0, 2, vec![copy], vec![event(1, true)]);
    give(&mut zero, 2, DType::F32, 25_000, true, Place::Peer(1), "x");
    let one = graph(1, 2, vec![task(0, Some(3), None)], vec![event(1, true)]);
    let outcome = run(&[zero, one], &cluster());
    assert_eq!(outcome.records[1][0].begin, US / 4 + 3 * US);
    assert_eq!(outcome.records[1][0].waited, simulate::Waited::Peer);
}

/// Rank 0 pushes flagged words to all; each rank reads them.
fn pushed(elements: u32) -> [TaskGraph; 2] {
    let mut zero = graph(0, 2, vec![task(0, None, None), task(1, None, None)], vec![]);
    give(&mut zero, 2, DType::F32Flagged, elements, true, Place::All, "words");
    give(&mut zero, 3, DType::F32Flagged, elements, false, Place::Own, "words");
    let mut one = graph(1, 2, vec![task(0, None, None)], vec![]);
    give(&mut one, 2, DType::F32Flagged, elements, false, Place::Own, "words");
    [zero, one]
}

#[test]
fn flagged_words_are_waited_for_on_every_rank() {
    // 12,500 words of 8 bytes: 100 kB. Writing takes 0.1 us at 1000 GB/s. Then it takes 0.5 us to the own rank, and
    // 1 us plus the link's 1 us to the other rank.
    let outcome = run(&pushed(12_500), &cluster());
    let written = US / 4 + US / 10;
    let own = outcome.records[0].iter().find(|r| r.task == 3).unwrap();
    assert_eq!(own.begin, written + US / 2);
    assert_eq!(outcome.records[1][0].begin, written + 2 * US);
}

#[test]
fn nodes_have_links_of_their_own_and_need_a_network() {
    let mut cluster = cluster();
    cluster.ranks_per_node = 1;
    let near = run(&pushed(12_500), &self::cluster()).iteration;
    let far = run(&pushed(12_500), &cluster).iteration;
    // 5 us and 2 us of bytes, instead of 1 us and 1 us.
    assert_eq!(far - near, 5 * US);
    cluster.network = None;
    let error = simulate(&pushed(1), &Registry::default(), &cluster, LOAD).unwrap_err();
    assert!(error.to_string().contains("`network`"), "{error}");
}

#[test]
fn graphs_that_wait_in_a_cycle_are_reported() {
    let tasks = vec![task(0, Some(3), None)];
    let stuck = graph(0, 1, tasks, vec![event(1, false)]);
    let error = simulate(&[stuck], &Registry::default(), &cluster(), LOAD).unwrap_err();
    assert!(error.to_string().contains("task 2 of rank 0"), "{error}");
}

/// Makes the tensors of a graph a cache of `pages` pages; the box of operand k is share k of `shares`.
fn make_cache(graph: &mut TaskGraph, pages: u32, page_size: u32, shares: u32) {
    let cache = &mut graph.tensors[0];
    (cache.dims, cache.region_dims) = (vec![pages, 1, page_size, 1], vec![1, 1, shares]);
    for (share, operand) in graph.operands.iter_mut().enumerate() {
        let share = share as u32;
        operand.trust = Some(taskgraph::Trust::PagesOfSlot);
        operand.region = Region::whole(&[1, 1, 0]).with(2, share, share + 1);
    }
}

#[test]
fn a_later_access_of_one_task_does_not_delay_others() {
    // Each worker reads half of a cache of 100 kB (0.05 us, then 1 us of latency), 0.25 us after the start. Worker 1 reads
    // at once, while worker 0 spends 5 us first (`indirect_us` holds for both, so worker 0 gets its task a hop later).
    let mut cluster = cluster();
    cluster.protocol.indirect_us = 5.0;
    let three = Some(EventId::local(0, 3));
    let tasks = vec![task(1, None, three), task(1, None, None), task(0, Some(3), None)];
    let mut graph = graph(0, 1, tasks, vec![event(1, false)]);
    for task in [3, 4] {
        give(&mut graph, task, DType::U8, 100_000, false, Place::Own, "cache");
    }
    make_cache(&mut graph, 2, 50_000, 2);
    let load = Load { active: 1, context: 100_000 };
    let outcome = simulate(&[graph], &Registry::default(), &cluster, load).unwrap();
    let took = |task| outcome.records[0].iter().find(|r| r.task == task).map(|r| r.end - r.begin);
    assert_eq!((took(3), took(4)), (Some(5 * US + US + US / 20), Some(5 * US + US + US / 20)));
    assert_eq!(outcome.bytes_read, [100_000]);
}

#[test]
fn shares_of_a_cache_are_whole_pages() {
    // 25,000 tokens are three pages of 10,000: one for the first of two tasks, and the rest for the second.
    let mut graph = graph(0, 1, vec![task(0, None, None), task(1, None, None)], vec![]);
    for task in [2, 3] {
        give(&mut graph, task, DType::U8, 100_000, false, Place::Own, "cache");
    }
    make_cache(&mut graph, 10, 10_000, 2);
    let load = Load { active: 1, context: 25_000 };
    let mut cluster = cluster();
    cluster.memory.shared_by = simulate::cluster::SharedBy::Rank;
    let outcome = simulate(&[graph], &Registry::default(), &cluster, load).unwrap();
    let mut took: Vec<_> = outcome.records[0].iter().map(|r| (r.task, r.end - r.begin)).collect();
    took.sort_unstable();
    // The second request waits for the first.
    assert_eq!(took, [(2, US + US / 100), (3, US + US / 40)]);
}

/// Worker 1 waits for worker 0's task and then multiplies `rows` rows of 1000 bytes. Its task is 3.
fn product(rows: u32) -> TaskGraph {
    let tasks = vec![task(0, None, Some(EventId::local(0, 3))), task(1, Some(3), None)];
    let mut graph = graph(0, 1, tasks, vec![event(1, false)]);
    give(&mut graph, 3, DType::U8, rows, false, Place::Own, "weight");
    graph.operands[0].dims = [rows, 1000, 1, 1];
    graph.operands[0].ndim = 2;
    (graph.tensors[0].role, graph.tensors[0].tiled) = (Role::Constant, true);
    graph
}

/// Begin and end of task 3 in nanoseconds.
fn times_of(graph: TaskGraph, cluster: &Cluster) -> (u64, u64) {
    let load = Load { active: 1, context: 2_000 };
    let outcome = simulate(&[graph], &Registry::default(), cluster, load).unwrap();
    let record = outcome.records[0].iter().find(|r| r.task == 3).unwrap();
    (record.begin / 1000, record.end / 1000)
}

#[test]
fn a_worker_that_waits_may_have_more_bytes_in_flight() {
    // Pieces take 1 ns of the memory, 1 us of latency and 1 ns of the worker. The task begins at 2.25 us. With one piece in
    // flight, two pieces are there then, the third comes at 3.003, and the fourth is asked for at the begin.
    let mut cluster = cluster();
    assert_eq!(times_of(product(4), &cluster), (2_250, 3_252));
    // With four in flight, all are there.
    cluster.worker.in_flight_waiting_bytes = Some(4_000);
    assert_eq!(times_of(product(4), &cluster), (2_250, 2_254));
}

#[test]
fn pages_may_stream_ahead_of_their_task() {
    let mut graph = product(2);
    make_cache(&mut graph, 2, 1_000, 1);
    graph.tensors[0].bytes = 2_000;
    (graph.tensors[0].role, graph.tensors[0].tiled) = (Role::Activation, false);
    let mut cluster = cluster();
    cluster.worker.in_flight_waiting_bytes = Some(4_000);
    // Asked for at the begin: 2 ns and the latency.
    assert_eq!(times_of(graph.clone(), &cluster), (2_250, 3_252));
    // In the ring at the begin: two pieces of 1 ns, or of 10 ns.
    cluster.worker.pages_run_ahead = true;
    assert_eq!(times_of(graph.clone(), &cluster), (2_250, 2_252));
    cluster.worker.page_gb_per_s = Some(100.0);
    assert_eq!(times_of(graph, &cluster), (2_250, 2_270));
}

#[test]
fn products_take_time_for_their_rows_and_for_each_tile() {
    let mut cluster = cluster();
    cluster.worker.in_flight_waiting_bytes = Some(4_000);
    cluster.protocol.product_us = 0.25;
    cluster.worker.tile_us = 0.5;
    // One tile, then two of two rows, then two of three and one.
    for (rows, tiles) in [(0, 1), (2, 2), (3, 2)] {
        cluster.worker.tile_rows = rows;
        assert_eq!(times_of(product(4), &cluster), (2_250, 2_250 + 254 + 500 * tiles), "{rows}");
    }
}

#[test]
fn flags_wait_behind_a_share_of_the_loads() {
    // The memory serves four pieces until 4 us. The trigger comes at 0.25 us, with 3.75 us of loads before it.
    let mut cluster = cluster();
    cluster.worker.in_flight_waiting_bytes = Some(4_000);
    cluster.memory.gb_per_s = 1.0;
    assert_eq!(times_of(product(4), &cluster).0, 2_250);
    cluster.memory.flag_share = 0.4;
    assert_eq!(times_of(product(4), &cluster).0, 2_250 + 1_500);
    cluster.memory.flag_share = 1.0;
    assert_eq!(times_of(product(4), &cluster).0, 6_000);
}

/// A task type whose kernel holds all sums, and takes some rows of its first input.
#[derive(Debug)]
struct Steps;

impl taskgraph::TaskType for Steps {
    fn name(&self) -> &'static str {
        "steps"
    }
    fn infer(
        &self,
        _: &taskgraph::task_type::OpView<'_>,
    ) -> Result<Vec<taskgraph::task_type::TensorType>, taskgraph::task_type::OpError> {
        Ok(Vec::new())
    }
    fn holds_sums(&self) -> bool {
        true
    }
}

#[test]
fn parts_of_k_share_what_they_declare_and_read_rows_along() {
    // As in `product`, but worker 0 also has a task with the same inputs, so each has half of the k.
    let mut registry = Registry::default();
    registry.register(std::sync::Arc::new(Steps));
    let in_steps = |parts: u32, near: f64, step_rows: u32, step_us: f64| {
        let mut graph = product(4);
        graph.type_names.push("steps".into());
        let of_type = graph.type_names.len() as u16 - 1;
        graph.tasks[3].task_type = of_type;
        // Rows, then the weight.
        let weight = graph.operands[0];
        graph.tensors.push(TensorEntry { role: Role::Activation, tiled: false, ..graph.tensors[0].clone() });
        graph.operands = vec![Operand { tensor: 1, ..weight }, weight];
        graph.tasks[3].num_inputs = 2;
        if parts == 2 {
            let other = Task { worker: Some(0), dependencies: smallvec![], ..graph.tasks[3].clone() };
            graph.tasks.push(other);
            graph.worker_lists[0].push(4);
        }
        let mut cluster = cluster();
        cluster.worker.in_flight_waiting_bytes = Some(4_000);
        cluster.worker.tile_us = 0.5;
        cluster.worker.tile_rows = 1;
        cluster.worker.sum_ns = 25.0;
        cluster.worker.near_gb_per_s = near;
        (cluster.worker.step_rows, cluster.worker.step_us) = (step_rows, step_us);
        let load = Load { active: 1, context: 0 };
        let outcome = simulate(&[graph], &registry, &cluster, load).unwrap();
        let record = outcome.records[0].iter().find(|r| r.task == 3).unwrap();
        (record.end - record.begin) / 1000
    };
    let time = |parts, near| in_steps(parts, near, 0, 0.0);
    // One tile: 4 ns and 500. Rows at 1000 GB/s take no time of their own; 4000 bytes at 1 GB/s take 4 us. Each of the four
    // sums takes 25 ns, and each part has all of them.
    assert_eq!((time(1, 1000.0), time(1, 1.0)), (604, 4_100));
    assert_eq!((time(2, 1000.0), time(2, 1.0)), (602, 2_100));
    // 1 us at least for each of four stages of 1000 bytes, or of eight that are half full because the tile has half of the rows.
    assert_eq!([4, 8].map(|step_rows| in_steps(1, 1000.0, step_rows, 1.0)), [4_100, 8_100]);
}
