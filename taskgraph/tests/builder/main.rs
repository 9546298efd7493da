//! The builder against brute force, and known cases.

#[allow(dead_code)]
#[path = "../builder_support/mod.rs"]
mod builder_support;
mod random;

use builder_support::*;
use serde_json::json;
use taskgraph::task_graph::{Area, EventType, Place, Space, core_types};
use taskgraph::*;

fn options(world: u32, workers: u32) -> BuildOptions {
    BuildOptions::new(world, Target::cpu(workers))
}

fn count(g: &TaskGraph, task_type: &str) -> usize {
    g.tasks.iter().filter(|t| g.type_name(t) == task_type).count()
}

#[test]
fn grids_of_four_and_six_meet_in_two_events() {
    let mut g = OpGraph::new("gcd", capacity());
    let x = g.input("x", DType::F32, &[2, 24]);
    let a = g.op("a", "grid", &[x], attrs(json!({"dims": [2, 24], "write": [1, 4]})));
    let b = g.op("b", "grid", &[a], attrs(json!({"dims": [2, 24], "write": [1, 6], "read": [[1, 6]]})));
    g.tensor_mut(b).output = true;
    let graphs = check(&g, &options(1, 4));
    // Termination, begin, end, and the two.
    assert_eq!(graphs[0].events.len(), 5);
    assert_eq!(graphs[0].events[3].num_triggers, 2);
    assert_eq!(graphs[0].events[4].num_triggers, 2);
    assert_eq!(graphs[0].events[2].num_triggers, 4, "one for each worker");
}

#[test]
fn a_workers_list_triggers_the_end_once() {
    let graph = decoder(2, 64, 40, 50, "linear", 2);
    for placement in [Placement::Static, Placement::Dynamic] {
        let o = BuildOptions { allreduce: Allreduce::OneShot, placement, ..options(2, 3) };
        for g in check(&graph, &o) {
            let end = EventId::local(g.rank as u16, EventId::END_OF_GRAPH);
            let silent = g.tasks[2..].iter().filter(|t| t.trigger.is_none()).count();
            // The pushes: flagged words need no event.
            assert_eq!(silent > 0, placement == Placement::Static);
            for list in &g.worker_lists {
                let ends = list.iter().filter(|&&t| g.tasks[t as usize].trigger == Some(end)).count();
                assert!(ends <= 1, "{ends}");
            }
        }
    }
}

#[test]
fn decoders_are_safe_in_every_setting() {
    for world in [1, 2, 3, 4] {
        for placement in [Placement::Static, Placement::Dynamic] {
            for allreduce in [Allreduce::CopyReduce, Allreduce::OneShot, Allreduce::TwoShot, Allreduce::Auto]
            {
                for workers in [1, 3] {
                    let graph = decoder(3, 64, 40, 50, "linear", world);
                    let o = BuildOptions { placement, allreduce, ..options(world, workers) };
                    check(&graph, &o);
                }
            }
        }
    }
}

#[test]
fn copy_reduce_has_a_copy_for_each_peer_and_tile_and_one_sum() {
    let graph = decoder(2, 64, 40, 50, "linear", 4);
    let o = BuildOptions { allreduce: Allreduce::CopyReduce, ..options(4, 4) };
    for g in check(&graph, &o) {
        let reduces = count(&g, core_types::REDUCE);
        assert_eq!(reduces, 2 * 2, "two layers of two tiles");
        // One more per peer, for the records.
        assert_eq!(count(&g, core_types::NVSHMEM_COPY), reduces * 3 + 3);
        for task in g.tasks.iter().filter(|t| g.type_name(t) == core_types::NVSHMEM_COPY) {
            let trigger = task.trigger.unwrap();
            assert!(trigger.is_nvshmem());
            assert_eq!(g.outputs(task)[0].place, Place::Peer(trigger.owner()));
            assert_eq!(g.outputs(task)[0].dims, g.inputs(task)[0].dims);
            assert_eq!(g.tensors[g.outputs(task)[0].tensor as usize].space, Space::Symmetric);
        }
        for task in g.tasks.iter().filter(|t| g.type_name(t) == core_types::REDUCE) {
            assert_eq!(task.num_inputs, 3, "the residual is added by the sum");
            assert_eq!(g.variants[task.variant as usize].params, [4, g.rank, 0, 2]);
        }
        assert_eq!(count(&g, "add"), 0);
    }
}

#[test]
fn one_shot_pushes_and_copies_nothing() {
    let graph = decoder(2, 64, 40, 50, "linear", 2);
    let o = BuildOptions { allreduce: Allreduce::OneShot, ..options(2, 3) };
    for g in check(&graph, &o) {
        assert_eq!(count(&g, core_types::NVSHMEM_COPY), 1, "the records only");
        let pushed: Vec<_> = g.operands.iter().filter(|o| o.place == Place::All).collect();
        assert_eq!(pushed.len(), 2 * 3, "two layers of three tiles");
        for o in pushed {
            assert_eq!((o.ndim, o.region.lo[0], o.region.hi[0]), (2, g.rank, g.rank + 1));
            assert_eq!(g.tensors[o.tensor as usize].dtype, DType::F32Flagged);
        }
    }
    let plain = decoder(2, 64, 40, 50, "linear_plain", 2);
    let builder = Builder::new(&plain, &registry(), &o).unwrap();
    assert_eq!(builder.notes().len(), 2);
    assert!(count(&builder.rank(0).unwrap(), core_types::NVSHMEM_COPY) > 1);
    check(&plain, &o);
}

#[test]
fn large_sums_are_not_pushed_even_if_that_is_asked_for() {
    for (rows, pushes) in [(512, true), (513, false)] {
        let capacity = Capacity { rows: rows as u32, samples: rows as u32, active: 1 };
        let mut g = OpGraph::new("sum", capacity);
        let even = Split::Even { unit: 1 };
        let none = || attrs(json!({}));
        let x = g.input("x", DType::F32, &[rows, 2048]);
        let up = g.weight("up", DType::F32, &[8, 2048], Some((0, even)));
        let down = g.weight("down", DType::F32, &[2048, 8], Some((1, even)));
        let h = g.op("h", "linear", &[x, up], none());
        let p = g.op("p", "linear", &[h, down], none());
        let y = g.op("y", "add", &[p, x], none());
        g.output(y);
        let o = BuildOptions { allreduce: Allreduce::OneShot, ..options(2, 3) };
        let builder = Builder::new(&g, &registry(), &o).unwrap();
        assert_eq!(builder.notes().is_empty(), pushes, "{:?}", builder.notes());
        assert!(pushes || builder.notes()[0].contains("larger than 4 MiB"), "{:?}", builder.notes());
        for g in builder.all().unwrap() {
            let flagged = g.tensors.iter().any(|t| t.dtype == DType::F32Flagged);
            assert_eq!(flagged, pushes, "{rows} rows");
        }
    }
}

#[test]
fn readers_of_flagged_words_are_launched_with_their_writers() {
    for linear in ["linear", "linear_plain"] {
        let graph = decoder(2, 64, 40, 50, linear, 2);
        let o =
            BuildOptions { allreduce: Allreduce::OneShot, placement: Placement::Dynamic, ..options(2, 3) };
        for g in check(&graph, &o) {
            let pushes = |t: &task_graph::Task| {
                g.outputs(t).iter().any(|o| o.place == Place::All).then(|| g.outputs(t)[0].tensor)
            };
            let mut polls = 0;
            for sum in g.tasks.iter().filter(|t| g.type_name(t) == core_types::REDUCE) {
                let received = g.inputs(sum)[0].tensor;
                if g.tensors[received as usize].dtype != DType::F32Flagged {
                    continue;
                }
                polls += 1;
                let writers: Vec<_> = g.tasks.iter().filter(|t| pushes(t) == Some(received)).collect();
                assert!(
                    writers.iter().any(|t| t.dependencies[0] == sum.dependencies[0]),
                    "{:?}",
                    sum.dependencies
                );
            }
            assert_eq!(polls > 0, linear == "linear");
        }
    }
}

#[test]
fn a_rank_has_room_for_the_tiles_that_it_sums_and_no_others() {
    let graph = decoder(2, 64, 40, 50, "linear_plain", 2);
    let o = BuildOptions { allreduce: Allreduce::TwoShot, ..options(2, 3) };
    let graphs = check(&graph, &o);
    // Columns for which a rank sums what it receives in the tensor `received`.
    let summed = |g: &TaskGraph, received: &str| -> u32 {
        let sums = g.tasks.iter().filter(|t| g.type_name(t) == core_types::REDUCE);
        let of_it = sums.filter(|t| g.tensors[g.inputs(t)[1].tensor as usize].name == received);
        of_it.map(|t| g.outputs(t)[0].dims[1]).sum()
    };
    let mut buffers = 0;
    for tensor in graphs[0].tensors.iter().filter(|t| t.name.ends_with(".received")) {
        let most = graphs.iter().map(|g| summed(g, &tensor.name)).max();
        assert_eq!((tensor.dims[0], Some(tensor.dims[2])), (2, most), "{}", tensor.name);
        buffers += usize::from(tensor.dims[2] < 64);
    }
    assert!(buffers > 0, "no sum is dealt to the ranks");
}

#[test]
fn a_tensor_is_reduced_once_for_all_its_users() {
    let mut g = OpGraph::new("shared", capacity());
    let x = g.input("x", DType::F32, &[4, 32]);
    let w = g.weight("w", DType::F32, &[32, 32], Some((1, Split::Even { unit: 1 })));
    let s = g.op("s", "scale", &[x], attrs(json!({})));
    let p = g.op("p", "linear", &[s, w], attrs(json!({})));
    for name in ["a", "b"] {
        let y = g.op(name, "scale", &[p], attrs(json!({})));
        g.tensor_mut(y).output = true;
    }
    let graphs = check(&g, &options(2, 2));
    assert_eq!(graphs[0].ops.iter().filter(|n| n.contains("allreduce")).count(), 1);
    // A single exchange: nothing else tells a rank that its peers have read.
    assert_eq!(count(&graphs[0], core_types::NVSHMEM_SIGNAL), 1);
}

#[test]
fn fan_in_goes_through_empty_tasks() {
    let mut g = OpGraph::new("join", capacity());
    let x = g.input("x", DType::F32, &[4, 32]);
    let a = g.op("a", "scale", &[x], attrs(json!({})));
    let z = g.input("z", DType::F32, &[4, 32]);
    let b = g.op("b", "scale", &[z], attrs(json!({})));
    let c = g.op("c", "add", &[a, b], attrs(json!({})));
    g.tensor_mut(c).output = true;
    let o = BuildOptions { placement: Placement::Dynamic, ..options(1, 2) };
    let graphs = check(&g, &o);
    // Two tiles, each from two events.
    assert_eq!(count(&graphs[0], core_types::EMPTY), 4);
    let o = BuildOptions { placement: Placement::Static, ..o };
    assert_eq!(count(&check(&g, &o)[0], core_types::EMPTY), 0);
}

#[test]
fn the_launch_of_a_wide_operator_may_be_split() {
    let mut g = OpGraph::new("wide", capacity());
    let x = g.input("x", DType::F32, &[4, 64]);
    let w = g.weight("w", DType::F32, &[64, 64], None);
    let a = g.op("a", "linear", &[x, w], attrs(json!({})));
    let b = g.op("b", "linear", &[a, w], attrs(json!({})));
    g.tensor_mut(b).output = true;
    let o = BuildOptions { placement: Placement::Dynamic, ..options(1, 4) };
    let graphs = check(&g, &o);
    assert_eq!(graphs[0].events[3].event_type, EventType::LaunchMassiveTasks);
    assert_eq!((graphs[0].events[3].num_triggers, graphs[0].events.len()), (4, 4));
}

#[test]
fn with_one_rank_collectives_vanish_and_linear_takes_the_residual() {
    let graphs = check(&decoder(2, 64, 40, 50, "linear", 1), &options(1, 2));
    assert_eq!(count(&graphs[0], core_types::REDUCE), 0);
    assert_eq!(count(&graphs[0], "linear_with_residual"), 2 * 2);
    let mut g = OpGraph::new("alone", capacity());
    let x = g.input("x", DType::F32, &[4, 64]);
    g.tensor_mut(x).sharding = Sharding::Partial;
    let y = g.op("y", "allreduce", &[x], attrs(json!({})));
    g.tensor_mut(y).output = true;
    for world in [1, 2, 3] {
        for placement in [Placement::Static, Placement::Dynamic] {
            let graphs = check(&g, &BuildOptions { placement, ..options(world, 4) });
            assert!(graphs[0].tensors.iter().any(|t| t.name == "y" && t.output));
            assert!(count(&graphs[0], core_types::REDUCE) > 0);
        }
    }
}

#[test]
fn a_split_output_is_gathered_under_its_name() {
    let mut g = OpGraph::new("gather", capacity());
    let x = g.input("x", DType::F32, &[4, 16]);
    let w = g.weight("w", DType::F32, &[21, 16], Some((0, Split::Even { unit: 1 })));
    let y = g.op("y", "linear", &[x, w], attrs(json!({})));
    g.tensor_mut(y).output = true;
    for world in [1, 2, 3, 5] {
        for graph in check(&g, &options(world, 2)) {
            let entry = graph.tensors.iter().find(|t| t.name == "y").unwrap();
            assert_eq!((entry.dims.as_slice(), entry.output), ([4, 21].as_slice(), true));
        }
    }
}

#[test]
fn ranks_without_a_share_signal_instead() {
    let mut g = OpGraph::new("uneven", capacity());
    let x = g.input("x", DType::F32, &[4, 16]);
    let w = g.weight("w", DType::F32, &[3, 16], Some((0, Split::Even { unit: 1 })));
    let y = g.op("y", "linear", &[x, w], attrs(json!({})));
    let z = g.op("z", "grid", &[y], attrs(json!({"dims": [4, 3], "write": [2, 1], "read": [[2, 1]]})));
    g.tensor_mut(z).output = true;
    for placement in [Placement::Static, Placement::Dynamic] {
        let graphs = check(&g, &BuildOptions { placement, ..options(5, 2) });
        let copies: Vec<usize> = graphs.iter().map(|g| count(g, core_types::NVSHMEM_COPY)).collect();
        assert_eq!(copies.iter().sum::<usize>(), 3 * 4);
        assert!(copies.contains(&0));
    }
}

#[test]
fn persistent_tensors_are_read_before_they_are_written() {
    let mut g = OpGraph::new("state", capacity());
    let state = g.add_tensor(op_graph::Tensor {
        name: "state".into(),
        dtype: DType::F32,
        dims: vec![4],
        rows: Rows::Fixed,
        role: Role::Persistent { region_dims: None },
        sharding: Sharding::Replicated,
        output: false,
    });
    let a = g.op("a", "grid", &[state], attrs(json!({"dims": [4, 8], "write": [2, 2], "read": [[4]]})));
    let b = g.add_tensor(op_graph::Tensor {
        name: "b".into(),
        role: Role::Activation,
        dims: vec![],
        ..g.tensor(a).clone()
    });
    g.op_into("b", "grid", &[], &[b, state], attrs(json!({"dims": [4, 2], "write": [2, 1]})));
    g.tensor_mut(a).output = true;
    g.tensor_mut(b).output = true;
    for placement in [Placement::Static, Placement::Dynamic] {
        let graphs = check(&g, &BuildOptions { placement, ..options(1, 2) });
        let waits = graphs[0].tasks.iter().filter(|t| graphs[0].op_name(t) == "b");
        assert!(waits.clone().count() == 2 && waits.clone().all(|t| t.dependencies[0] > 2));
    }
}

#[test]
fn buffers_are_shared_where_the_order_allows() {
    let few = check(
        &decoder(3, 64, 40, 50, "linear", 2),
        &BuildOptions { allreduce: Allreduce::CopyReduce, ..options(2, 2) },
    );
    let many = check(
        &decoder(8, 64, 40, 50, "linear", 2),
        &BuildOptions { allreduce: Allreduce::CopyReduce, ..options(2, 2) },
    );
    for area in Area::ALL {
        assert_eq!(few[0].area_bytes(area), many[0].area_bytes(area), "{area:?}");
    }
    let received = many[0].tensors.iter().filter(|t| t.space == Space::Symmetric && t.dims.len() == 3);
    let places: std::collections::BTreeSet<u64> = received.map(|t| t.overlay.unwrap().offset).collect();
    assert_eq!(places.len(), 2, "exchanges take turns with two buffers");
}

/// Tensors of many shapes, moved at random: what the verifier accepts has no race by the transitive closure of all
/// edges over three iterations.
#[test]
fn graphs_accepted_after_a_move_have_no_race() {
    let mut seed = 1u64;
    let mut random = |n: usize| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 33) as usize % n
    };
    let (mut accepted, mut refused) = (0, 0);
    for lowering in [Allreduce::CopyReduce, Allreduce::OneShot, Allreduce::TwoShot] {
        for placement in [Placement::Static, Placement::Dynamic] {
            let o = BuildOptions { allreduce: lowering, placement, ..options(3, 4) };
            let graphs = build_all(&decoder(3, 64, 40, 50, "linear", 3), &registry(), &o).unwrap();
            let movable: Vec<usize> =
                (0..graphs[0].tensors.len()).filter(|&t| graphs[0].tensors[t].overlay.is_some()).collect();
            for _ in 0..24 {
                let (from, to) = (movable[random(movable.len())], movable[random(movable.len())]);
                let mut moved = graphs.clone();
                for g in &mut moved {
                    let place = g.tensors[to].overlay.unwrap();
                    if g.tensors[from].overlay.unwrap().area == place.area {
                        g.tensors[from].overlay = Some(place);
                    }
                }
                match verify::verify(&moved) {
                    Ok(_) => {
                        accepted += 1;
                        assert_eq!(
                            Unrolled::new(&moved, 3).overlay_race(),
                            None,
                            "{lowering:?} {placement:?}"
                        );
                    }
                    Err(violations) => {
                        refused += 1;
                        let reasons = ["overlaps it", "which shares memory with"];
                        let known = |message: &str| reasons.iter().any(|reason| message.contains(reason));
                        assert!(violations.iter().all(|v| known(&v.message)), "{violations:?}");
                    }
                }
            }
        }
    }
    assert!(accepted > 20 && refused > 20, "{accepted} accepted, {refused} refused");
}

#[test]
fn expanded_operators_run_their_steps_on_local_shapes() {
    let mut g = OpGraph::new("expand", capacity());
    let x = g.input("x", DType::F32, &[4, 16]);
    let w = g.weight("w", DType::F32, &[67, 16], Some((0, Split::Even { unit: 1 })));
    let a = g.op("a", "linear", &[x, w], attrs(json!({})));
    let b = g.op("b", "twice", &[a], attrs(json!({})));
    g.tensor_mut(b).output = true;
    let graphs = build_all(&g, &registry(), &options(3, 2)).unwrap();
    assert!(verify::verify(&graphs).is_ok());
    for graph in &graphs {
        let steps: Vec<_> = graph.tasks.iter().filter(|t| graph.type_name(t) == "scale").collect();
        assert_eq!(steps.len(), 4);
        let half = graph.outputs(steps[0])[0].tensor;
        assert_eq!(graph.inputs(steps[2])[0].tensor, half);
        assert_eq!(graph.tensors[half as usize].dims, [4, if graph.rank < 2 { 22 } else { 23 }]);
        assert_eq!((graph.op_name(steps[0]), graph.op_name(steps[2])), ("b", "b.second"));
    }
}

#[test]
fn errors_name_the_place() {
    let registry = registry();
    let o = options(2, 2);
    let error = |g: &OpGraph| build_all(g, &registry, &o).unwrap_err().to_string();
    let mut g = OpGraph::new("bad", capacity());
    let x = g.input("x", DType::F32, &[4, 16]);
    let y = g.op("y", "lineer", &[x], attrs(json!({})));
    assert!(
        error(&g)
            .contains("`y`: unknown type `lineer`; known are add, all_to_all, allgather, allreduce, grid"),
        "{}",
        error(&g)
    );
    g.ops[0].op_type = "scale".into();
    g.op_into("z", "scale", &[x], &[y], attrs(json!({})));
    assert!(error(&g).contains("`y`, which `y` already writes"));
    g.ops.pop();
    g.ops[0].inputs = vec![y.0];
    assert!(error(&g).contains("no operator before it writes"));
    g.ops[0].inputs = vec![77];
    assert!(error(&g).contains("tensor number 77"));
    g.ops[0].inputs = vec![x.0];
    g.tensor_mut(x).dims = vec![1 << 30, 1 << 30];
    assert!(error(&g).contains("2^"), "{}", error(&g));
    let mut g = OpGraph::new("heads", capacity());
    g.weight("q", DType::F32, &[36, 8], Some((0, Split::Queries { heads: 9, head_dim: 4 })));
    assert!(error(&g).contains("possible numbers of ranks: 1, 3, 9"));
    assert!(build_rank(&OpGraph::new("empty", capacity()), &registry, &o, 2).is_err());
    check(&OpGraph::new("empty", capacity()), &o);
}

/// `y = x W`, with W split by columns, written into a persistent tensor: each rank would keep its own summand.
#[test]
fn partial_values_in_persistent_tensors_are_refused() {
    let persistent = |g: &mut OpGraph, name: &str, sharding: Sharding| {
        g.add_tensor(op_graph::Tensor {
            name: name.into(),
            dtype: DType::F32,
            dims: vec![4, 8],
            rows: Rows::Tokens,
            role: Role::Persistent { region_dims: None },
            sharding,
            output: false,
        })
    };
    let build = |g: &OpGraph, world: u32| {
        build_all(g, &registry(), &BuildOptions::new(world, Target::cpu(2))).map_err(|e| e.to_string())
    };
    let even = Split::Even { unit: 1 };
    let mut g = OpGraph::new("g", capacity());
    let x = g.input("x", DType::F32, &[4, 16]);
    let w = g.weight("w", DType::F32, &[8, 16], Some((1, even)));
    let y = persistent(&mut g, "y", Sharding::Replicated);
    g.op_into("down", "linear", &[x, w], &[y], attrs(json!({})));
    assert!(build(&g, 1).is_ok());
    // The sum over ranks is stored, not one rank's summand.
    let graphs = build(&g, 2).unwrap();
    verify::verify(&graphs).unwrap();
    let sums = graphs[0].tasks.iter().filter(|t| graphs[0].type_name(t) == task_graph::core_types::REDUCE);
    assert!(sums.count() > 0);

    let mut g = OpGraph::new("g", capacity());
    let x = g.input("x", DType::F32, &[4, 16]);
    let w = g.weight("w", DType::F32, &[8, 16], Some((0, even)));
    let h = g.op("h", "linear", &[x, w], attrs(json!({})));
    let y = persistent(&mut g, "y", Sharding::Replicated);
    g.op_into("gather", "allgather", &[h], &[y], attrs(json!({})));
    // Peers write into the symmetric heap; each rank copies from there.
    let options = BuildOptions::new(2, Target::cpu(2));
    let graphs = build_all(&g, &registry(), &options).unwrap();
    verify::verify(&graphs).unwrap();
    let y = graphs[0].tensors.iter().find(|t| t.name == "y").unwrap();
    assert_eq!(y.space, task_graph::Space::Device);

    // A sum over ranks may be stored there: with every lowering, `reduce` writes the rank's own memory.
    let mut g = OpGraph::new("g", capacity());
    let x = g.input("x", DType::F32, &[4, 16]);
    let w = g.weight("w", DType::F32, &[8, 16], Some((1, even)));
    let h = g.op("h", "linear", &[x, w], attrs(json!({})));
    let y = persistent(&mut g, "y", Sharding::Replicated);
    g.op_into("sum", "allreduce", &[h], &[y], attrs(json!({})));
    for allreduce in [Allreduce::CopyReduce, Allreduce::OneShot, Allreduce::TwoShot] {
        let options = BuildOptions { allreduce, ..BuildOptions::new(2, Target::cpu(2)) };
        let graphs = build_all(&g, &registry(), &options).unwrap();
        verify::verify(&graphs).unwrap();
        let y = graphs[0].tensors.iter().find(|t| t.name == "y").unwrap();
        assert_eq!(y.space, task_graph::Space::Device);
    }
}
