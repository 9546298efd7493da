//! Weights of gated products on GPUs, whose rows lie in pairs: graphs of few and of many rows read the same matrix.

use super::test::mlp_with_sums;
use crate::abi;
use crate::gpu::task_codes;
use crate::layout::layout_of;
use crate::registry::registry;
use serde_json::json;
use std::collections::BTreeMap;
use taskgraph::op_graph::Attrs;
use taskgraph::target::device;
use taskgraph::verify::verify;
use taskgraph::{BuildOptions, Capacity, DType, OpGraph, Target, TaskGraph, TensorId, build_all};

fn options(world: u32) -> BuildOptions {
    BuildOptions::new(world, Target::cuda(device("h200").unwrap()))
}

fn built(graph: &OpGraph, world: u32) -> Vec<TaskGraph> {
    let graphs = build_all(graph, &registry(), &options(world)).unwrap();
    if let Err(violations) = verify(&graphs) {
        panic!("{}: {}", graph.name, violations[0]);
    }
    graphs
}

fn layout(graph: &TaskGraph, name: &str) -> u32 {
    let tensor = graph.tensors.iter().find(|t| t.name == name).unwrap();
    layout_of(tensor, graph.backend).into()
}

/// For each type of task, the rows of the weight `gate_up` that its tasks read, as (first, one past the last), and how often.
fn reads(graph: &TaskGraph) -> BTreeMap<(String, u32, u32), usize> {
    let mut found = BTreeMap::new();
    for task in &graph.tasks {
        let of_weight =
            |o: &&taskgraph::task_graph::Operand| graph.tensors[o.tensor as usize].name == "gate_up";
        let operands: Vec<_> = graph.inputs(task).iter().filter(of_weight).collect();
        if let [operand] = operands[..] {
            let first = operand.offset / 2 / u64::from(operand.strides[0]);
            let rows = (first as u32, first as u32 + operand.dims[0]);
            *found.entry((graph.type_name(task).to_string(), rows.0, rows.1)).or_default() += 1;
        } else {
            assert!(operands.is_empty(), "{} weights", operands.len());
        }
    }
    found
}

#[test]
fn graphs_of_all_sizes_read_gates_and_ups_as_one_matrix() {
    for world in [1, 2] {
        for rows in [1, 8, 16, 40, 100, 300, 2048] {
            for intermediate in [528u64, 6208] {
                let graphs = built(&mlp_with_sums(rows, intermediate, DType::F32), world);
                task_codes(&graphs).unwrap();
                for graph in &graphs {
                    let what = format!("{world} ranks, {rows} rows, {intermediate} gates");
                    assert_eq!(layout(graph, "gate_up"), abi::MPK_LAYOUT_PAIRED, "{what}");
                    assert_eq!(layout(graph, "down"), abi::MPK_LAYOUT_FRAGMENT, "{what}");
                    let all = graph.tensors.iter().find(|t| t.name == "gate_up").unwrap().dims[0];
                    // The ranges follow each other, and each is read for every tile of rows.
                    let found = reads(graph);
                    let (mut next, times) = (0, found.values().next().copied());
                    for ((_, first, end), count) in &found {
                        assert_eq!((*first, Some(*count)), (next, times), "{what}");
                        assert_eq!(end % 16, 0, "{what}");
                        next = *end;
                    }
                    assert_eq!(next, all, "{what}");
                    let kind = if rows > 8 { "wide_linear" } else { "rmsnorm_linear_silu_mul" };
                    assert!(found.keys().all(|(name, ..)| name == kind), "{what}: {found:?}");
                }
            }
        }
    }
}

/// A matrix has one order of rows. If another operator reads the weight too, the gate stays an operator by itself.
#[test]
fn a_weight_with_another_reader_keeps_its_order() {
    let mut graph = mlp_with_sums(4, 528, DType::F32);
    let tensor = |name: &str| TensorId(graph.tensors.iter().position(|t| t.name == name).unwrap() as u32);
    let (x, weight) = (tensor("x"), tensor("gate_up"));
    let attrs = json!({"output_dtype": "f32"}).as_object().cloned().unwrap();
    let other = graph.op("other", "linear", &[x, weight], attrs);
    graph.tensor_mut(other).output = true;
    for task_graph in built(&graph, 1) {
        task_codes(std::slice::from_ref(&task_graph)).unwrap();
        assert_eq!(layout(&task_graph, "gate_up"), abi::MPK_LAYOUT_FRAGMENT);
        let found = reads(&task_graph);
        assert!(found.keys().all(|(name, ..)| name == "rmsnorm_linear" || name == "linear"), "{found:?}");
    }
}

#[test]
fn readers_that_want_two_orders_are_refused() {
    let mut graph = OpGraph::new("two", Capacity { rows: 4, samples: 1, active: 1 });
    let x = graph.input("x", DType::F32, &[4, 128]);
    let norm = graph.weight("norm", DType::Bf16, &[128], None);
    let weight = graph.weight("w", DType::Bf16, &[64, 128], None);
    let gated = graph.op("gated", "rmsnorm_linear_silu_mul", &[x, norm, weight], Attrs::new());
    let plain = graph.op("plain", "rmsnorm_linear", &[x, norm, weight], Attrs::new());
    for output in [gated, plain] {
        graph.tensor_mut(output).output = true;
    }
    let error = build_all(&graph, &registry(), &options(1)).unwrap_err().to_string();
    for wanted in ["`w`", "`gated`", "`plain`", "use two weights"] {
        assert!(error.contains(wanted), "{error}");
    }
    // On the CPU there are no pairs.
    assert!(build_all(&graph, &registry(), &BuildOptions::new(1, Target::cpu(2))).is_ok());
}
