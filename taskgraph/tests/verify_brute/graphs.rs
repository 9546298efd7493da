//! Random graphs, and random changes of them.

use crate::random::Random;
use crate::verify_support::*;
use taskgraph::op_graph::Role;
use taskgraph::task_graph::{Area, Operand, Overlay, Place, Space, TaskGraph};
use taskgraph::{DType, EventId, Region};

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
    // Events without a trigger get one; the last task waits for all events.
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

/// One rank and many readers of few boxes, which wait for few different events. So most can use the proof of an earlier one,
/// and some must not. If `turns`, the two tensors share their memory.
pub fn reader_graphs(seed: u64, turns: bool) -> Vec<TaskGraph> {
    let mut random = Random(seed);
    let workers = 4;
    let mut b = RankBuilder::new(0, 1, workers + 1);
    let tensors = ["a", "b"].map(|name| b.tensor(name, DType::F32, &[4], Space::Device, Role::Activation));
    if turns {
        let overlay = Some(Overlay { area: Area::Device, offset: 0 });
        b.graph.tensors.iter_mut().for_each(|t| t.overlay = overlay);
    }
    let tasks = 6 + random.below(3);
    // A longer chain, so that clocks do not know all events.
    let mut chain = 1;
    for _ in 0..random.below(8) {
        let next = b.event(false);
        b.task(workers, LINEAR, "chain", &[], &[], &[chain], Some(EventId::local(0, next)));
        chain = next;
    }
    let mut events: Vec<u32> = Vec::new();
    let mut written: Option<u32> = None;
    // The second half writes the second tensor, each task a word of its own, so that only the first tensor orders them.
    for i in 0..tasks {
        let late = turns && 2 * i >= tasks;
        let writes = i == 0 || late || random.chance(25);
        let whole = Region::whole(&[4]);
        let region = match random.below(4) {
            _ if late => whole.with(0, i as u32 % 4, i as u32 % 4 + 1),
            _ if i == 0 => whole,
            0 => whole.with(0, 0, 2),
            _ => whole,
        };
        let access = [b.at(tensors[usize::from(late)], region, Place::Own)];
        let (inputs, outputs): (&[Operand], &[Operand]) =
            if writes { (&[], &access) } else { (&access, &[]) };
        let deps: Vec<u32> = match written {
            None => vec![1],
            // The chain comes late in the order of the proof, and orders nothing.
            Some(_) if late && random.chance(20) => vec![chain],
            Some(_) if writes && random.chance(60) => events.clone(),
            Some(event) if random.chance(70) => vec![event],
            Some(_) => vec![random.pick(&events)],
        };
        let event = match events.last() {
            Some(&last) if !writes && random.chance(40) && Some(last) != written => last,
            _ => b.event(false),
        };
        let worker = random.below(workers as usize) as u32;
        b.task(worker, LINEAR, "work", inputs, outputs, &deps, Some(EventId::local(0, event)));
        events.push(event);
        if writes {
            written = Some(event);
        }
    }
    events.push(chain);
    b.task(workers, LINEAR, "last", &[], &[], &events, Some(EventId::local(0, 2)));
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
pub fn graphs_of(seed: u64) -> Vec<TaskGraph> {
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
