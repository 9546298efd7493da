//! Ranks that are alike: only rank 0's graph is kept, and it stands for the others as long as none differs.

#[allow(dead_code)]
mod builder_support;
mod verify_support;

use builder_support::{decoder, registry};
use taskgraph::builder::Spares;
use taskgraph::digest::digest;
use taskgraph::stats::{class_stats, stats};
use taskgraph::task_graph::Place;
use taskgraph::verify::{Class, Proven, may_follow, verify, verify_every_rank, verify_succession};
use taskgraph::*;
use verify_support::kept::kept;

fn settings() -> Vec<BuildOptions> {
    let mut all = Vec::new();
    for world in [1, 2, 3, 4, 8] {
        for placement in [Placement::Static, Placement::Dynamic] {
            for allreduce in [Allreduce::CopyReduce, Allreduce::OneShot, Allreduce::TwoShot] {
                let options = BuildOptions::new(world, Target::cpu(3));
                all.push(BuildOptions { placement, allreduce, ..options });
            }
        }
    }
    let nodes = vec![0, 0, 1];
    let allreduce = Allreduce::Hierarchical;
    all.push(BuildOptions { allreduce, nodes, ..BuildOptions::new(3, Target::cpu(3)) });
    all
}

fn builder(layers: usize, options: &BuildOptions) -> Builder {
    // 64 columns are split evenly by 2, 4 and 8 ranks, not by 3.
    Builder::new(&decoder(layers, 64, 64, 64, "linear", options.world), &registry(), options).unwrap()
}

/// A kept class gives the same result for all ranks as all graphs do, and reused memory does not change it.
#[test]
fn rank_0_stands_for_all() {
    let spares = Spares::default();
    let (mut alike, mut whole) = (0, 0);
    for options in settings() {
        let (mut proven, mut all) = (Vec::new(), Vec::new());
        for layers in [2, 1] {
            let builder = builder(layers, &options);
            let graphs = builder.all().unwrap();
            let (whole_class, seen) = builder.class_seen(&spares, digest).unwrap();
            let class = builder.class(&spares).unwrap();
            assert_eq!(format!("{class:?}"), format!("{whole_class:?}"), "{options:?}");
            assert_eq!(seen, graphs.iter().map(digest).collect::<Vec<_>>(), "{options:?}");
            assert_eq!(class.ranks(), graphs.len());
            assert_eq!(class.graphs()[0], graphs[0], "{options:?}");
            assert_eq!(class_stats(&class), stats(&graphs), "{options:?}");
            match &class {
                Class::Alike(_) => alike += 1,
                Class::All(kept) => {
                    assert_eq!(*kept, graphs, "{options:?}");
                    whole += 1;
                }
            }
            let class = Proven::new(class, |graph| spares.put(graph));
            let class = class.unwrap_or_else(|found| panic!("{options:?}: {}", found[0]));
            assert_eq!(class.report(), verify(&graphs).unwrap(), "{options:?}");
            // A sum leaves out its own slot. Rank 0's slot is at the edge; others divide the rest in two. So the counts of
            // accesses are not compared.
            let counts = |r: &taskgraph::verify::Report| (r.ranks, r.tasks, r.events);
            let each = verify_every_rank(std::slice::from_ref(&graphs)).unwrap();
            assert_eq!(counts(&class.report()), counts(&each), "{options:?}");
            proven.push(class);
            all.push(graphs);
        }
        assert!(may_follow(&proven), "{options:?}: the summaries do not show it");
        assert!(verify_succession(&all).is_ok() && verify_every_rank(&all).is_ok(), "{options:?}");
    }
    assert!(alike > 10 && whole > 5, "{alike} {whole}");
}

/// Any property of a rank's tasks that the proof uses makes the rank differ from the others, if it is changed on that
/// rank alone.
#[test]
fn a_change_on_one_rank_makes_it_differ() {
    type Change = fn(&mut TaskGraph, usize) -> bool;
    fn task_change(
        graph: &mut TaskGraph,
        i: usize,
        change: impl Fn(&mut taskgraph::task_graph::Task),
    ) -> bool {
        let i = i % graph.tasks.len();
        let before = graph.tasks[i].clone();
        change(&mut graph.tasks[i]);
        graph.tasks[i] != before
    }
    let changes: [(&str, Change); 13] = [
        ("trigger", |g, i| {
            let own = EventId::local(g.rank as u16, 2);
            task_change(g, i, |t| t.trigger = Some(own))
        }),
        ("no trigger", |g, i| task_change(g, i, |t| t.trigger = None)),
        ("dependency", |g, i| task_change(g, i, |t| t.dependencies.push(1))),
        ("fewer dependencies", |g, i| task_change(g, i, |t| t.dependencies.clear())),
        ("carried", |g, i| task_change(g, i, |t| t.carried.push((3, 1)))),
        ("fewer inputs", |g, i| task_change(g, i, |t| t.num_inputs = t.num_inputs.saturating_sub(1))),
        ("type", |g, i| task_change(g, i, |t| t.task_type ^= 1)),
        ("event", |g, i| {
            let i = i % g.events.len();
            g.events[i].num_triggers += 1;
            true
        }),
        ("list", |g, i| {
            let lists = g.worker_lists.len();
            lists > 0 && g.worker_lists[i % lists].pop().is_some()
        }),
        ("place", |g, i| {
            let operands = g.operands.len();
            let (next, operand) = ((g.rank + 1) % g.world, &mut g.operands[i % operands]);
            let before = std::mem::replace(&mut operand.place, Place::Peer(next as u16));
            before != operand.place
        }),
        ("offset", |g, i| {
            let (operands, tensors) = (g.operands.len(), &g.tensors);
            let operand = &mut g.operands[i % operands];
            let weight = matches!(tensors[operand.tensor as usize].role, op_graph::Role::Weight { .. });
            operand.offset += 4;
            !weight
        }),
        ("length", |g, i| {
            let operands = g.operands.len();
            g.operands[i % operands].dims[0] += 1;
            true
        }),
        ("bytes", |g, i| {
            let tensors = g.tensors.len();
            g.tensors[i % tensors].bytes += 16;
            true
        }),
    ];
    let mut tried = std::collections::BTreeMap::new();
    for options in settings() {
        let graphs = builder(1, &options).all().unwrap();
        if !matches!(kept(&graphs), Class::Alike(_)) {
            continue;
        }
        for rank in 0..graphs.len() {
            for (what, change) in changes {
                for i in [3usize, 17, 40, 101, 230] {
                    let mut changed = graphs.clone();
                    if change(&mut changed[rank], i) {
                        *tried.entry(what).or_insert(0) += 1;
                        let class = kept(&changed);
                        assert!(matches!(class, Class::All(_)), "{options:?}: {what} {i} of rank {rank}");
                    }
                }
            }
        }
    }
    assert!(tried.len() == changes.len() && tried.values().all(|&n| n > 20), "{tried:?}");
    println!("{tried:?}");
}

/// A rank that uses rank 0's slot of a tensor instead of its own differs from it, even if all its other operands are
/// rotated.
#[test]
fn an_operand_that_does_not_turn_makes_ranks_differ() {
    let mut tried = 0;
    for options in settings() {
        let graphs = builder(2, &options).all().unwrap();
        if !matches!(kept(&graphs), Class::Alike(_)) {
            continue;
        }
        for rank in 1..graphs.len() {
            let constant = |tensor: u32| {
                let role = &graphs[0].tensors[tensor as usize].role;
                matches!(role, op_graph::Role::Weight { .. } | op_graph::Role::Constant)
            };
            let turned: Vec<usize> = (0..graphs[0].operands.len())
                .filter(|&i| {
                    let (x, y) = (&graphs[0].operands[i], &graphs[rank].operands[i]);
                    !constant(x.tensor) && (x.offset, x.region) != (y.offset, y.region)
                })
                .collect();
            for &i in turned.iter().step_by(1 + turned.len() / 6) {
                let mut changed = graphs.clone();
                let first = graphs[0].operands[i];
                let operand = &mut changed[rank].operands[i];
                (operand.offset, operand.region) = (first.offset, first.region);
                assert!(matches!(kept(&changed), Class::All(_)), "{options:?}: operand {i} of rank {rank}");
                tried += 1;
            }
        }
    }
    assert!(tried > 50, "{tried}");
}

/// The builder declares that each layer's operands and tasks are an earlier layer's with other tensors. If one layer of rank 0 is
/// not like that, this is found, wherever the difference is.
#[test]
fn a_layer_of_rank_0_that_differs_from_what_is_repeated_is_found() {
    let options = BuildOptions { allreduce: Allreduce::CopyReduce, ..BuildOptions::new(2, Target::cpu(3)) };
    let builder = builder(24, &options);
    let graphs = builder.all().unwrap();
    // What the builder declares of rank 1 is compared with a changed rank 0.
    let found = |first: TaskGraph| matches!(builder.class_beside(first).unwrap(), Class::All(_));
    assert!(!found(graphs[0].clone()));
    let layer = |task: &taskgraph::task_graph::Task| {
        graphs[0].ops.get(task.op as usize).is_some_and(|op| op.contains("17"))
    };
    let tasks: Vec<usize> = (0..graphs[0].tasks.len()).filter(|&t| layer(&graphs[0].tasks[t])).collect();
    assert!(tasks.len() > 10, "{}", tasks.len());
    for &t in &tasks {
        let mut changed = graphs[0].clone();
        changed.tasks[t].num_inputs ^= 1;
        assert!(found(changed), "inputs of task {t}");
        // These events exist, so the graph is sound by itself and only the comparison can find the difference.
        for d in 0..graphs[0].tasks[t].dependencies.len() {
            let mut changed = graphs[0].clone();
            changed.tasks[t].dependencies[d] ^= 1;
            assert!(found(changed), "dependency {d} of task {t}");
        }
        if let Some(trigger) = graphs[0].tasks[t].trigger.filter(|trigger| !trigger.is_nvshmem()) {
            let mut changed = graphs[0].clone();
            changed.tasks[t].trigger = Some(EventId::local(trigger.owner(), trigger.index() ^ 1));
            assert!(found(changed), "trigger of task {t}");
        }
        let task = &graphs[0].tasks[t];
        let first = task.first_operand as usize;
        for o in first..first + usize::from(task.num_inputs + task.num_outputs) {
            let mut changed = graphs[0].clone();
            changed.operands[o].dims[0] += 1;
            assert!(found(changed), "length of operand {o}");
            let mut changed = graphs[0].clone();
            changed.operands[o].tensor = (changed.operands[o].tensor + 1) % graphs[0].tensors.len() as u32;
            assert!(found(changed), "tensor of operand {o}");
        }
    }
}
