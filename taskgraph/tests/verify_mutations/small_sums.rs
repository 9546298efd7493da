//! One and two layers of sums over ranks, in all orders of their tasks: each lowering, both placements.

use crate::builder_support::{attrs, registry, ways};
use crate::machine::{Machine, Outcome};
use crate::random::Random;
use crate::{checked, mutate, number};
use serde_json::json;
use std::collections::BTreeMap;
use taskgraph::task_graph::{Operand, Placement, Task, TaskGraph, core_types};
use taskgraph::verify::verify;
use taskgraph::*;

/// More states than any of these sums has.
const STATES: usize = 20_000;
/// Two tiles of weights.
const WIDTH: u64 = 32;
const PLACEMENTS: [Placement; 2] = [Placement::Static, Placement::Dynamic];

/// A lowering, with its name in `ways`, and the node of each rank.
const LOWERINGS: [(Allreduce, &str, &[u32]); 4] = [
    (Allreduce::CopyReduce, "copy-reduce", &[0, 0]),
    (Allreduce::OneShot, "one-shot", &[0, 0]),
    (Allreduce::TwoShot, "two-shot", &[0, 0]),
    // The smallest with a real hierarchy: a node of two ranks, and one that is alone.
    (Allreduce::Hierarchical, "hierarchical", &[0, 0, 1]),
];

/// Each layer reads the whole sum of the one before. Two column tiles, and one worker.
fn sums(
    (allreduce, way, nodes): (Allreduce, &str, &[u32]),
    placement: Placement,
    layers: usize,
) -> Vec<TaskGraph> {
    let world = nodes.len() as u32;
    let mut g = OpGraph::new("sums", Capacity { rows: 1, samples: 1, active: 1 });
    let mut x = g.input("x", DType::F32, &[1, WIDTH]);
    for layer in 0..layers {
        let name = |what: &str| format!("{what}{layer}");
        x = if allreduce == Allreduce::OneShot {
            // Only products can push their partial sums.
            let (inner, even) = (u64::from(world), Split::Even { unit: 1 });
            let up = g.weight(&name("up"), DType::F32, &[inner, WIDTH], Some((0, even)));
            let down = g.weight(&name("down"), DType::F32, &[WIDTH, inner], Some((1, even)));
            let h = g.op(&name("h"), "linear", &[x, up], attrs(json!({})));
            g.op(&name("sum"), "linear", &[h, down], attrs(json!({})))
        } else {
            let partial = json!({"dims": [1, WIDTH], "write": [1, 2], "read": [[1, 1]], "partial": true});
            g.op(&name("sum"), "grid", &[x], attrs(partial))
        };
    }
    g.tensor_mut(x).output = true;
    let target = Target { max_tiles: 2, column_unit: 1, ..Target::cpu(1) };
    let options =
        BuildOptions { allreduce, placement, nodes: nodes.to_vec(), ..BuildOptions::new(world, target) };
    let graphs = build_all(&g, &registry(), &options).unwrap();
    assert_eq!(ways(&graphs[0]), BTreeMap::from([(way, layers)]));
    graphs
}

/// Calls `each` for one and two layers of every lowering, with both placements.
pub fn for_all(mut each: impl FnMut(&str, Allreduce, Placement, &[TaskGraph])) {
    for layers in [1, 2] {
        for lowering in LOWERINGS {
            for placement in PLACEMENTS {
                let what = format!("{layers} x {}, {placement:?}", lowering.1);
                each(&what, lowering.0, placement, &sums(lowering, placement, layers));
            }
        }
    }
}

/// Three iterations, so each buffer is used again.
#[test]
fn sums_are_the_same_in_all_orders() {
    for_all(|what, _, _, graphs| {
        verify(graphs).unwrap();
        match Machine::new(&[graphs], &[0, 0, 0]).explore(STATES) {
            Outcome::Same { states, all: true } => println!("{what}: {states} states"),
            outcome => panic!("{what}: {outcome:?}"),
        }
    });
}

/// The sums, each without one of its waits.
pub fn broken(placement: Placement, valid: &[TaskGraph]) -> Vec<(String, Vec<TaskGraph>)> {
    let mut all = Vec::new();
    for (rank, graph) in valid.iter().enumerate() {
        for (index, task) in graph.tasks.iter().enumerate() {
            for (at, &event) in task.dependencies.iter().enumerate() {
                let is_sum = graph.type_name(task) == core_types::REDUCE;
                if placement == Placement::Static && is_sum && graph.events[event as usize].remote {
                    let mut graphs = valid.to_vec();
                    graphs[rank].tasks[index].dependencies.remove(at);
                    all.push((format!("rank {rank}, task {index}"), graphs));
                }
            }
        }
        // A dynamic task waits by its launch. Here it comes one trigger early. A signal that a buffer is free may be implied by other waits,
        // and no task computes with the last sum.
        let names = |g: &TaskGraph, operands: &[Operand]| -> Vec<String> {
            operands.iter().map(|o| g.tensors[o.tensor as usize].name.clone()).collect()
        };
        let computes = |t: &&Task| graph.type_name(t) != core_types::NVSHMEM_COPY;
        let read: Vec<String> =
            graph.tasks.iter().filter(computes).flat_map(|t| names(graph, graph.inputs(t))).collect();
        let arrives = |index: usize| {
            let this = Some(EventId::nvshmem(rank as u16, index as u32));
            let sends = |g: &TaskGraph, t: &Task| {
                t.trigger == this && names(g, g.outputs(t)).iter().any(|name| read.contains(name))
            };
            valid.iter().any(|g| g.tasks.iter().any(|t| sends(g, t)))
        };
        for index in 3..graph.events.len() {
            if placement == Placement::Dynamic && arrives(index) {
                let mut graphs = valid.to_vec();
                graphs[rank].events[index].num_triggers -= 1;
                all.push((format!("rank {rank}, event {index}"), graphs));
            }
        }
    }
    all
}

/// Each sum reads what other ranks have sent. Without the wait for that, the verifier refuses the graphs, and the machine finds an order
/// in which a task reads something else, or waits forever.
#[test]
fn sums_wait_for_each_summand() {
    for_all(|what, allreduce, placement, valid| {
        let broken = broken(placement, valid);
        for (at, graphs) in &broken {
            assert!(verify(graphs).is_err(), "{what}, {at}");
            let outcome = Machine::new(&[graphs], &[0, 0]).explore(STATES);
            assert!(matches!(outcome, Outcome::Differs | Outcome::Stuck), "{what}, {at}: {outcome:?}");
        }
        println!("{what}: {} waits, each needed", broken.len());
        // Sums of pushed words wait for the words, and only then.
        assert!(allreduce == Allreduce::OneShot || !broken.is_empty(), "{what}");
    });
}

/// Layers alternate between two buffers of pushed words. With one, a rank could overwrite words that another has not read.
#[test]
fn pushed_sums_need_two_buffers() {
    for placement in PLACEMENTS {
        let mut graphs = sums(LOWERINGS[1], placement, 2);
        for graph in &mut graphs {
            let pushed: Vec<usize> =
                (0..graph.tensors.len()).filter(|&t| graph.tensors[t].dtype == DType::F32Flagged).collect();
            let [first, second] = pushed[..] else { panic!("{placement:?}: {pushed:?}") };
            assert_ne!(graph.tensors[first].overlay, graph.tensors[second].overlay, "{placement:?}");
            graph.tensors[second].overlay = graph.tensors[first].overlay;
        }
        assert!(verify(&graphs).is_err(), "{placement:?}");
        assert_eq!(Machine::new(&[&graphs], &[0]).explore(STATES), Outcome::Stuck, "{placement:?}");
    }
}

/// Changes one thing until enough of the changed graphs are accepted. These have the same result in all orders.
#[test]
fn accepted_changes_of_small_sums_are_harmless_in_all_orders() {
    let wanted = number("MPK_SMALL_SUMS", 20);
    for_all(|what, _, _, valid| {
        let mut seed = number("MPK_SEED", 1) << 48;
        let (mut refused, mut accepted, mut states_of_all) = (0, BTreeMap::new(), 0);
        let mut done = 0;
        while done < wanted {
            seed += 1;
            let mut random = Random(seed);
            let mut graphs = valid.to_vec();
            let Some(kind) = mutate(&mut graphs, &mut random) else { continue };
            if checked(std::slice::from_ref(&graphs), seed).is_err() {
                refused += 1;
                continue;
            }
            done += 1;
            match Machine::new(&[&graphs], &[0, 0]).explore(STATES) {
                Outcome::Same { states, all: true } => states_of_all += states,
                outcome => {
                    panic!("{what}, seed {seed}, {kind}: accepted, but an execution ends as {outcome:?}")
                }
            }
            *accepted.entry(kind).or_insert(0) += 1;
        }
        println!("{what}: {refused} refused, {accepted:?} harmless in all orders ({states_of_all} states)");
        assert!(refused > wanted / 2 && accepted.len() > 2, "{what}: {refused} {accepted:?}");
    });
}
