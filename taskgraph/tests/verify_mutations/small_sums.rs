//! Two-shot and hierarchical sums that are small enough for all orders of their tasks.

use crate::builder_support::{attrs, registry, ways};
use crate::machine::{Machine, Outcome};
use crate::random::Random;
use crate::{checked, mutate, number};
use serde_json::json;
use std::collections::BTreeMap;
use taskgraph::task_graph::{Placement, TaskGraph, core_types};
use taskgraph::verify::verify;
use taskgraph::*;

/// More states than any of these sums has.
const STATES: usize = 200_000;

/// One sum with a column tile for each rank of the largest node, and one worker.
fn one_sum(allreduce: Allreduce, placement: Placement) -> Vec<TaskGraph> {
    let (way, nodes) = match allreduce {
        Allreduce::TwoShot => ("two-shot", vec![0, 0]),
        _ => ("hierarchical", vec![0, 0, 1]),
    };
    let mut g = OpGraph::new("sum", Capacity { rows: 1, samples: 1, active: 1 });
    let x = g.input("x", DType::F32, &[1, 2]);
    let partial = json!({"dims": [1, 2], "write": [1, 2], "read": [[1, 1]], "partial": true});
    let sum = g.op("sum", "grid", &[x], attrs(partial));
    g.tensor_mut(sum).output = true;
    let target = Target { max_tiles: 2, column_unit: 1, ..Target::cpu(1) };
    let world = nodes.len() as u32;
    let options = BuildOptions { allreduce, placement, nodes, ..BuildOptions::new(world, target) };
    let graphs = build_all(&g, &registry(), &options).unwrap();
    assert_eq!(ways(&graphs[0]), BTreeMap::from([(way, 1)]));
    graphs
}

/// Each sum reads what other ranks have sent. Without the wait for it, the verifier refuses the graphs, and the machine finds an
/// order in which a task reads something else.
#[test]
fn sums_wait_for_each_summand() {
    for (allreduce, waits) in [(Allreduce::TwoShot, 2), (Allreduce::Hierarchical, 6)] {
        let graphs = one_sum(allreduce, Placement::Static);
        let mut found = 0;
        for (rank, index) in (0..graphs.len()).flat_map(|r| (2..graphs[r].tasks.len()).map(move |t| (r, t))) {
            let (graph, task) = (&graphs[rank], &graphs[rank].tasks[index]);
            for (at, &event) in task.dependencies.iter().enumerate() {
                let arrives = graph.events[event as usize].remote;
                if graph.type_name(task) != core_types::REDUCE || !arrives {
                    continue;
                }
                let mut broken = graphs.clone();
                broken[rank].tasks[index].dependencies.remove(at);
                assert!(verify(&broken).is_err(), "rank {rank}, task {index}");
                let outcome = Machine::new(&[&broken], &[0]).explore(STATES, 0, || 0);
                assert_eq!(outcome, Outcome::Differs, "{allreduce:?}, rank {rank}, task {index}");
                found += 1;
            }
        }
        assert_eq!(found, waits, "{allreduce:?}");
    }
}

/// Changes one thing until enough of the changed graphs are accepted. These have the same result in all orders.
#[test]
fn accepted_changes_of_small_sums_are_harmless_in_all_orders() {
    let wanted = number("MPK_SMALL_SUMS", 6);
    for (allreduce, placement, wanted) in [
        (Allreduce::TwoShot, Placement::Static, 10 * wanted),
        (Allreduce::TwoShot, Placement::Dynamic, wanted),
        // With dynamic placement, even the smallest hierarchical sum has too many states.
        (Allreduce::Hierarchical, Placement::Static, wanted),
    ] {
        let valid = one_sum(allreduce, placement);
        let mut seed = number("MPK_SEED", 1) << 48;
        let (mut refused, mut accepted, mut states_of_all) = (0, BTreeMap::new(), 0);
        let mut done = 0;
        while done < wanted {
            seed += 1;
            let mut random = Random(seed);
            let mut graphs = valid.clone();
            let Some(kind) = mutate(&mut graphs, &mut random) else { continue };
            if checked(std::slice::from_ref(&graphs), seed).is_err() {
                refused += 1;
                continue;
            }
            done += 1;
            match Machine::new(&[&graphs], &[0, 0]).explore(STATES, 0, || 0) {
                Outcome::Same { states, all: true } => states_of_all += states,
                outcome => panic!("seed {seed}, {kind}: accepted, but an execution ends as {outcome:?}"),
            }
            *accepted.entry(kind).or_insert(0) += 1;
        }
        println!(
            "{allreduce:?}, {placement:?}: {refused} refused, {accepted:?} harmless in all orders ({states_of_all} states)"
        );
        assert!(refused > wanted && accepted.len() > 2, "{refused} {accepted:?}");
    }
}
