//! Tasks that share the k of a tile: their summands, the tasks that read them, and graphs.

use super::{columns_of, matrix_of, parts_for};
use crate::registry::registry;
use crate::tasks::linear::reference::linear;
use crate::tasks::linear_knobs::{LEAST_PART_COLUMNS, MOST_PARTED_ROWS};
use crate::testing::{
    TestBatch, TestTensor, assert_close, assert_covered_once, on_all_levels, random_values, rounded,
    run_partition,
};
use serde_json::json;
use taskgraph::op_graph::{Attrs, Tensor};
use taskgraph::target::device;
use taskgraph::task_type::{LocalOp, OpView, OperandView, TensorType};
use taskgraph::verify::verify;
use taskgraph::{
    BuildOptions, Capacity, DType, OpGraph, Placement, Role, Rows, Sharding, Target, TaskGraph, TensorId,
    build_all,
};

fn attrs(value: serde_json::Value) -> Attrs {
    value.as_object().cloned().unwrap_or_default()
}

#[test]
fn parts_follow_from_tiles_and_workers() {
    let h200 = Target::cuda(device("h200").unwrap());
    let parts = |columns: u64| parts_for(columns, &h200);
    // The hidden sizes of Qwen3-8B and 1.7B, of Qwen3-0.6B and Qwen2-0.5B, and smaller ones.
    assert_eq!([4096, 2048, 1072, 1024, 896, 704, 512, 128, 1].map(parts), [1, 1, 1, 2, 2, 3, 4, 4, 4]);
    assert_eq!([64, 128].map(|columns| parts_for(columns, &Target::cpu(2))), [1, 1]);
    for (k, parts) in [(2048, 2), (3072, 2), (107, 2), (4864, 3), (64, 4), (1000, 4)] {
        let ranges: Vec<_> = (0..parts).map(|part| columns_of(part, parts, k)).collect();
        assert_eq!((ranges[0].start, ranges[parts as usize - 1].end), (0, k));
        assert!(ranges.iter().all(|range| range.start % 16 == 0 && !range.is_empty()), "{ranges:?}");
        assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start), "{ranges:?}");
    }
}

/// Runs all tasks of an operator for 5 workers. Operands of three dimensions are summands.
fn run(
    name: &str,
    attrs: &Attrs,
    inputs: &mut [TestTensor],
    mut out: TestTensor,
    batch: &mut TestBatch,
) -> TestTensor {
    let registry = registry();
    let task_type = registry.get(name).unwrap();
    let of_tokens = |ty: TensorType| TensorType { rows: Rows::Tokens, ..matrix_of(&ty) };
    let roles: Vec<Role> = inputs.iter().map(|t| t.role.clone()).collect();
    let operand =
        |ty: TensorType, role| OperandView { name: "operand", ty, sharding: &Sharding::Replicated, role };
    let rows = matrix_of(&out.ty()).dims[0] as u32;
    let view = OpView {
        name: "test",
        attrs,
        inputs: inputs.iter().zip(&roles).map(|(t, role)| operand(of_tokens(t.ty()), role)).collect(),
        outputs: vec![operand(of_tokens(out.ty()), &Role::Activation)],
        capacity: Capacity { rows, samples: rows, active: rows },
    };
    let local = LocalOp {
        global: &view,
        inputs: inputs.iter().map(TestTensor::ty).collect(),
        outputs: vec![out.ty()],
        rank: 0,
        world: 1,
    };
    let partition = task_type.partition(&local, &Target::cpu(5)).unwrap();
    assert_covered_once(&partition, 0, &out.dims);
    run_partition(name, &partition, inputs, std::slice::from_mut(&mut out), batch);
    out
}

/// Elementwise sum of the summands in `values`, in order.
fn summed(values: &[f32], parts: usize) -> Vec<f32> {
    let size = values.len() / parts;
    (0..size).map(|at| (1..parts).fold(values[at], |sum, part| sum + values[part * size + at])).collect()
}

/// The summands of a product add up to the product in f64, with bias and residual once. Rows that are not in use are not written.
#[test]
fn summands_are_the_product() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for (rows, used, k, n, parts) in
            [(1u32, 1u32, 64u32, 96u32, 2u32), (6, 5, 107, 203, 3), (8, 8, 320, 40, 4)]
        {
            let x = rounded(dtype, &random_values(1, (rows * k) as usize));
            let w = rounded(dtype, &random_values(2, (n * k) as usize));
            let bias = rounded(dtype, &random_values(3, n as usize));
            let size = (rows * n) as usize;
            // None, whole, in as many parts as the output, and in another number of parts.
            for residual_parts in [0, 1, parts, parts - 1] {
                let what = format!("{dtype}, k {k}, {parts} parts, residual in {residual_parts}");
                let residual = random_values(4, residual_parts as usize * size);
                let whole = (residual_parts > 0).then(|| summed(&residual, residual_parts as usize));
                let expected = linear(&x, &w, k as usize, Some(&bias), whole.as_deref());
                let name = if residual_parts > 0 { "linear_with_residual" } else { "linear" };
                for words in on_all_levels(|| {
                    let mut inputs = vec![
                        TestTensor::new(dtype, &[rows, k], &x),
                        TestTensor::weight(dtype, &[n, k], &w),
                        TestTensor::weight(dtype, &[n], &bias),
                    ];
                    inputs.extend(match residual_parts {
                        0 => None,
                        1 => Some(TestTensor::new(DType::F32, &[rows, n], &residual)),
                        _ => Some(TestTensor::new(DType::F32, &[residual_parts, rows, n], &residual)),
                    });
                    let out = TestTensor::poisoned(DType::F32, &[parts, rows, n]);
                    let attrs = attrs(json!({"output_dtype": "f32"}));
                    run(name, &attrs, &mut inputs, out, &mut TestBatch::rows(used)).words()
                }) {
                    let got: Vec<f32> = words.into_iter().map(f32::from_bits).collect();
                    let live = (used * n) as usize;
                    for part in got.chunks(size) {
                        assert!(part[..live].iter().all(|v| v.is_finite()), "{what}");
                        assert!(part[..live].iter().filter(|v| v.abs() > 1e-3).count() > live / 2, "{what}");
                        assert!(part[live..].iter().all(|v| v.is_nan()), "{what}: unused rows");
                    }
                    let sum = summed(&got, parts as usize);
                    assert_close(&sum[..live], &expected[..live], 4e-6, 8.0, &what);
                }
            }
        }
    }
}

/// A task that reads summands gives the bits that it gives for their sum: norms, also of gathered rows, and a residual.
#[test]
fn readers_add_the_summands() {
    let (rows, k, n) = (5u32, 98u32, 64u32);
    let norm = TestTensor::weight(DType::Bf16, &[k], &rounded(DType::Bf16, &random_values(2, k as usize)));
    let w = |rows: u32| {
        let values = rounded(DType::Bf16, &random_values(3, (rows * k) as usize));
        TestTensor::weight(DType::Bf16, &[rows, k], &values)
    };
    for parts in [2u32, 3, 4] {
        let x = random_values(parts.into(), (parts * rows * k) as usize);
        let stacked = TestTensor::new(DType::F32, &[parts, rows, k], &x);
        let whole = TestTensor::new(DType::F32, &[rows, k], &summed(&x, parts as usize));
        for (name, weight_rows, gather) in [
            ("rmsnorm_linear", n, false),
            ("rmsnorm_linear", n, true),
            ("rmsnorm_linear_silu_mul", 2 * n, false),
        ] {
            let attrs = attrs(json!({"gather_samples": gather}));
            let mut batch = TestBatch::rows(rows);
            if gather {
                (batch.num_samples, batch.sample_row) = (2, vec![4, 1]);
                batch.num_rows = 2; // the rows of the output are token rows in this test
            }
            let mut of = |x: &TestTensor| {
                let mut inputs = [x.clone(), norm.clone(), w(weight_rows)];
                let out = TestTensor::poisoned(DType::Bf16, &[rows, n]);
                run(name, &attrs, &mut inputs, out, &mut batch)
            };
            let (found, wanted) = (of(&stacked), of(&whole));
            assert_eq!(found.data.bytes(), wanted.data.bytes(), "{name}, {parts} parts");
            assert!(found.values()[..2 * n as usize].iter().any(|v| *v != 0.0));
        }

        // A residual of a product whose tasks have all of k.
        let residual = random_values(7, (parts * rows * n) as usize);
        let x = TestTensor::new(
            DType::Bf16,
            &[rows, k],
            &rounded(DType::Bf16, &random_values(8, (rows * k) as usize)),
        );
        let of = |residual: TestTensor| {
            let out = TestTensor::poisoned(DType::F32, &[rows, n]);
            let mut inputs = [x.clone(), w(n), residual];
            run("linear_with_residual", &Attrs::new(), &mut inputs, out, &mut TestBatch::rows(rows)).words()
        };
        let whole = TestTensor::new(DType::F32, &[rows, n], &summed(&residual, parts as usize));
        let stacked = TestTensor::new(DType::F32, &[parts, rows, n], &residual);
        assert_eq!(of(stacked), of(whole), "{parts} parts");
    }
}

/// Layers of a norm, a product, and a long product with residual; and a head of the sampled rows.
fn layers(count: u32, rows: u32) -> OpGraph {
    let (hidden, inner) = (128u64, 2048u64);
    let mut graph = OpGraph::new("layers", Capacity { rows, samples: 1, active: 1 });
    let mut stream = graph.add_tensor(Tensor {
        name: "x".into(),
        dtype: DType::F32,
        dims: vec![rows.into(), hidden],
        rows: Rows::Tokens,
        role: Role::Input,
        sharding: Sharding::Replicated,
        output: false,
    });
    for layer in 0..count {
        let mut weight =
            |name: &str, dims: &[u64]| graph.weight(&format!("{name}{layer}"), DType::Bf16, dims, None);
        let (norm, up, down) =
            (weight("norm", &[hidden]), weight("up", &[inner, hidden]), weight("down", &[hidden, inner]));
        let normed = graph.op(&format!("normed{layer}"), "rmsnorm", &[stream, norm], Attrs::new());
        let wide = graph.op(&format!("between{layer}"), "linear", &[normed, up], Attrs::new());
        let branch = graph.op(
            &format!("branch{layer}"),
            "linear",
            &[wide, down],
            attrs(json!({"output_dtype": "f32"})),
        );
        stream = graph.op(&format!("out{layer}"), "add", &[branch, stream], Attrs::new());
    }
    let norm = graph.weight("final", DType::Bf16, &[hidden], None);
    let head = graph.weight("head", DType::Bf16, &[256, hidden], None);
    let normed = graph.op("final_norm", "rmsnorm", &[stream, norm], Attrs::new());
    let gathers = attrs(json!({"gather_samples": true, "output_dtype": "f32"}));
    let logits: TensorId = graph.op("logits", "linear", &[normed, head], gathers);
    graph.tensor_mut(logits).output = true;
    graph
}

fn built(ops: &OpGraph, workers: u32, placement: Placement, world: u32, tune: &[(&str, u64)]) -> TaskGraph {
    let mut target = Target { wide: true, ..Target::cpu(workers) };
    for (name, value) in tune {
        target.tuning.set(*name, *value);
    }
    let mut options = BuildOptions::new(world, target);
    options.placement = placement;
    let mut graphs = build_all(ops, &registry(), &options).unwrap();
    if let Err(violations) = verify(&graphs) {
        panic!("{workers} workers, {placement:?}: {}", violations[0]);
    }
    graphs.swap_remove(0)
}

fn dims_of<'g>(graph: &'g TaskGraph, name: &str) -> &'g [u32] {
    &graph.tensors.iter().find(|t| t.name == name).unwrap().dims
}

/// The stream between two layers is written as summands where there are too few tiles, and passes the verifier.
#[test]
fn streams_are_summands_where_workers_would_idle() {
    let tasks = |graph: &TaskGraph, op: &str| graph.tasks.iter().filter(|t| graph.op_name(t) == op).count();
    for placement in [Placement::Static, Placement::Dynamic] {
        for (workers, parts) in [(15, 1), (16, 2), (24, 3), (31, 3), (132, 4)] {
            let graph = built(&layers(3, 8), workers, placement, 1, &[]);
            let wanted: &[u32] = if parts == 1 { &[8, 128] } else { &[parts, 8, 128] };
            assert_eq!(dims_of(&graph, "out0"), wanted, "{workers} workers");
            assert_eq!(tasks(&graph, "out1"), 8 * parts as usize, "{workers} workers");
        }
        let peak = |count| {
            let graph = built(&layers(count, 8), 16, placement, 1, &[]);
            let ends = graph.tensors.iter().filter_map(|t| t.overlay.map(|place| place.offset + t.bytes));
            ends.max().unwrap()
        };
        assert_eq!(peak(3), peak(6), "layers share memory");
    }
    let stacked = |rows, world, tune: &[(&str, u64)]| {
        dims_of(&built(&layers(2, rows), 16, Placement::Static, world, tune), "out0").len() == 3
    };
    assert!(stacked(8, 1, &[]) && stacked(1, 1, &[]));
    assert!(
        !stacked(8, 1, &[(MOST_PARTED_ROWS.name, 4)]) && !stacked(8, 1, &[(LEAST_PART_COLUMNS.name, 1025)])
    );
    assert!(!stacked(8, 2, &[]), "ranks sum up");
    // Wide products have summands of their own rules, and the two kinds do not mix.
    assert!(stacked(8, 1, &[("wide.least_tall_rows", 3)]));
}

/// Each task's view of the packed weight has its rows and its part of the columns, and the verifier refuses a view that ends outside.
#[test]
fn views_of_a_part_lie_in_the_packed_weight() {
    let mut graph = built(&layers(2, 8), 24, Placement::Static, 1, &[]);
    let weight = graph.tensors.iter().position(|t| t.name == "down1").unwrap();
    let (stride, bytes) = (u64::from(graph.tensors[weight].strides[0]), graph.tensors[weight].bytes);
    let of_weight = |operand: &&taskgraph::task_graph::Operand| operand.tensor as usize == weight;
    let mut elements = 0;
    for operand in graph.operands.iter().filter(of_weight) {
        let region = operand.region;
        assert_eq!(operand.offset, 2 * (u64::from(region.lo[0]) * stride + u64::from(region.lo[1]) * 16));
        assert_eq!([operand.dims[0], operand.dims[1]], [16, region.hi[1] - region.lo[1]]);
        elements += u64::from(operand.dims[0] * operand.dims[1]);
    }
    assert_eq!(2 * elements, bytes);
    let last = graph.operands.iter().rposition(|operand| operand.tensor as usize == weight).unwrap();
    graph.operands[last].offset += 512;
    let found = verify(&[graph]).unwrap_err();
    assert!(found[0].to_string().contains("ends at byte"), "{}", found[0]);
}
