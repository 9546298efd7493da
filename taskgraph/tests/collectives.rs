//! Collectives against brute force: each rank reads the right values, for every placement and lowering.

#[allow(dead_code)]
mod builder_support;

use builder_support::*;
use serde_json::json;
use taskgraph::task_graph::core_types;
use taskgraph::*;

const EVEN: Split = Split::Even { unit: 1 };

fn every_option(world: u32, workers: u32) -> impl Iterator<Item = BuildOptions> {
    [Placement::Static, Placement::Dynamic].into_iter().flat_map(move |placement| {
        [Allreduce::CopyReduce, Allreduce::OneShot, Allreduce::TwoShot].map(|allreduce| BuildOptions {
            placement,
            allreduce,
            ..BuildOptions::new(world, Target::cpu(workers))
        })
    })
}

fn op_types(graph: &OpGraph, options: &BuildOptions) -> Vec<String> {
    let builder = Builder::new(graph, &registry(), options).unwrap();
    builder.op_graph().ops.iter().map(|op| op.op_type.clone()).collect()
}

#[test]
fn a_split_tensor_changes_the_dimension_that_is_split() {
    let mut g = OpGraph::new("exchange", capacity());
    let x = g.input("x", DType::F32, &[4, 16]);
    let w = g.weight("w", DType::F32, &[21, 16], Some((0, EVEN)));
    let a = g.op("a", "linear", &[x, w], Attrs::new());
    let b = g.op("b", "all_to_all", &[a], attrs(json!({"shard": {"dim": 0, "kind": "even"}})));
    let c = g.op("c", "scale", &[b], Attrs::new());
    g.tensor_mut(c).output = true;
    for world in [1, 2, 3, 5] {
        for o in every_option(world, 3) {
            check(&g, &o);
        }
    }
}

#[test]
fn a_partial_tensor_is_summed_where_it_is_needed() {
    for shard in [
        json!({"dim": 1, "kind": "even"}),
        json!({"dim": 0, "kind": "even"}),
        json!({"dim": 1, "parts": [{"len": 8, "split": {"kind": "even"}}, {"len": 12, "split": {"kind": "even"}}]}),
    ] {
        let mut g = OpGraph::new("scatter", capacity());
        let x = g.input("x", DType::F32, &[4, 16]);
        let w = g.weight("w", DType::F32, &[20, 16], Some((1, EVEN)));
        let a = g.op("a", "linear", &[x, w], Attrs::new());
        let b = g.op("b", "reduce_scatter", &[a], attrs(json!({"shard": shard})));
        let c = g.op("c", "scale", &[b], Attrs::new());
        g.tensor_mut(c).output = true;
        for world in [1, 2, 3, 5] {
            for o in every_option(world, 3) {
                let graphs = check(&g, &o);
                // Each rank sums only its own share: together, the sums of all ranks cover the tensor once.
                let sums = graphs.iter().flat_map(|g| {
                    let reduces = g.tasks.iter().filter(|t| g.type_name(t) == core_types::REDUCE);
                    reduces.map(|t| g.outputs(t)[0].dims.iter().map(|&d| u64::from(d)).product::<u64>())
                });
                assert_eq!(sums.sum::<u64>(), if world == 1 { 0 } else { 80 });
            }
        }
    }
}

#[test]
fn a_replicated_tensor_is_sliced_without_a_copy() {
    let mut g = OpGraph::new("slice", capacity());
    let x = g.input("x", DType::F32, &[4, 16]);
    let s = g.op("s", "scale", &[x], Attrs::new());
    let w = g.weight("w", DType::F32, &[20, 16], Some((1, EVEN)));
    // From the graph's input, and from an activation.
    for (name, source) in [("a", x), ("b", s)] {
        let y = g.op(name, "linear", &[source, w], Attrs::new());
        g.tensor_mut(y).output = true;
    }
    let o = BuildOptions::new(3, Target::cpu(2));
    assert_eq!(op_types(&g, &o), ["scale", "slice", "linear", "slice", "linear", "allreduce", "allreduce"]);
    for world in [1, 2, 3] {
        for o in every_option(world, 2) {
            check(&g, &o);
        }
    }
}

/// gate | up: each rank has two blocks, which are copied to their places, also on the rank itself.
#[test]
fn a_wanted_tensor_of_two_parts_is_gathered() {
    let mut g = OpGraph::new("parts", capacity());
    let x = g.input("x", DType::F32, &[4, 16]);
    let w = g.weight("w", DType::F32, &[22, 16], None);
    let part = |len| split::Part { len, split: EVEN };
    g.tensor_mut(w).sharding = Sharding::Split { dim: 0, parts: vec![part(10), part(12)] };
    let a = g.op("a", "linear", &[x, w], Attrs::new());
    let b = g.op("b", "scale", &[a], Attrs::new());
    g.tensor_mut(a).output = true;
    g.tensor_mut(b).output = true;
    for world in [2, 3] {
        for o in every_option(world, 2) {
            for graph in check(&g, &o) {
                let entry = graph.tensors.iter().find(|t| t.name == "a").unwrap();
                assert_eq!((entry.dims.as_slice(), entry.output), ([4, 22].as_slice(), true));
            }
        }
    }
}

#[test]
fn a_split_input_is_gathered_for_its_reader() {
    for dim in [0, 1] {
        let mut g = OpGraph::new("input", capacity());
        let x = g.input("x", DType::F32, &[4, 16]);
        g.tensor_mut(x).sharding = Sharding::split(dim, [4, 16][dim], EVEN);
        let w = g.weight("w", DType::F32, &[20, 16], None);
        let y = g.op("y", "linear", &[x, w], Attrs::new());
        g.tensor_mut(y).output = true;
        for world in [1, 2, 3] {
            for o in every_option(world, 2) {
                check(&g, &o);
            }
        }
    }
}

/// One of the ranks that share key-value heads sends them.
#[test]
fn shared_heads_are_gathered_once() {
    let mut g = OpGraph::new("heads", capacity());
    let x = g.input("x", DType::F32, &[4, 16]);
    let split = Split::KeyValues { heads: 8, kv_heads: 2, head_dim: 3 };
    let w = g.weight("w", DType::F32, &[6, 16], Some((0, split)));
    let y = g.op("y", "linear", &[x, w], Attrs::new());
    g.tensor_mut(y).output = true;
    for world in [1, 2, 4] {
        for o in every_option(world, 2) {
            check(&g, &o);
        }
    }
}

/// Peers write into the symmetric heap, and each rank copies its part from there to the persistent tensor. With many
/// columns there are several copies.
#[test]
fn collectives_write_tensors_that_live_on() {
    for columns in [20, 100] {
        for (op_type, weight, to) in [
            ("allgather", 0, Sharding::Replicated),
            ("allreduce", 1, Sharding::Replicated),
            ("reduce_scatter", 1, Sharding::split(1, columns, EVEN)),
            ("all_to_all", 0, Sharding::split(0, 4, EVEN)),
        ] {
            let mut g = OpGraph::new("state", capacity());
            let x = g.input("x", DType::F32, &[4, 16]);
            let w = g.weight("w", DType::F32, &[columns, 16], Some((weight, EVEN)));
            let a = g.op("a", "linear", &[x, w], Attrs::new());
            let dim = matches!(to, Sharding::Split { dim: 0, .. });
            let with_shard = op_type == "reduce_scatter" || op_type == "all_to_all";
            let shard = json!({"shard": {"dim": usize::from(!dim), "kind": "even"}});
            let state = g.add_tensor(op_graph::Tensor {
                name: "state".into(),
                role: Role::Persistent { region_dims: None },
                dtype: DType::F32,
                dims: vec![4, columns],
                rows: Rows::Tokens,
                sharding: to,
                output: false,
            });
            g.op_into("b", op_type, &[a], &[state], if with_shard { attrs(shard) } else { Attrs::new() });
            let y = g.op("y", "scale", &[state], Attrs::new());
            g.tensor_mut(y).output = true;
            for world in [1, 2, 3] {
                for o in every_option(world, 3) {
                    check(&g, &o);
                }
            }
        }
    }
}

#[test]
fn a_sharding_that_cannot_be_made_is_an_error_that_says_so() {
    let mut g = OpGraph::new("bad", capacity());
    let x = g.input("x", DType::F32, &[4, 16]);
    let y = g.op("y", "all_to_all", &[x], attrs(json!({"shard": {"dim": 2, "kind": "even"}})));
    g.tensor_mut(y).output = true;
    let o = BuildOptions::new(2, Target::cpu(2));
    let error = |g: &OpGraph| build_all(g, &registry(), &o).unwrap_err().to_string();
    assert!(error(&g).contains("no dimension 2"), "{}", error(&g));
    g.ops[0].attrs = attrs(json!({"shard": {"dim": 0, "kind": "even"}}));
    assert!(error(&g).contains("use `slice`"), "{}", error(&g));
    g.ops[0].attrs = Attrs::new();
    assert!(error(&g).contains("needs the attribute `shard`"), "{}", error(&g));
    g.ops[0].attrs = attrs(json!({"sahrd": 1}));
    assert!(error(&g).contains("unknown attribute `sahrd`; `all_to_all` takes `shard`"), "{}", error(&g));
}

#[test]
fn many_rows_are_summed_in_blocks_of_rows() {
    let mut g = OpGraph::new("blocks", capacity());
    let x = g.input("x", DType::F32, &[300, 16]);
    let w = g.weight("w", DType::F32, &[48, 16], Some((1, EVEN)));
    let a = g.op("a", "linear", &[x, w], Attrs::new());
    let c = g.op("c", "scale", &[a], Attrs::new());
    g.tensor_mut(c).output = true;
    for world in [2, 3] {
        for o in every_option(world, 3).filter(|o| o.allreduce == Allreduce::TwoShot) {
            for graph in check(&g, &o) {
                let sums = graph
                    .tasks
                    .iter()
                    .enumerate()
                    .filter(|(_, t)| graph.type_names[usize::from(t.task_type)] == core_types::REDUCE);
                // Each worker has one, which knows where its rows start.
                let rows: Vec<(i32, u32)> =
                    sums.map(|(_, t)| (t.args[0], graph.outputs(t)[0].region.lo[0])).collect();
                assert_eq!(rows, [(0, 0), (112, 112), (224, 224)]);
            }
        }
    }
}
