//! Products of which some tiles are cut: several tasks share the k of the tiles of the last rows, and an `add` sums their parts up.

use super::WideLinear;
use super::test::{mlp_with_sums, stream_block};
use crate::registry::registry;
use crate::tasks::add::Add;
use crate::testing::{TestBatch, TestOp, TestTensor, random_values, rounded, run_partition};
use serde_json::json;
use taskgraph::op_graph::{Attrs, Tensor};
use taskgraph::task_type::{LocalOp, OpView, OperandView, Partition, TaskType, TensorType};
use taskgraph::verify::verify;
use taskgraph::{
    Allreduce, BuildOptions, Capacity, DType, OpGraph, Placement, Region, Role, Rows, Sharding, Target,
    TensorId, build_all,
};

/// A product with a residual. With four workers and 1,300 rows, its last two row tiles of six are cut.
fn product(rows: u32) -> OpGraph {
    let mut graph = OpGraph::new("product", Capacity { rows, samples: 1, active: 1 });
    let mut add = |name: &str, dtype, columns| {
        graph.add_tensor(Tensor {
            name: name.into(),
            dtype,
            dims: vec![rows.into(), columns],
            rows: Rows::Tokens,
            role: Role::Input,
            sharding: Sharding::Replicated,
            output: false,
        })
    };
    let (x, residual) = (add("x", DType::Bf16, 6208), add("residual", DType::F32, 128));
    let weight = graph.weight("weight", DType::Bf16, &[128, 6208], None);
    let attrs = json!({"output_dtype": "f32"}).as_object().cloned().unwrap_or_default();
    let branch = graph.op("branch", "linear", &[x, weight], attrs);
    let out = graph.op("out", "add", &[branch, residual], Attrs::new());
    graph.tensor_mut(out).output = true;
    graph
}

#[test]
fn graphs_with_cut_tiles_pass_the_verifier() {
    for placement in [Placement::Static, Placement::Dynamic] {
        let mut options = BuildOptions::new(1, Target { wide: true, ..Target::cpu(4) });
        options.placement = placement;
        let graphs = build_all(&product(1300), &registry(), &options).unwrap();
        if let Err(violations) = verify(&graphs) {
            panic!("{placement:?}: {}", violations[0]);
        }
        let graph = &graphs[0];
        let dims = |name: &str| graph.tensors.iter().find(|t| t.name == name).map(|t| t.dims.clone());
        assert_eq!(dims("out.first").as_deref(), Some(&[276, 128][..]), "{placement:?}");
        let products = graph.tasks.iter().filter(|t| graph.type_name(t) == "wide_linear");
        assert_eq!(products.count(), 4 + 2 * 2, "{placement:?}");
    }
    // Full waves.
    let options = BuildOptions::new(1, Target { wide: true, ..Target::cpu(4) });
    let graphs = build_all(&product(1024), &registry(), &options).unwrap();
    assert!(graphs[0].tensors.iter().all(|t| t.name != "out.first"));
}

/// If a tile has all of more than 64 rows, no tasks share the k of a product whose output is rounded: another task would have to sum the parts.
#[test]
fn rounded_outputs_of_broad_tiles_have_no_parts() {
    // Of a product with an output of 2 bytes, and of one with a residual.
    let have_parts = |rows: u32| {
        let mut graph = product(rows);
        let rounded = graph.op("rounded", "linear", &[TensorId(0), TensorId(2)], Attrs::new());
        graph.tensor_mut(rounded).output = true;
        let options = BuildOptions::new(1, Target { wide: true, ..Target::cpu(132) });
        let graphs = build_all(&graph, &registry(), &options).unwrap();
        if let Err(violations) = verify(&graphs) {
            panic!("{rows} rows: {}", violations[0]);
        }
        ["rounded.first", "out.first"].map(|name| graphs[0].tensors.iter().any(|t| t.name == name))
    };
    assert_eq!([65, 128, 129].map(have_parts), [[false, true], [false, true], [true, true]]);
}

/// Blocks of a norm, two products of which the second is cut, and a residual.
fn blocks(count: u32) -> OpGraph {
    let mut graph = OpGraph::new("blocks", Capacity { rows: 1300, samples: 1, active: 1 });
    let mut stream = graph.add_tensor(Tensor {
        name: "x".into(),
        dtype: DType::F32,
        dims: vec![1300, 128],
        rows: Rows::Tokens,
        role: Role::Input,
        sharding: Sharding::Replicated,
        output: false,
    });
    for block in 0..count {
        let mut weight =
            |name: &str, dims: &[u64]| graph.weight(&format!("{name}{block}"), DType::Bf16, dims, None);
        let (norm, up, down) =
            (weight("norm", &[128]), weight("up", &[6208, 128]), weight("down", &[128, 6208]));
        let normed = graph.op(&format!("normed{block}"), "rmsnorm", &[stream, norm], Attrs::new());
        let wide = graph.op(&format!("wide{block}"), "linear", &[normed, up], Attrs::new());
        let attrs = json!({"output_dtype": "f32"}).as_object().cloned().unwrap_or_default();
        let branch = graph.op(&format!("branch{block}"), "linear", &[wide, down], attrs);
        stream = graph.op(&format!("out{block}"), "add", &[branch, stream], Attrs::new());
    }
    graph.tensor_mut(stream).output = true;
    graph
}

/// Readers of an output that two operators write follow both. So blocks share their memory.
#[test]
fn blocks_with_cut_tiles_share_memory() {
    let peak = |count| {
        let options = BuildOptions::new(1, Target { wide: true, ..Target::cpu(4) });
        let graphs = build_all(&blocks(count), &registry(), &options).unwrap();
        if let Err(violations) = verify(&graphs) {
            panic!("{count} blocks: {}", violations[0]);
        }
        let tensors = &graphs[0].tensors;
        let cut = tensors.iter().filter(|t| t.name.ends_with(".first")).count();
        assert_eq!(cut, count as usize);
        tensors.iter().filter_map(|t| t.overlay.as_ref().map(|place| place.offset + t.bytes)).max()
    };
    assert!(peak(3) > Some(0));
    assert_eq!(peak(3), peak(6));
}

/// Each rank has some of a product's k, and owns every other row tile, whole or cut. Ranks stay alike, so one is proven for both.
#[test]
fn ranks_own_whole_and_cut_tiles_alike() {
    for sums in [DType::F32, DType::Bf16] {
        let mut options = BuildOptions::new(2, Target { wide: true, ..Target::cpu(5) });
        options.allreduce = Allreduce::TwoShot;
        let mut ops = mlp_with_sums(1536, 12416, sums);
        let stream = TensorId(ops.ops.last().unwrap().outputs[0]);
        ops.tensor_mut(stream).output = false;
        let last = stream_block(&mut ops, stream);
        ops.tensor_mut(last).output = true;
        let graphs = build_all(&ops, &registry(), &options).unwrap();
        if let Err(violations) = verify(&graphs) {
            panic!("{sums}: {}", violations[0]);
        }
        for (rank, graph) in graphs.iter().enumerate() {
            let first = graph.tensors.iter().find(|t| t.name == "branch.first");
            assert_eq!(first.map(|t| t.dims.clone()).as_deref(), Some(&[512, 128][..]), "{sums}");
            // The owner's tiles come last.
            let rows: Vec<u32> = graph
                .tasks
                .iter()
                .filter(|t| graph.type_name(t) == "wide_linear" && graph.op_name(t) == "branch")
                .map(|t| t.args[0] as u32 / 256)
                .collect();
            let turned = |tile: u32| if rank == 0 { tile } else { tile ^ 1 };
            let wanted: Vec<u32> = [1, 0, 3, 2, 5, 5, 5, 5, 4, 4, 4, 4].map(turned).to_vec();
            assert_eq!(rows, wanted, "{sums}, rank {rank}");
        }
    }
}

/// Two or four tasks share the k of every tile. Their sums, added up, are the product; the first has bias and residual.
#[test]
fn parts_add_up_to_the_product() {
    for (rows, used, parts, tasks) in
        [(40u32, 37u32, 2u32, 4), (100, 97, 2, 2), (100, 97, 4, 4), (300, 290, 2, 6)]
    {
        let (k, n) = (6200u32, 80u32);
        let x = rounded(DType::Bf16, &random_values(1, (rows * k) as usize));
        let weights = rounded(DType::Bf16, &random_values(2, (n * k) as usize));
        let (bias, residual) = (random_values(3, n as usize), random_values(4, (rows * n) as usize));
        let mut batch = TestBatch::rows(used);
        let mut inputs = vec![
            TestTensor::new(DType::Bf16, &[rows, k], &x),
            TestTensor::weight(DType::Bf16, &[n, k], &weights),
            TestTensor::weight(DType::Bf16, &[n], &rounded(DType::Bf16, &bias)),
            TestTensor::new(DType::F32, &[rows, n], &residual),
        ];
        let plain = TestOp::new("linear_with_residual", json!({"output_dtype": "f32"}), rows);
        let expected = plain.run(&mut inputs, &mut batch).unwrap().remove(0).values();
        let pack = TestOp::new("wide_rows", json!({"act_dtype": "bf16"}), rows);
        inputs[0] = pack.run(&mut inputs[..1], &mut batch).unwrap().remove(0);

        let attrs = json!({"has_bias": true, "has_residual": true, "parts": parts});
        let mut out: Vec<_> = (0..parts).map(|_| TestTensor::poisoned(DType::F32, &[rows, n])).collect();
        let partition = run_tasks("wide_linear", &WideLinear, &attrs, &mut inputs, &mut out, &mut batch);
        assert_eq!(partition.tasks.len(), tasks);
        let sums: Vec<Vec<f32>> = out.iter().map(|out| out.values()).collect();
        let live = (used * n) as usize;
        for at in 0..live {
            let (found, wanted) = (sums.iter().map(|part| part[at]).sum::<f32>(), expected[at]);
            assert!((found - wanted).abs() <= 1e-3 * (1.0 + wanted.abs()), "{at}: {found}, {wanted}");
            assert!(sums.iter().all(|part| part[at].abs() > 0.0), "each part has a part of the sum");
        }
        assert!(sums.iter().all(|part| part[live..].iter().all(|v| v.is_nan())), "unused rows were written");
    }
}

/// Tasks of the product and of the sum write all rows in use, and no others. The result is that of the family.
#[test]
fn whole_tiles_and_sums_are_the_product() {
    for (used, parts, rounds) in
        [(600u32, 2u32, false), (530, 4, false), (530, 2, true), (512, 4, false), (100, 2, true)]
    {
        let (rows, first_row, k, n) = (600u32, 512u32, 2200u32, 200u32);
        let out_dtype = if rounds { DType::Bf16 } else { DType::F32 };
        let x = rounded(DType::Bf16, &random_values(1, (rows * k) as usize));
        let weights = rounded(DType::Bf16, &random_values(2, (n * k) as usize));
        let bias = rounded(DType::Bf16, &random_values(3, n as usize));
        let mut batch = TestBatch::rows(used);
        let mut inputs = vec![
            TestTensor::new(DType::Bf16, &[rows, k], &x),
            TestTensor::weight(DType::Bf16, &[n, k], &weights),
            TestTensor::weight(DType::Bf16, &[n], &bias),
        ];
        if !rounds {
            inputs.push(TestTensor::new(DType::F32, &[rows, n], &random_values(4, (rows * n) as usize)));
        }
        let name = if rounds { "linear" } else { "linear_with_residual" };
        let family = TestOp::new(name, json!({"output_dtype": out_dtype.name()}), rows);
        let expected = family.run(&mut inputs, &mut batch).unwrap().remove(0).values();
        let pack = TestOp::new("wide_rows", json!({"act_dtype": "bf16"}), rows);
        inputs[0] = pack.run(&mut inputs[..1], &mut batch).unwrap().remove(0);

        let mut made = vec![TestTensor::poisoned(out_dtype, &[rows, n])];
        made.extend((0..parts).map(|_| TestTensor::poisoned(DType::F32, &[rows - first_row, n])));
        let attrs =
            json!({"has_bias": true, "has_residual": !rounds, "parts": parts, "first_row": first_row});
        let partition = run_tasks("wide_linear", &WideLinear, &attrs, &mut inputs, &mut made, &mut batch);
        assert_eq!(partition.tasks.len() as u32, 2 * (2 + parts));

        let mut out = made.drain(..1).collect::<Vec<_>>();
        let in_parts = used.saturating_sub(first_row) * n;
        for part in &mut made {
            let values = part.values();
            assert!(
                values[..in_parts as usize].iter().all(|v| v.abs() > 0.0),
                "each part has a part of the sum"
            );
            assert!(
                values[in_parts as usize..].iter().all(|v| v.is_nan()),
                "unused rows of a part were written"
            );
            // A sum of unused rows would show.
            let known: Vec<f32> = values.iter().map(|v| if v.is_nan() { 1.0 } else { *v }).collect();
            *part = TestTensor::new(DType::F32, &[rows - first_row, n], &known);
        }
        made.swap(0, 1);
        let sum = run_tasks("add", &Add, &json!({"first_row": first_row}), &mut made, &mut out, &mut batch);
        // Both together write each element once.
        let of_out = |task: &taskgraph::task_type::TaskSpec| {
            task.writes.iter().filter(|w| w.operand == 0).map(|w| w.region).collect::<Vec<_>>()
        };
        let regions: Vec<Region> = partition.tasks.iter().chain(&sum.tasks).flat_map(of_out).collect();
        assert_eq!(regions.iter().map(Region::volume).sum::<u64>(), u64::from(rows * n));

        let (found, live) = (out[0].values(), (used * n) as usize);
        let near = if rounds { 1e-2 } else { 1e-3 };
        for at in 0..live {
            let (found, wanted) = (found[at], expected[at]);
            assert!(
                (found - wanted).abs() <= near * (1.0 + wanted.abs()),
                "row {}: {found}, {wanted}",
                at as u32 / n
            );
        }
        assert!(found[live..].iter().all(|v| v.is_nan()), "unused rows were written");
    }
}

/// Runs all tasks of an operator for 132 workers. All rows are token rows.
fn run_tasks(
    name: &str,
    task_type: &dyn TaskType,
    attrs: &serde_json::Value,
    inputs: &mut [TestTensor],
    outputs: &mut [TestTensor],
    batch: &mut TestBatch,
) -> Partition {
    let attrs: Attrs = attrs.as_object().cloned().unwrap_or_default();
    let roles: Vec<Role> = inputs.iter().map(|t| t.role.clone()).collect();
    let operand =
        |ty: TensorType, role| OperandView { name: "operand", ty, sharding: &Sharding::Replicated, role };
    let of_tokens = |t: &TestTensor| TensorType { rows: Rows::Tokens, ..t.ty() };
    let view = OpView {
        name: "test",
        attrs: &attrs,
        inputs: inputs.iter().zip(&roles).map(|(t, role)| operand(t.ty(), role)).collect(),
        outputs: outputs.iter().map(|t| operand(of_tokens(t), &Role::Activation)).collect(),
        capacity: Capacity { rows: outputs[0].ty().dims[0] as u32, samples: 1, active: 1 },
    };
    let local = LocalOp {
        global: &view,
        inputs: inputs.iter().map(TestTensor::ty).collect(),
        outputs: outputs.iter().map(of_tokens).collect(),
        rank: 0,
        world: 1,
    };
    let partition = task_type.partition(&local, &Target::cpu(132)).unwrap();
    run_partition(name, &partition, inputs, outputs, batch);
    partition
}
