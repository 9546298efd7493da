//! The verifier against one that is too simple to be wrong: the transitive closure of all edges over two
//! iterations, and every pair of accesses, word by word.

mod verify_support;

use proptest::prelude::*;
use std::collections::{BTreeMap, HashMap};
use taskgraph::op_graph::Role;
use taskgraph::task_graph::{Operand, Place, Space, TaskGraph};
use taskgraph::verify::{Violation, ViolationKind, verify};
use taskgraph::{DType, EventId, Region};
use verify_support::*;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
    fn chance(&mut self, percent: u64) -> bool {
        self.next() % 100 < percent
    }
}

/// An element of memory: rank, tensor, index.
type Word = (usize, u32, u64);

/// The elements of an operand's view.
fn words(graphs: &[TaskGraph], rank: usize, operand: &Operand) -> Vec<Word> {
    let owners = match operand.place {
        Place::Own => rank..rank + 1,
        Place::Peer(p) => usize::from(p)..usize::from(p) + 1,
        Place::All => 0..graphs.len(),
    };
    // All ranks of these tests have the same tensors with the same numbers.
    let size = graphs[rank].tensors[operand.tensor as usize].dtype.size();
    let mut found = vec![operand.offset / size];
    for d in 0..usize::from(operand.ndim) {
        let step = u64::from(operand.strides[d]);
        found = found
            .iter()
            .flat_map(|&at| (0..u64::from(operand.dims[d])).map(move |i| at + i * step))
            .collect();
    }
    owners.flat_map(|owner| found.iter().map(move |&at| (owner, operand.tensor, at))).collect()
}

/// Nodes of two iterations, and which comes before which.
struct Closure {
    before: Vec<Vec<bool>>,
}

impl Closure {
    fn new(nodes: usize, edges: &[(usize, usize)]) -> Self {
        let mut before = vec![vec![false; nodes]; nodes];
        for &(a, b) in edges {
            before[a][b] = true;
        }
        for k in 0..nodes {
            for i in 0..nodes {
                if before[i][k] {
                    let through = before[k].clone();
                    before[i].iter_mut().zip(through).for_each(|(known, more)| *known |= more);
                }
            }
        }
        Closure { before }
    }
}

/// The reason why the graphs are unsafe, if they are.
fn brute(graphs: &[TaskGraph]) -> Option<&'static str> {
    // Numbering: for each epoch, all events then all tasks of each rank.
    let mut base = Vec::new();
    let mut size = 0;
    for graph in graphs {
        base.push((size, size + graph.events.len()));
        size += graph.events.len() + graph.tasks.len();
    }
    let event = |epoch: usize, rank: usize, index: u32| epoch * size + base[rank].0 + index as usize;
    let task = |epoch: usize, rank: usize, index: u32| epoch * size + base[rank].1 + index as usize;
    let flagged = |t: u32| graphs[0].tensors[t as usize].dtype == DType::F32Flagged;

    let mut reads: BTreeMap<Word, Vec<(usize, u32)>> = BTreeMap::new();
    let mut writes: BTreeMap<Word, Vec<(usize, u32)>> = BTreeMap::new();
    for (rank, graph) in graphs.iter().enumerate() {
        for (index, t) in graph.tasks.iter().enumerate() {
            for operand in graph.inputs(t) {
                words(graphs, rank, operand)
                    .into_iter()
                    .for_each(|w| reads.entry(w).or_default().push((rank, index as u32)));
            }
            for operand in graph.outputs(t) {
                words(graphs, rank, operand)
                    .into_iter()
                    .for_each(|w| writes.entry(w).or_default().push((rank, index as u32)));
            }
        }
    }
    let nobody = Vec::new();
    let mut edges = Vec::new();
    let mut polled = Vec::new();
    for (word, readers) in &reads {
        if flagged(word.1) {
            let writers = writes.get(word).unwrap_or(&nobody);
            if writers.len() != 1 {
                return Some("flagged read without exactly one writer");
            }
            for epoch in 0..2 {
                for reader in readers {
                    let edge = (task(epoch, writers[0].0, writers[0].1), task(epoch, reader.0, reader.1));
                    polled.push(edge);
                }
            }
        }
    }
    if writes.iter().any(|(word, writers)| flagged(word.1) && writers.len() > 1) {
        return Some("flagged word with two writers");
    }
    for epoch in 0..2 {
        for (rank, graph) in graphs.iter().enumerate() {
            for (index, t) in graph.tasks.iter().enumerate() {
                let node = task(epoch, rank, index as u32);
                if let Some(e) = t.trigger {
                    edges.push((node, event(epoch, e.owner().into(), e.index())));
                }
                for &e in &t.dependencies {
                    edges.push((event(epoch, rank, e), node));
                }
                for &(e, back) in &t.carried {
                    if epoch == 1 && back == 1 {
                        edges.push((event(0, rank, e), node));
                    }
                }
            }
            for list in &graph.worker_lists {
                for pair in list.windows(2) {
                    edges.push((task(epoch, rank, pair[0]), task(epoch, rank, pair[1])));
                }
            }
        }
    }
    // Without the order from flagged words, and with it.
    let mut firm = edges.clone();
    edges.extend(polled);
    let explicit = Closure::new(2 * size, &edges);
    let barriers = |edges: &mut Vec<(usize, usize)>| {
        for (rank, graph) in graphs.iter().enumerate() {
            edges.push((event(0, rank, 2), event(1, rank, 1)));
            for index in 2..graph.tasks.len() as u32 {
                for epoch in 0..2 {
                    edges.push((event(epoch, rank, 1), task(epoch, rank, index)));
                }
            }
        }
    };
    barriers(&mut firm);
    let strong = Closure::new(2 * size, &firm);
    barriers(&mut edges);
    let weak = Closure::new(2 * size, &edges);
    let is_put = |(rank, index): (usize, u32)| {
        let t = &graphs[rank].tasks[index as usize];
        matches!(t.task_type, COPY | SIGNAL)
    };
    // The point at which all work of a task is done.
    let done = |epoch: usize, (rank, index): (usize, u32)| match graphs[rank].tasks[index as usize].trigger {
        Some(e) if is_put((rank, index)) => event(epoch, e.owner().into(), e.index()),
        _ => task(epoch, rank, index),
    };
    let is_event = |node: usize| {
        (0..graphs.len()).any(|r| {
            let at = node % size;
            at >= base[r].0 && at < base[r].1
        })
    };
    let at = |epoch: usize, (rank, index): (usize, u32)| task(epoch, rank, index);
    let seen = |e0: usize, w: (usize, u32), e1: usize, r: (usize, u32)| strong.before[done(e0, w)][at(e1, r)];
    let reused = |e0: usize, r: (usize, u32), e1: usize, w: (usize, u32)| weak.before[done(e0, r)][at(e1, w)];
    let overwritten = |e0: usize, b: (usize, u32), e1: usize, a: (usize, u32)| {
        let from = done(e0, b);
        strong.before[from][at(e1, a)]
            || (0..2 * size)
                .any(|e| is_event(e) && (e == from || strong.before[from][e]) && weak.before[e][at(e1, a)])
    };
    if (0..size).any(|n| explicit.before[n][n]) {
        return Some("cycle");
    }
    for (rank, graph) in graphs.iter().enumerate() {
        for index in 2..graph.tasks.len() as u32 {
            let node = task(0, rank, index);
            if !(0..graphs.len()).any(|r| explicit.before[event(0, r, 1)][node]) {
                return Some("not reached from begin");
            }
            let writes = graph.tasks[index as usize].num_outputs > 0 && !is_put((rank, index));
            let known = if writes { &strong } else { &weak };
            if !known.before[node][event(0, rank, 2)] {
                return Some("not done at the end");
            }
        }
    }
    let mut triggers: HashMap<(u16, u32), Vec<(usize, u32)>> = HashMap::new();
    for (rank, graph) in graphs.iter().enumerate() {
        for (index, t) in graph.tasks.iter().enumerate() {
            if let Some(e) = t.trigger {
                triggers.entry((e.owner(), e.index())).or_default().push((rank, index as u32));
            }
        }
    }
    for tasks in triggers.values() {
        for b in tasks {
            for a in tasks {
                if a != b && a.1 > 1 && !reused(0, *b, 1, *a) {
                    return Some("counter across epochs");
                }
            }
        }
    }
    for (word, writers) in &writes {
        let readers = reads.get(word).unwrap_or(&nobody);
        for &w in writers {
            for &r in readers {
                // A task may read what it writes; a flagged word orders its own read.
                if w != r && !flagged(word.1) && !seen(0, w, 0, r) && !reused(0, r, 0, w) {
                    return Some("unordered");
                }
                if !flagged(word.1) && !seen(0, w, 1, r) || !reused(0, r, 1, w) {
                    return Some("unordered across epochs");
                }
            }
            for &other in writers {
                if w != other && !overwritten(0, w, 0, other) && !overwritten(0, other, 0, w) {
                    return Some("unordered");
                }
                let observed = flagged(word.1) && !readers.is_empty();
                if !observed && !overwritten(0, w, 1, other) {
                    return Some("unordered across epochs");
                }
            }
        }
    }
    for (word, readers) in &reads {
        if matches!(graphs[0].tensors[word.1 as usize].role, Role::Activation) && !flagged(word.1) {
            let writers = writes.get(word).unwrap_or(&nobody);
            for &r in readers {
                if !writers.iter().any(|&w| seen(0, w, 0, r)) {
                    return Some("read of what nobody wrote");
                }
            }
        }
    }
    None
}

/// Random tasks on random regions, in levels so that most have no cycle.
fn random_graphs(random: &mut Random) -> Vec<TaskGraph> {
    let world = 1 + random.below(3) as u32;
    let workers = 1 + random.below(2) as u32;
    // Boxes in four dimensions divide a tensor into so many cells that the verifier compares them pair by pair.
    let dims: &[u32] = if random.chance(15) { &[12, 12, 12, 12] } else { &[4] };
    let width = 4;
    let levels = 2 + random.below(2) as u32;
    let mut builders: Vec<RankBuilder> = (0..world)
        .map(|rank| {
            // One worker more, for the tasks that fill gaps.
            let mut b = RankBuilder::new(rank, world, workers + 1);
            b.tensor("x", DType::F32, dims, Space::Device, Role::Input);
            b.tensor("a", DType::F32, dims, Space::Device, Role::Activation);
            b.tensor("s", DType::F32, &[world, width], Space::Symmetric, Role::Activation);
            b.tensor("p", DType::F32, dims, Space::Symmetric, Role::Persistent { region_dims: None });
            // Per level, a local event, then a remote one.
            for _ in 0..levels {
                b.event(false);
                b.event(true);
            }
            b
        })
        .collect();
    let span = |random: &mut Random| {
        let lo = random.below(width as usize) as u32;
        (lo, lo + 1 + random.below((width - lo) as usize) as u32)
    };
    let a_box = |random: &mut Random| {
        let mut region = Region::whole(dims);
        for (d, &size) in dims.iter().enumerate() {
            let lo = random.below(size as usize) as u32;
            region = region.with(d, lo, lo + 1 + random.below((size - lo) as usize) as u32);
        }
        region
    };
    for rank in 0..world {
        let b = &mut builders[rank as usize];
        let local = |level: u32| 3 + 2 * level;
        let mut level = 0;
        for _ in 0..2 + random.below(if dims.len() > 1 { 8 } else { 4 }) {
            let mut deps = vec![1];
            if level > 0 {
                deps = vec![local(level - 1)];
                if world > 1 && random.chance(60) {
                    deps.push(local(level - 1) + 1);
                }
            }
            let remote = world > 1 && random.chance(40);
            let mut inputs = Vec::new();
            let mut outputs = Vec::new();
            for _ in 0..random.below(2) {
                let tensor = [0, 1, 2, 3][random.below(4)];
                let (lo, hi) = span(random);
                let region = if tensor == 2 {
                    let slot = random.below(world as usize) as u32;
                    Region::whole(&[world, width]).with(0, slot, slot + 1).with(1, lo, hi)
                } else {
                    a_box(random)
                };
                inputs.push(b.at(tensor, region, Place::Own));
            }
            let worker = random.below(workers as usize) as u32;
            let (lo, hi) = span(random);
            if remote {
                let peer = (rank + 1 + random.below(world as usize - 1) as u32) % world;
                let trigger = Some(EventId::nvshmem(peer as u16, local(level) + 1));
                let place = Place::Peer(peer as u16);
                if random.chance(20) {
                    b.task(worker, SIGNAL, "signal", &[], &[], &deps, trigger);
                } else if random.chance(70) {
                    let slot = |r: u32| Region::whole(&[world, width]).with(0, r, r + 1).with(1, lo, hi);
                    let source = b.inner(2, slot(random.below(world as usize) as u32), Place::Own);
                    let target = b.inner(2, slot(rank), place);
                    b.task(worker, COPY, "copy", &[source], &[target], &deps, trigger);
                } else {
                    let region = a_box(random);
                    let source = b.at([0, 1, 3][random.below(3)], region, Place::Own);
                    let target = b.at(3, region, place);
                    b.task(worker, COPY, "copy", &[source], &[target], &deps, trigger);
                }
            } else {
                if random.chance(60) {
                    let tensor = if random.chance(70) { 1 } else { 3 };
                    outputs.push(b.at(tensor, a_box(random), Place::Own));
                }
                let trigger = Some(EventId::local(rank as u16, local(level)));
                b.task(worker, LINEAR, "work", &inputs, &outputs, &deps, trigger);
            }
            if level + 1 < levels && random.chance(50) {
                level += 1;
            }
        }
    }
    // Events that nobody triggers get a trigger; the last task waits for all events.
    let mut triggered: Vec<EventId> = Vec::new();
    for b in &builders {
        triggered.extend(b.graph.tasks.iter().filter_map(|t| t.trigger));
    }
    for level in 0..levels {
        for rank in 0..world {
            let local = EventId::local(rank as u16, 3 + 2 * level);
            if !triggered.contains(&local) {
                let deps = [if level == 0 { 1 } else { 1 + 2 * level }];
                builders[rank as usize].task(workers, LINEAR, "fill", &[], &[], &deps, Some(local));
            }
            let remote = EventId::nvshmem(rank as u16, 4 + 2 * level);
            if world > 1 && !triggered.contains(&remote) {
                let peer = (rank + 1) % world;
                let deps = [if level == 0 { 1 } else { 1 + 2 * level }];
                builders[peer as usize].task(workers, SIGNAL, "fill", &[], &[], &deps, Some(remote));
            }
        }
    }
    for rank in 0..world {
        let mut deps: Vec<u32> = (0..levels).map(|l| 3 + 2 * l).collect();
        if world > 1 {
            deps.extend((0..levels).map(|l| 4 + 2 * l));
        }
        let trigger = Some(EventId::local(rank as u16, 2));
        builders[rank as usize].task(0, LINEAR, "last", &[], &[], &deps, trigger);
    }
    let mut graphs: Vec<TaskGraph> = builders.into_iter().map(|b| b.graph).collect();
    if world == 1 {
        // There is no peer to trigger the remote events.
        for graph in &mut graphs {
            let kept: Vec<u32> = (0..graph.events.len() as u32).filter(|e| *e < 3 || e % 2 == 1).collect();
            let new = |e: u32| kept.iter().position(|&k| k == e).unwrap() as u32;
            for t in &mut graph.tasks {
                t.dependencies.iter_mut().for_each(|e| *e = new(*e));
                t.trigger = t.trigger.map(|e| EventId::local(0, new(e.index())));
            }
            graph.events = kept.iter().map(|&e| graph.events[e as usize]).collect();
        }
    }
    count_triggers(&mut graphs);
    graphs
}

/// One rank, one persistent tensor, and tasks with one access each in a few chains: so few faults that none
/// hides another.
fn sparse_graphs(random: &mut Random) -> Vec<TaskGraph> {
    let wide = random.chance(40);
    let dims: &[u32] = if wide { &[12, 12, 12, 12] } else { &[4] };
    let workers = 2 + random.below(2) as u32;
    let mut b = RankBuilder::new(0, 1, workers);
    let p = b.tensor("p", DType::F32, dims, Space::Device, Role::Persistent { region_dims: None });
    let events: Vec<u32> = (0..2).map(|_| b.event(false)).collect();
    // Many boxes are needed to divide the tensor into too many cells; reads of corners order nothing.
    let tasks = if wide { 8 } else { 3 + random.below(4) };
    for i in 0..tasks {
        let late = i >= tasks / 2;
        let mut region = Region::whole(dims);
        let small = wide && random.chance(80);
        for (d, &size) in dims.iter().enumerate() {
            let lo = random.below(size as usize) as u32;
            let most = if small { 2.min(size - lo) } else { size - lo };
            region = region.with(d, lo, lo + 1 + random.below(most as usize) as u32);
        }
        if random.chance(20) {
            region = Region::whole(dims);
        }
        let access = [b.at(p, region, Place::Own)];
        let (inputs, outputs): (&[Operand], &[Operand]) =
            if random.chance(60) { (&access, &[]) } else { (&[], &access) };
        let deps = [if late && random.chance(60) { events[0] } else { 1 }];
        let trigger = Some(EventId::local(0, events[usize::from(late)]));
        b.task(random.below(workers as usize) as u32, LINEAR, "work", inputs, outputs, &deps, trigger);
    }
    b.task(0, LINEAR, "last", &[], &[], &events, Some(EventId::local(0, 2)));
    let mut graphs = vec![b.graph];
    count_triggers(&mut graphs);
    graphs
}

/// Changes one thing, leaving indices in range.
fn mutate(graphs: &mut [TaskGraph], random: &mut Random) {
    let rank = random.below(graphs.len());
    let graph = &mut graphs[rank];
    let task = 2 + random.below(graph.tasks.len() - 2);
    let events = graph.events.len() as u32;
    match random.below(9) {
        0 => {
            let deps = &mut graph.tasks[task].dependencies;
            if !deps.is_empty() {
                deps.remove(random.below(deps.len()));
            }
        }
        1 => {
            let e = 3 + random.below(events as usize - 3) as u32;
            let deps = &mut graph.tasks[task].dependencies;
            if !deps.is_empty() {
                let at = random.below(deps.len());
                deps[at] = e;
            }
        }
        2 => {
            let e = 1 + random.below(events as usize - 1) as u32;
            graph.tasks[task].dependencies.push(e);
        }
        3 => {
            // Another local event, or none.
            if graph.tasks[task].trigger.is_none_or(|e| !e.is_nvshmem()) {
                let e = 2 + random.below(events as usize - 2) as u32;
                let local = !graph.events[e as usize].remote;
                graph.tasks[task].trigger = local.then(|| EventId::local(rank as u16, e));
            }
        }
        4 => {
            let workers = graph.worker_lists.len();
            let list = &mut graph.worker_lists[random.below(workers)];
            if list.len() > 1 {
                let at = random.below(list.len() - 1);
                list.swap(at, at + 1);
            }
        }
        5 | 6 => {
            // Another region of the same tensor.
            let t = &graph.tasks[task];
            let count = usize::from(t.num_inputs + t.num_outputs);
            if count > 0 {
                let at = t.first_operand as usize + random.below(count);
                let old = graph.operands[at];
                let dims = graph.tensors[old.tensor as usize].dims.clone();
                let d = random.below(dims.len());
                let lo = random.below(dims[d] as usize) as u32;
                let hi = lo + 1 + random.below((dims[d] - lo) as usize) as u32;
                let b = RankBuilder { graph: graph.clone() };
                graph.operands[at] = b.at(old.tensor, old.region.with(d, lo, hi), old.place);
            }
        }
        7 => {
            let e = 3 + random.below(events as usize - 3) as u32;
            graph.tasks[task].carried.push((e, 1 + random.below(2) as u32));
        }
        _ => {
            // To another worker's list, at a random place.
            let workers = graph.worker_lists.len();
            let to = random.below(workers);
            graph.worker_lists.iter_mut().for_each(|l| l.retain(|&t| t != task as u32));
            let at = random.below(graph.worker_lists[to].len() + 1);
            graph.worker_lists[to].insert(at, task as u32);
            graph.tasks[task].worker = Some(to as u32);
        }
    }
    count_triggers(graphs);
}

/// The graphs of a seed.
fn graphs_of(seed: u64) -> Vec<TaskGraph> {
    let mut random = Random(seed);
    if random.chance(30) {
        return sparse_graphs(&mut random);
    }
    let mut graphs = if random.chance(50) {
        random_graphs(&mut random)
    } else {
        let lowering = if random.chance(50) { Lowering::Copy } else { Lowering::Flagged };
        let world = 2 + random.below(2) as u32;
        chain(
            world,
            1 + random.below(2) as u32,
            1 + random.below(2) as u32,
            1 + random.below(2) as u32,
            lowering,
        )
    };
    for _ in 0..random.below(4) {
        if graphs.iter().all(|g| g.events.len() > 3) {
            mutate(&mut graphs, &mut random);
        }
    }
    graphs
}

/// Both verdicts; `None` if the structure is broken, which the simple verifier does not check.
fn verdicts(graphs: &[TaskGraph]) -> Option<(Result<(), String>, Option<&'static str>)> {
    let ours = verify(graphs);
    let structure = |v: &Violation| matches!(v.kind, ViolationKind::Structure | ViolationKind::Triggers);
    if ours.as_ref().is_err_and(|found| found.iter().any(structure)) {
        return None;
    }
    Some((ours.map(|_| ()).map_err(|v| v[0].to_string()), brute(graphs)))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn same_verdict_as_the_closure(seed: u64) {
        if let Some((ours, simple)) = verdicts(&graphs_of(seed)) {
            prop_assert_eq!(ours.is_err(), simple.is_some(), "ours {:?}, closure {:?}", ours, simple);
        }
    }
}

#[test]
fn the_random_graphs_are_of_every_kind() {
    let mut kinds: BTreeMap<&str, u32> = BTreeMap::new();
    for seed in 0..1500 {
        let kind = match verdicts(&graphs_of(seed)) {
            None => "structure",
            Some((_, None)) => "safe",
            Some((_, Some(why))) => why,
        };
        *kinds.entry(kind).or_default() += 1;
    }
    eprintln!("{kinds:?}");
    assert!(kinds["safe"] > 150, "{kinds:?}");
    for kind in [
        "cycle",
        "not reached from begin",
        "not done at the end",
        "unordered",
        "unordered across epochs",
        "counter across epochs",
        "read of what nobody wrote",
        "flagged read without exactly one writer",
    ] {
        assert!(kinds.get(kind).is_some_and(|&n| n >= 2), "no {kind} in {kinds:?}");
    }
}
