//! Graphs with wide products, on the CPU target: the builder, the verifier, and the tile's operands.

use crate::layout::wide_index;
use crate::registry::registry;
use crate::tasks::linear_knobs::{LEAST_TALL_ROWS, MOST_PARTED_ROWS, TALL_ROWS};
use crate::tasks::wide::{narrow_dims, wide_dims};
use crate::tasks::wide_tile::choose;
use crate::testing::{
    TestBatch, TestOp, TestTensor, assert_covered_once, random_values, rounded, run_partition,
};
use serde_json::json;
use taskgraph::op_graph::{Attrs, Tensor, WeightPart};
use taskgraph::split::Part;
use taskgraph::task_type::{LocalOp, OpView, OperandView, Partition, TaskType, TensorType};
use taskgraph::verify::verify;
use taskgraph::{
    Allreduce, BuildOptions, Capacity, DType, OpGraph, Placement, Role, Rows, Sharding, Split, Target,
    TaskGraph, TensorId, build_all,
};

pub(super) fn attrs(value: serde_json::Value) -> Attrs {
    value.as_object().cloned().unwrap_or_default()
}

/// A norm, a gated MLP and its residual, as in a decoder's layer.
pub(super) fn mlp(rows: u32, intermediate: u64) -> OpGraph {
    mlp_with_sums(rows, intermediate, DType::F32)
}

/// The same with partial sums of this type.
pub(super) fn mlp_with_sums(rows: u32, intermediate: u64, sums: DType) -> OpGraph {
    let hidden = 128u64;
    let mut graph = OpGraph::new("mlp", Capacity { rows, samples: 1, active: 1 });
    let mut add = |name: &str, dtype, dims: &[u64], rows, role, sharding| -> TensorId {
        graph.add_tensor(Tensor {
            name: name.into(),
            dtype,
            dims: dims.to_vec(),
            rows,
            role,
            sharding,
            output: false,
        })
    };
    let even = Split::Even { unit: 16 };
    let x = add("x", DType::F32, &[rows.into(), hidden], Rows::Tokens, Role::Input, Sharding::Replicated);
    let part = Part { len: intermediate, split: even };
    let both = Sharding::Split { dim: 0, parts: vec![part, part] };
    let parts = ["gate", "up"].map(|p| WeightPart { source: p.into(), dims: vec![intermediate, hidden] });
    let role = Role::Weight { parts: parts.to_vec() };
    let gate_up = add("gate_up", DType::Bf16, &[2 * intermediate, hidden], Rows::Fixed, role, both);
    let norm = graph.weight("norm", DType::Bf16, &[hidden], None);
    let down = graph.weight("down", DType::Bf16, &[hidden, intermediate], Some((1, even)));
    let normed = graph.op("normed", "rmsnorm", &[x, norm], Attrs::new());
    let product = graph.op("product", "linear", &[normed, gate_up], Attrs::new());
    let gated = graph.op("gated", "silu_mul", &[product], Attrs::new());
    let branch = graph.op("branch", "linear", &[gated, down], attrs(json!({"output_dtype": sums.name()})));
    let out = graph.op("out", "add", &[branch, x], Attrs::new());
    graph.tensor_mut(out).output = true;
    graph
}

pub(super) fn count(graph: &TaskGraph, name: &str) -> usize {
    graph.tasks.iter().filter(|t| graph.type_name(t) == name).count()
}

#[test]
fn graphs_of_many_rows_have_wide_products_and_pass_the_verifier() {
    let wide = |workers| Target { wide: true, ..Target::cpu(workers) };
    for world in [1, 2, 4] {
        for workers in [1, 7, 132] {
            for (rows, intermediate) in [
                (8, 520),
                (16, 520),
                (17, 528),
                (33, 520),
                (40, 6208),
                (65, 528),
                (100, 6208),
                (300, 520),
                (200, 6208),
                (2048, 528),
            ] {
                for allreduce in [Allreduce::CopyReduce, Allreduce::OneShot, Allreduce::TwoShot] {
                    for placement in [Placement::Static, Placement::Dynamic] {
                        if (placement == Placement::Dynamic) != (workers == 7)
                            || (world == 1 && allreduce != Allreduce::OneShot)
                        {
                            continue;
                        }
                        let mut options = BuildOptions::new(world, wide(workers));
                        (options.allreduce, options.placement) = (allreduce, placement);
                        let what = format!(
                            "{world} ranks, {workers} workers, {rows} rows, {allreduce:?}, {placement:?}"
                        );
                        let graphs = build_all(&mlp(rows, intermediate), &registry(), &options)
                            .unwrap_or_else(|e| panic!("{what}: {e}"));
                        if let Err(violations) = verify(&graphs) {
                            panic!("{what}: {}", violations[0]);
                        }
                        let wanted = u64::from(rows) >= LEAST_TALL_ROWS.default;
                        for graph in &graphs {
                            assert_eq!(count(graph, "wide_linear") > 0, wanted, "{what}");
                            assert_eq!(count(graph, "wide_rows") > 0, wanted, "{what}");
                            // Several tasks share the k of the down projection, which has many columns and few tiles.
                            let halved = intermediate > 6144 && world == 1 && workers >= 4;
                            assert_eq!(count(graph, "add") > 0, halved, "{what}");
                        }
                    }
                }
            }
        }
    }
}

/// Partial sums may be rounded. If several tasks share their k, the sum of the parts is rounded.
#[test]
fn rounded_partial_sums_are_sent_as_they_are() {
    for (rows, intermediate, workers, parts) in [(300, 528, 132, 1), (100, 12416, 132, 4), (65, 528, 7, 1)] {
        for world in [2, 3, 4] {
            for placement in [Placement::Static, Placement::Dynamic] {
                let target = Target { wide: true, ..Target::cpu(workers) };
                let mut options = BuildOptions::new(world, target);
                (options.allreduce, options.placement) = (Allreduce::TwoShot, placement);
                let what = format!("{world} ranks, {rows} rows, {placement:?}");
                let ops = mlp_with_sums(rows, intermediate, DType::Bf16);
                let graphs = build_all(&ops, &registry(), &options).unwrap_or_else(|e| panic!("{what}: {e}"));
                if let Err(violations) = verify(&graphs) {
                    panic!("{what}: {}", violations[0]);
                }
                for graph in &graphs {
                    let named = |name: &str| graph.tensors.iter().find(|t| t.name == name).map(|t| t.dtype);
                    assert_eq!(named("branch"), Some(DType::Bf16), "{what}");
                    assert_eq!(named("branch.received"), Some(DType::Bf16), "{what}");
                    assert_eq!(named("out"), Some(DType::F32), "{what}");
                    assert!(count(graph, "wide_linear") > 0, "{what}");
                    // On four ranks, k is too short to be shared.
                    let shared = parts > 1 && world < 4;
                    assert_eq!(named("branch.first"), shared.then_some(DType::F32), "{what}");
                    assert_eq!(count(graph, "add") > 0, shared, "{what}");
                }
            }
        }
    }
}

#[test]
fn other_machines_keep_their_products() {
    let options = BuildOptions::new(1, Target::cpu(2));
    let graphs = build_all(&mlp(2048, 520), &registry(), &options).unwrap();
    assert_eq!(count(&graphs[0], "wide_linear"), 0);
}

/// The results are those of the tasks of the linear family for the same operands, bit for bit: each of them has the same whole
/// rows.
#[test]
fn tiles_give_the_bits_of_the_family() {
    let mut laid_out = 0;
    for dtype in [DType::Bf16, DType::F16] {
        for (rows, used, k, n, workers) in
            [(70u32, 70u32, 72u32, 331u32, 5), (300, 201, 130, 80, 132), (513, 513, 64, 272, 2)]
        {
            let x = rounded(dtype, &random_values(1, (rows * k) as usize));
            let weights = rounded(dtype, &random_values(2, (2 * n * k) as usize));
            let bias = rounded(dtype, &random_values(3, 2 * n as usize));
            let residual = random_values(4, (rows * n) as usize);
            for (gated, has_bias, has_residual) in
                [(false, true, false), (false, false, true), (true, true, false), (true, false, false)]
            {
                if gated && n % 16 != 0 {
                    continue;
                }
                let weight_rows = n * (1 + u32::from(gated));
                let out_dtype = if has_residual { DType::F32 } else { dtype };
                let mut batch = TestBatch::rows(used);
                let mut inputs = vec![
                    TestTensor::new(dtype, &[rows, k], &x),
                    TestTensor::weight(dtype, &[weight_rows, k], &weights[..(weight_rows * k) as usize]),
                ];
                if has_bias {
                    inputs.push(TestTensor::weight(dtype, &[weight_rows], &bias[..weight_rows as usize]));
                }
                if has_residual {
                    inputs.push(TestTensor::new(DType::F32, &[rows, n], &residual));
                }
                let name = if has_residual { "linear_with_residual" } else { "linear" };
                let plain = TestOp::new(name, json!({"output_dtype": out_dtype.name()}), rows);
                let mut expected = plain.run(&mut inputs, &mut batch).unwrap().remove(0);
                if gated {
                    let gate = TestOp::new("silu_mul", json!({}), rows);
                    expected = gate.run(&mut [expected], &mut batch).unwrap().remove(0);
                }

                let pack = TestOp::new("wide_rows", json!({"act_dtype": dtype.name()}), rows);
                inputs[0] = pack.run(&mut inputs[..1], &mut batch).unwrap().remove(0);
                let attrs =
                    attrs(json!({"gated": gated, "has_bias": has_bias, "has_residual": has_residual}));
                let what =
                    format!("{dtype} [{rows}, {k}] x [{n}, {k}], gated {gated}, residual {has_residual}");
                let got =
                    run_tiles(&attrs, &mut inputs, out_dtype, &[rows, n], [rows, n], workers, &mut batch);
                let live = (used * n) as usize * out_dtype.size() as usize;
                assert_eq!(got.data.bytes()[..live], expected.data.bytes()[..live], "{what}");
                assert!(got.data.bytes()[live..].iter().all(|b| *b == 0xff), "{what}: unused rows");
                if !gated || choose(rows, n, true, workers).high != 128 {
                    continue;
                }
                let dims: Vec<u32> = wide_dims(rows.into(), n.into()).iter().map(|d| *d as u32).collect();
                let got =
                    run_tiles(&attrs, &mut inputs, out_dtype, &dims, [rows, n], workers, &mut batch).values();
                let (n, expected) = (n as usize, expected.values());
                let mut known = vec![false; got.len()];
                for row in 0..used as usize {
                    for column in 0..n.next_multiple_of(64) {
                        let at = wide_index(row, column, n);
                        let wanted = if column < n { expected[row * n + column] } else { 0.0 };
                        assert_eq!(got[at], wanted, "{what}, laid out: row {row}, column {column}");
                        assert!(!std::mem::replace(&mut known[at], true));
                    }
                }
                assert!(got.iter().zip(&known).all(|(v, known)| *known || v.is_nan()), "{what}: unused rows");
                laid_out += 1;
            }
        }
    }
    assert!(laid_out > 0);
}

/// A gated output is written in the layout that the next product reads, so no task changes the layout in between.
#[test]
fn gated_rows_are_laid_out_where_they_are_made() {
    let target = Target { wide: true, ..Target::cpu(132) };
    let rows_tasks = |rows, intermediate, tall| {
        let options = BuildOptions::new(1, tuned(&target, tall));
        let graph = build_all(&mlp(rows, intermediate), &registry(), &options).unwrap();
        let op_of = |task| graph[0].op_name(task).to_string();
        let mut ops: Vec<String> =
            graph[0].tasks.iter().filter(|t| graph[0].type_name(t) == "wide_rows").map(op_of).collect();
        ops.dedup();
        ops.len()
    };
    assert_eq!((rows_tasks(2048, 528, 0), rows_tasks(17, 576, 0), rows_tasks(17, 576, 32)), (1, 2, 1));
    // With few rows, no task would write the padding.
    assert_eq!(rows_tasks(17, 528, 32), 2);
}

/// Two blocks in whose products tasks share the k of a tile. The readers of the stream between them, a norm and a residual, add
/// up the halves.
#[test]
fn readers_add_up_the_halves() {
    let mut target = Target { wide: true, ..Target::cpu(132) };
    // Products that are not wide have parts of their own (`linear_parts.rs`).
    target.tuning.set(MOST_PARTED_ROWS.name, 0);
    for (rows, stacked) in [(8, false), (9, true), (64, true), (65, false), (129, false)] {
        let mut graph = mlp(rows, 2048);
        let stream = TensorId(graph.ops.last().unwrap().outputs[0]);
        graph.tensor_mut(stream).output = false;
        let last = stream_block(&mut graph, stream);
        graph.tensor_mut(last).output = true;
        let options = BuildOptions::new(1, tuned(&target, 1000));
        let built = build_all(&graph, &registry(), &options).unwrap();
        if let Err(violations) = verify(&built) {
            panic!("{rows} rows: {}", violations[0]);
        }
        let entry = built[0].tensors.iter().find(|t| t.name == "out").unwrap();
        assert_eq!(entry.dims.len() == 3, stacked, "{rows} rows: {:?}", entry.dims);
        assert_eq!(count(&built[0], "add"), 0, "{rows} rows");
    }
}

/// `target`, with tiles that have all rows of up to `tall` rows.
fn tuned(target: &Target, tall: u64) -> Target {
    let mut target = target.clone();
    target.tuning.set(TALL_ROWS.name, tall);
    target
}

/// Another norm, two products and their residual after `stream` of `mlp`.
pub(super) fn stream_block(graph: &mut OpGraph, stream: TensorId) -> TensorId {
    let norm = graph.weight("norm2", DType::Bf16, &[128], None);
    let even = Split::Even { unit: 16 };
    let weight = graph.weight("square", DType::Bf16, &[128, 128], Some((0, even)));
    let second = graph.weight("second", DType::Bf16, &[128, 128], Some((1, even)));
    let normed = graph.op("normed2", "rmsnorm", &[stream, norm], Attrs::new());
    let between = graph.op("between", "linear", &[normed, weight], Attrs::new());
    let branch = graph.op("branch2", "linear", &[between, second], attrs(json!({"output_dtype": "f32"})));
    graph.op("out2", "add", &[branch, stream], Attrs::new())
}

/// Two summands give the same rows and the same residual as their sum. The halves of a product are one output.
#[test]
fn two_summands_are_their_sum() {
    let (rows, used, k, n) = (24u32, 21u32, 2100u32, 80u32);
    let batch = &mut TestBatch::rows(used);
    let halves = [random_values(1, (rows * k) as usize), random_values(2, (rows * k) as usize)];
    let sum: Vec<f32> = halves[0].iter().zip(&halves[1]).map(|(a, b)| a + b).collect();
    let norm = TestTensor::weight(DType::Bf16, &[k], &rounded(DType::Bf16, &random_values(3, k as usize)));
    let rows_of = |source: &str, x: TestTensor, batch: &mut TestBatch| {
        let attrs = attrs(json!({"source": source, "act_dtype": "bf16"}));
        let dims: Vec<u32> = narrow_dims(rows.into(), k.into()).iter().map(|d| *d as u32).collect();
        let whole = TensorType { dtype: DType::Bf16, dims: vec![rows.into(), k.into()], rows: Rows::Tokens };
        let mut inputs = vec![x];
        if source == "norm" {
            inputs.push(norm.clone());
        }
        let out = TestTensor::poisoned(DType::Bf16, &dims);
        run_all("wide_rows", &crate::tasks::wide_rows::WideRows, &attrs, &mut inputs, whole, out, batch)
    };
    let plain = rows_of("norm", TestTensor::new(DType::F32, &[rows, k], &sum), batch);
    let both = rows_of("norm", TestTensor::new(DType::F32, &[2, rows, k], &halves.concat()), batch);
    assert_eq!(plain.data.bytes(), both.data.bytes());

    // The product of these rows with a residual of two summands.
    let weights = rounded(DType::Bf16, &random_values(4, (n * k) as usize));
    let residual = [random_values(5, (rows * n) as usize), random_values(6, (rows * n) as usize)];
    let summed: Vec<f32> = residual[0].iter().zip(&residual[1]).map(|(a, b)| a + b).collect();
    let weight = TestTensor::weight(DType::Bf16, &[n, k], &weights);
    let product = |residual: &TestTensor, dims: &[u32], parts: u32, x: &TestTensor, batch: &mut TestBatch| {
        let attrs = attrs(json!({"has_residual": true, "parts": parts}));
        let mut inputs = [x.clone(), weight.clone(), residual.clone()];
        let out = TestTensor::poisoned(DType::F32, dims);
        let whole = TensorType { dtype: DType::F32, dims: vec![rows.into(), n.into()], rows: Rows::Tokens };
        run_all("wide_linear", &super::WideLinear, &attrs, &mut inputs, whole, out, batch).values()
    };
    let residual_sum = TestTensor::new(DType::F32, &[rows, n], &summed);
    let both = TestTensor::new(DType::F32, &[2, rows, n], &residual.concat());
    let expected = product(&residual_sum, &[rows, n], 1, &plain, batch);
    let found = product(&both, &[2, rows, n], 2, &plain, batch);
    let (size, live) = ((rows * n) as usize, (used * n) as usize);
    for at in 0..live {
        let (found, wanted) = (found[at] + found[size + at], expected[at]);
        assert!((found - wanted).abs() <= 1e-3 * (1.0 + wanted.abs()), "{at}: {found}, {wanted}");
    }
    assert!(
        found[live..size].iter().chain(&found[size + live..]).all(|v| v.is_nan()),
        "unused rows were written"
    );

    // Without parts and with plain rows, the result is that of the linear family, bit for bit.
    let x = TestTensor::new(DType::Bf16, &[rows, k], &rounded(DType::Bf16, &halves[0]));
    let narrow = rows_of("plain", x.clone(), batch);
    let found = product(&residual_sum, &[rows, n], 1, &narrow, batch);
    let family = TestOp::new("linear_with_residual", json!({"output_dtype": "f32"}), rows);
    let wanted =
        family.run(&mut [x, weight.clone(), residual_sum.clone()], batch).unwrap().remove(0).values();
    assert_eq!(found[..live], wanted[..live]);
}

/// Tiles with all of 65 to 128 rows give the bits of the linear family, as rows and in the layout of the next product. The last tile has
/// fewer columns than the others.
#[test]
fn broad_tiles_give_the_bits_of_the_family() {
    let (rows, used, k, n, dtype) = (100u32, 97u32, 130u32, 320u32, DType::Bf16);
    let batch = &mut TestBatch::rows(used);
    let narrow = |x: &TestTensor, batch: &mut TestBatch| {
        let columns = x.ty().dims[1];
        let attrs = attrs(json!({"source": "plain", "act_dtype": dtype.name()}));
        let dims: Vec<u32> = narrow_dims(rows.into(), columns).iter().map(|d| *d as u32).collect();
        let whole = TensorType { dtype, dims: vec![rows.into(), columns], rows: Rows::Tokens };
        let out = TestTensor::poisoned(dtype, &dims);
        let mut inputs = [x.clone()];
        run_all("wide_rows", &crate::tasks::wide_rows::WideRows, &attrs, &mut inputs, whole, out, batch)
    };
    let x = TestTensor::new(dtype, &[rows, k], &rounded(dtype, &random_values(1, (rows * k) as usize)));
    let values = rounded(dtype, &random_values(2, (2 * n * k) as usize));
    let residual = TestTensor::new(DType::F32, &[rows, n], &random_values(3, (rows * n) as usize));
    let x_narrow = narrow(&x, batch);
    let weight =
        |halves: u32| TestTensor::weight(dtype, &[halves * n, k], &values[..(halves * n * k) as usize]);
    // As many workers as there are tiles of 192 rows of the weight, and more.
    for workers in [2, 4, 132] {
        let mut inputs = [x.clone(), weight(1), residual.clone()];
        let family = TestOp::new("linear_with_residual", json!({"output_dtype": "f32"}), rows);
        let wanted = family.run(&mut inputs, batch).unwrap().remove(0);
        inputs[0] = x_narrow.clone();
        let with_residual = attrs(json!({"has_residual": true}));
        let sums = run_tiles(&with_residual, &mut inputs, DType::F32, &[rows, n], [rows, n], workers, batch);
        let live = (used * n * 4) as usize;
        assert_eq!(sums.data.bytes()[..live], wanted.data.bytes()[..live], "{workers} workers");
        assert!(sums.data.bytes()[live..].iter().all(|b| *b == 0xff), "{workers} workers: unused rows");

        let product = TestOp::new("linear", json!({"output_dtype": dtype.name()}), rows);
        let mut both = product.run(&mut [x.clone(), weight(2)], batch).unwrap();
        let gated = TestOp::new("silu_mul", json!({}), rows).run(&mut both, batch).unwrap().remove(0);
        let wanted = narrow(&gated, batch);
        let dims: Vec<u32> = narrow_dims(rows.into(), n.into()).iter().map(|d| *d as u32).collect();
        let mut inputs = [x_narrow.clone(), weight(2)];
        let found =
            run_tiles(&attrs(json!({"gated": true})), &mut inputs, dtype, &dims, [rows, n], workers, batch);
        assert_eq!(found.data.bytes(), wanted.data.bytes(), "{workers} workers, laid out");
    }
}

/// All tasks of `task_type`, with global output and first input `whole`; rows are as wide as each of these.
fn run_all(
    name: &str,
    task_type: &dyn TaskType,
    attrs: &Attrs,
    inputs: &mut [TestTensor],
    whole: TensorType,
    mut out: TestTensor,
    batch: &mut TestBatch,
) -> TestTensor {
    let operand =
        |ty: TensorType, role| OperandView { name: "operand", ty, sharding: &Sharding::Replicated, role };
    let roles: Vec<Role> = inputs.iter().map(|t| t.role.clone()).collect();
    let mut global_inputs: Vec<_> =
        inputs.iter().zip(&roles).map(|(t, role)| operand(t.ty(), role)).collect();
    global_inputs[0].ty.rows = Rows::Tokens;
    let view = OpView {
        name: "test",
        attrs,
        inputs: global_inputs,
        outputs: vec![operand(whole.clone(), &Role::Activation)],
        capacity: Capacity { rows: whole.dims[0] as u32, samples: 1, active: 1 },
    };
    let local = LocalOp {
        global: &view,
        inputs: inputs.iter().map(TestTensor::ty).collect(),
        outputs: vec![out.ty()],
        rank: 0,
        world: 1,
    };
    let partition = task_type.partition(&local, &Target::cpu(132)).unwrap();
    run_partition(name, &partition, inputs, std::slice::from_mut(&mut out), batch);
    out
}

/// All tasks of a wide product cut for `workers` workers.
fn run_tiles(
    attrs: &Attrs,
    inputs: &mut [TestTensor],
    dtype: DType,
    dims: &[u32], // of the output
    [rows, columns]: [u32; 2],
    workers: u32,
    batch: &mut TestBatch,
) -> TestTensor {
    let mut out = TestTensor::poisoned(dtype, dims);
    let partition = partition_of(attrs, inputs, out.ty(), [rows, columns], workers);
    assert_covered_once(&partition, 0, dims);
    run_partition("wide_linear", &partition, inputs, std::slice::from_mut(&mut out), batch);
    out
}

/// The tasks of a wide product for `workers` workers.
pub(super) fn partition_of(
    attrs: &Attrs,
    inputs: &[TestTensor],
    out: TensorType,
    [rows, columns]: [u32; 2],
    workers: u32,
) -> Partition {
    let operand =
        |ty: TensorType, role| OperandView { name: "operand", ty, sharding: &Sharding::Replicated, role };
    let roles: Vec<Role> = inputs.iter().map(|t| t.role.clone()).collect();
    let as_rows = TensorType { dims: vec![rows.into(), columns.into()], rows: Rows::Tokens, ..out.clone() };
    let view = OpView {
        name: "test",
        attrs,
        inputs: inputs.iter().zip(&roles).map(|(t, role)| operand(t.ty(), role)).collect(),
        outputs: vec![operand(as_rows, &Role::Activation)],
        capacity: Capacity { rows, samples: 1, active: 1 },
    };
    let local = LocalOp {
        global: &view,
        inputs: inputs.iter().map(TestTensor::ty).collect(),
        outputs: vec![out],
        rank: 0,
        world: 1,
    };
    super::WideLinear.partition(&local, &Target::cpu(workers)).unwrap()
}
