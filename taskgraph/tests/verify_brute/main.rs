//! The verifier against one that is too simple to be wrong: the transitive closure of all edges over two
//! iterations, and every pair of accesses, word by word.

mod graphs;
#[allow(dead_code)]
#[path = "../../../tests/src/random.rs"]
mod random;
#[path = "../verify_support/mod.rs"]
mod verify_support;

use graphs::{graphs_of, reader_graphs};
use proptest::prelude::*;
use std::collections::{BTreeMap, HashMap};
use taskgraph::DType;
use taskgraph::op_graph::Role;
use taskgraph::task_graph::{Operand, Place, TaskGraph};
use taskgraph::verify::{Violation, ViolationKind, verify};
use verify_support::*;

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
    // Tensors in one place are one.
    let tensors = &graphs[rank].tensors;
    let overlay = tensors[operand.tensor as usize].overlay;
    let shared = overlay.and_then(|o| tensors.iter().position(|t| t.overlay == Some(o)));
    let tensor = shared.map_or(operand.tensor, |first| first as u32);
    owners.flat_map(|owner| found.iter().map(move |&at| (owner, tensor, at))).collect()
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

/// The proof of one reader or write stands for others that wait for the same, and for no others.
#[test]
fn a_proof_stands_for_those_that_wait_for_the_same() {
    let (mut safe, mut unsafe_ones, mut in_turn) = (0, 0, 0);
    for seed in 0..6000 {
        let (ours, simple) = verdicts(&reader_graphs(seed, false)).expect("sound structure");
        assert_eq!(ours.is_err(), simple.is_some(), "seed {seed}: ours {ours:?}, closure {simple:?}");
        *(if ours.is_ok() { &mut safe } else { &mut unsafe_ones }) += 1;
        // The closure does not know that a tensor is done before the next one begins, so it may accept more.
        let (ours, simple) = verdicts(&reader_graphs(seed, true)).expect("sound structure");
        assert!(ours.is_err() || simple.is_none(), "seed {seed}: accepted, but {simple:?}");
        in_turn += u32::from(ours.is_ok());
    }
    assert!(safe > 300 && unsafe_ones > 300 && in_turn > 300, "{safe} {unsafe_ones} {in_turn}");
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
