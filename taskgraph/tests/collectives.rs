//! Collectives against brute force: each rank reads the right values, for every placement and lowering.

#[allow(dead_code)]
mod builder_support;

use builder_support::*;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use taskgraph::task_graph::{Operand, core_types};
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

/// The same, with blocks that are gathered in small pieces.
fn in_pieces(world: u32, workers: u32) -> impl Iterator<Item = BuildOptions> {
    every_option(world, workers).map(|mut options| {
        options.target.tuning.set("allgather.piece_bytes", 16);
        options
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
fn an_output_of_two_parts_is_gathered() {
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
        for o in every_option(world, 2).chain(in_pieces(world, 2)) {
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
            for o in every_option(world, 2).chain(in_pieces(world, 2)) {
                check(&g, &o);
            }
        }
    }
}

/// A large block is sent in pieces by several workers. A piece knows its first row, since only rows in use are sent.
#[test]
fn large_blocks_are_sent_in_pieces() {
    let mut g = OpGraph::new("pieces", capacity());
    let x = g.input("x", DType::F32, &[4, 16]);
    g.tensor_mut(x).rows = Rows::Tokens;
    let w = g.weight("w", DType::F32, &[20, 16], Some((0, EVEN)));
    let a = g.op("a", "linear", &[x, w], Attrs::new());
    let y = g.op("y", "allgather", &[a], Attrs::new());
    g.tensor_mut(y).output = true;
    let first_rows = |o: &BuildOptions| -> Vec<i32> {
        let graphs = check(&g, o);
        let copies = graphs[1].tasks.iter().filter(|t| graphs[1].type_name(t) == core_types::NVSHMEM_COPY);
        copies.map(|t| t.args[0]).collect()
    };
    for o in every_option(2, 3) {
        assert_eq!(first_rows(&o), [0]);
    }
    for o in in_pieces(2, 3) {
        assert_eq!(first_rows(&o), [0, 1, 2]);
        // Each send to another node is a message.
        assert_eq!(first_rows(&BuildOptions { nodes: vec![0, 1], ..o }), [0]);
    }
}

/// Copies of different tensors are on different workers, so that none waits for another.
#[test]
fn gathered_tensors_take_turns_on_the_workers() {
    let mut g = OpGraph::new("turns", capacity());
    let x = g.input("x", DType::F32, &[4, 16]);
    let parts = ["a", "b"].map(|name| {
        let w = g.weight(&format!("w_{name}"), DType::F32, &[20, 16], Some((0, EVEN)));
        g.op(name, "linear", &[x, w], Attrs::new())
    });
    for (part, name) in parts.into_iter().zip(["all_a", "all_b"]) {
        let whole = g.op(name, "allgather", &[part], Attrs::new());
        g.tensor_mut(whole).output = true;
    }
    for o in in_pieces(2, 8).filter(|o| o.placement == Placement::Static) {
        for graph in check(&g, &o) {
            let copies = graph.tasks.iter().filter(|t| graph.type_name(t) == core_types::NVSHMEM_COPY);
            let workers: BTreeSet<u32> = copies.clone().filter_map(|t| t.worker).collect();
            assert_eq!((copies.count(), workers.len()), (8, 8));
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
        for o in every_option(world, 2).chain(in_pieces(world, 2)) {
            check(&g, &o);
        }
    }
}

/// Peers write into the symmetric heap, and each rank copies its part from there to the persistent tensor. With many
/// columns there are several copies.
#[test]
fn collectives_write_persistent_tensors() {
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
                for o in every_option(world, 3).chain(in_pieces(world, 3)) {
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

/// The operators that sum, and the types of their own and of received summands.
fn summed(graph: &TaskGraph) -> BTreeMap<String, Vec<DType>> {
    let sums = graph.tasks.iter().filter(|t| graph.type_name(t) == core_types::REDUCE);
    let dtype = |operand: &Operand| graph.tensors[operand.tensor as usize].dtype;
    sums.map(|t| (graph.op_name(t).to_string(), graph.inputs(t)[..2].iter().map(dtype).collect())).collect()
}

/// Ranks send summands in the type in which their producer writes them. The sum has that type too, unless it includes a residual.
#[test]
fn summands_are_sent_in_their_own_type() {
    for (dtype, rows, worlds) in [(DType::F16, 4, 1..=4), (DType::Bf16, 140, 2..=2)] {
        let mut g = OpGraph::new("rounded", capacity());
        let x = g.input("x", DType::F32, &[rows, 16]);
        let [a, b, c] = ["a", "b", "c"].map(|name| {
            let w = g.weight(&format!("w_{name}"), dtype, &[48, 16], Some((1, EVEN)));
            g.op(name, "linear", &[x, w], attrs(json!({"output_dtype": dtype.name()})))
        });
        let scaled = g.op("scaled", "scale", &[a], Attrs::new());
        let residual = g.input("residual", DType::F32, &[rows, 48]);
        let sum = g.op("sum", "allreduce", &[b, residual], Attrs::new());
        let shard = json!({"shard": {"dim": 0, "kind": "even"}, "dtype": "f32"});
        let share = g.op("share", "reduce_scatter", &[c], attrs(shard));
        for tensor in [scaled, sum, share] {
            g.tensor_mut(tensor).output = true;
        }
        for world in worlds {
            for o in every_option(world, 3) {
                let graphs = check(&g, &o);
                for graph in graphs.iter().filter(|_| world > 1) {
                    let found = summed(graph);
                    assert_eq!(found.keys().collect::<Vec<_>>(), ["a.allreduce", "share", "sum"], "{o:?}");
                    assert!(found.values().all(|types| *types == [dtype; 2]), "{o:?}: {found:?}");
                }
                let of = |name: &str| graphs[0].tensors.iter().find(|t| t.name == name).unwrap().dtype;
                assert_eq!((of("scaled"), of("sum"), of("share")), (dtype, DType::F32, DType::F32));
                let builder = Builder::new(&g, &registry(), &o).unwrap();
                let notes = builder.notes().iter().filter(|n| n.contains("only f32 can be pushed"));
                let expected = if o.allreduce == Allreduce::OneShot && world > 1 { 2 } else { 0 };
                assert_eq!(notes.count(), expected, "{:?}", builder.notes());
            }
        }
    }
}

/// A row-parallel product of x `[4, k]` with 48 bf16 partial sums for each row: the graph, x and the sums.
fn rounded_product(name: &str, k: u64) -> (OpGraph, TensorId, TensorId) {
    let mut g = OpGraph::new(name, capacity());
    let x = g.input("x", DType::F32, &[4, k]);
    let w = g.weight("w", DType::Bf16, &[48, k], Some((1, EVEN)));
    let a = g.op("a", "linear", &[x, w], attrs(json!({"output_dtype": "bf16"})));
    (g, x, a)
}

/// For every type of the summands, an `add` becomes the residual of an allreduce that was inserted.
#[test]
fn a_residual_is_added_to_rounded_summands() {
    let (mut g, x, a) = rounded_product("residual", 48);
    let y = g.op("y", "add", &[x, a], Attrs::new());
    g.tensor_mut(y).output = true;
    for world in [2, 3] {
        for o in every_option(world, 3) {
            assert_eq!(op_types(&g, &o), ["slice", "linear", "allreduce"]);
            let graphs = check(&g, &o);
            assert_eq!(summed(&graphs[0])["a.allreduce"], [DType::Bf16; 2]);
            assert_eq!(graphs[0].tensors.iter().find(|t| t.name == "y").unwrap().dtype, DType::F32);
        }
    }
}

/// Over nodes, summands travel within a node in their own type. The sums of nodes are f32.
#[test]
fn sums_of_nodes_are_not_rounded() {
    let (mut g, _, a) = rounded_product("nodes", 16);
    let y = g.op("y", "scale", &[a], Attrs::new());
    g.tensor_mut(y).output = true;
    let o = BuildOptions {
        nodes: vec![0, 0, 1, 1],
        allreduce: Allreduce::Hierarchical,
        ..BuildOptions::new(4, Target::cpu(3))
    };
    // `check` expects a slot for each rank, but here there is one for each rank of the node.
    let graphs = build_all(&g, &registry(), &o).unwrap();
    taskgraph::verify::verify(&graphs).unwrap();
    for graph in graphs {
        let of = |name: &str| graph.tensors.iter().find(|t| t.name == name).unwrap().dtype;
        let found = ["a.received", "a.of_node", "a.of_nodes", "y"].map(of);
        assert_eq!(found, [DType::Bf16, DType::F32, DType::F32, DType::Bf16]);
    }
}

#[test]
fn whole_numbers_are_not_summed() {
    let mut g = OpGraph::new("integers", capacity());
    let x = g.input("x", DType::I32, &[4, 16]);
    g.tensor_mut(x).sharding = Sharding::Partial;
    let y = g.op("y", "allreduce", &[x], Attrs::new());
    g.tensor_mut(y).output = true;
    let o = BuildOptions::new(2, Target::cpu(2));
    let error = build_all(&g, &registry(), &o).unwrap_err().to_string();
    assert!(error.contains("allreduce sums f32, bf16 or f16, but `x` is i32; let its producer"), "{error}");
}

/// An iteration may sample no row, and a push of no row orders nothing: with three ranks, the verifier refused the graph.
#[test]
fn sums_of_sampled_rows_are_not_pushed() {
    let mut g = OpGraph::new("sampled", capacity());
    let x = g.input("x", DType::F32, &[4, 16]);
    g.tensor_mut(x).rows = Rows::Samples;
    let w = g.weight("w", DType::F32, &[20, 16], Some((1, EVEN)));
    let a = g.op("a", "linear", &[x, w], Attrs::new());
    let y = g.op("y", "allreduce", &[a], Attrs::new());
    g.tensor_mut(y).output = true;
    for world in [2, 3, 5] {
        for o in every_option(world, 2) {
            check(&g, &o);
        }
    }
    let o = BuildOptions { allreduce: Allreduce::OneShot, ..BuildOptions::new(3, Target::cpu(2)) };
    let notes = Builder::new(&g, &registry(), &o).unwrap().notes().join(" ");
    assert!(notes.contains("it has sampled rows, and there may be none"), "{notes}");
}

/// A rank loads one range of a weight's columns. With several, it loaded only the first.
#[test]
fn columns_of_a_weight_are_split_in_one_part() {
    let mut g = OpGraph::new("parts", capacity());
    let x = g.input("x", DType::F32, &[4, 16]);
    let w = g.weight("w", DType::F32, &[20, 16], None);
    let part = |len| taskgraph::split::Part { len, split: EVEN };
    g.tensor_mut(w).sharding = Sharding::Split { dim: 1, parts: vec![part(6), part(10)] };
    let y = g.op("y", "linear", &[x, w], Attrs::new());
    g.tensor_mut(y).output = true;
    for world in [1, 2] {
        let o = BuildOptions::new(world, Target::cpu(2));
        let error = build_all(&g, &registry(), &o).unwrap_err().to_string();
        assert!(
            error.contains("`w`") && error.contains("columns are split in 2 parts; split them in one"),
            "{error}"
        );
    }
}

/// Two splits of one dimension are told apart.
#[test]
fn splits_of_one_dimension_are_shown_as_they_are() {
    let mut g = OpGraph::new("into", capacity());
    let x = g.input("x", DType::F32, &[4, 16]);
    let s = g.persistent("s", DType::F32, &[4, 16]);
    g.tensor_mut(s).sharding = Sharding::split(1, 16, Split::Even { unit: 4 });
    g.op_into("s", "slice", &[x], &[s], attrs(json!({"shard": {"dim": 1, "kind": "even"}})));
    let error = build_all(&g, &registry(), &BuildOptions::new(2, Target::cpu(2))).unwrap_err().to_string();
    let wanted = [
        r#"persistent and split as {"dim":1,"kind":"even","unit":4}"#,
        r#"is split as {"dim":1,"kind":"even","unit":1}"#,
    ];
    assert!(wanted.iter().all(|w| error.contains(w)), "{error}");
}
