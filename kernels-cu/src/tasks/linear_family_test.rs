//! Tests of the family on several ranks: shardings, and the sum of the ranks' shares.

use super::{Family, Source};
use crate::abi;
use crate::registry::GpuSite;
use crate::tasks::argmax_partial::slice_of_rank;
use crate::tasks::embedding::Embedding;
use crate::tasks::linear::reference::linear;
use crate::tasks::sample_family::logits_need;
use crate::testing::{
    Call, TestBatch, TestRank, TestTask, TestTensor, assert_close, assert_covered_once, random_values,
    rounded, run_task,
};
use std::ops::Range;
use taskgraph::op_graph::Role;
use taskgraph::split::Part;
use taskgraph::target::device;
use taskgraph::task_type::{Access, LocalOp, Need, OpError, OpView, OperandView, TensorType};
use taskgraph::{Attrs, Capacity, DType, Rows, Sharding, Split, Target, TaskType};

const LINEAR: Family = Family { source: Source::Plain, residual: false, gated: false };
const RMSNORM: Family = Family { source: Source::RmsNorm, residual: false, gated: false };
const SILU_MUL: Family = Family { source: Source::SiluMul, residual: false, gated: false };
const GATED: Family = Family { source: Source::RmsNorm, residual: false, gated: true };
const WITH_RESIDUAL: Family = Family { source: Source::Plain, residual: true, gated: false };

struct Operand {
    name: &'static str,
    ty: TensorType,
    sharding: Sharding,
    role: Role,
}

fn operand(name: &'static str, dtype: DType, dims: &[u64], sharding: Sharding) -> Operand {
    let ty = TensorType { dtype, dims: dims.to_vec(), rows: Rows::Tokens };
    Operand { name, ty, sharding, role: Role::Activation }
}

fn view<'a>(attrs: &'a Attrs, operands: &'a [Operand], rows: u32) -> OpView<'a> {
    let inputs = operands
        .iter()
        .map(|o| OperandView { name: o.name, ty: o.ty.clone(), sharding: &o.sharding, role: &o.role })
        .collect();
    let capacity = Capacity { rows, samples: rows, active: rows };
    OpView { name: "op", attrs, inputs, outputs: Vec::new(), capacity }
}

fn parts(dim: usize, lengths: &[u64]) -> Sharding {
    let part = |len: &u64| Part { len: *len, split: Split::Even { unit: 16 } };
    Sharding::Split { dim, parts: lengths.iter().map(part).collect() }
}

/// The indices of a dimension that a rank holds, over all parts.
fn held(sharding: &Sharding, rank: u32, world: u32, all: u64) -> Vec<usize> {
    let Sharding::Split { parts, .. } = sharding else { return (0..all as usize).collect() };
    let mut start = 0;
    let mut indices = Vec::new();
    for (part, range) in parts.iter().zip(sharding.ranges(rank, world)) {
        let Range { start: lo, end: hi } = range;
        indices.extend((start + lo) as usize..(start + hi) as usize);
        start += part.len;
    }
    indices
}

fn take(values: &[f32], columns: usize, rows: &[usize], cols: &[usize]) -> Vec<f32> {
    rows.iter().flat_map(|r| cols.iter().map(move |c| values[r * columns + c])).collect()
}

/// Each rank would count the columns that it shares.
#[test]
fn what_ranks_share_is_neither_summed_nor_compared() {
    let shared = |dim| Sharding::split(dim, 8, Split::KeyValues { heads: 4, kv_heads: 1, head_dim: 8 });
    let attrs = Attrs::new();
    let refused = |error: OpError| assert!(error.0.contains("`w` is split by `key_values`"), "{}", error.0);
    let product = |dim| {
        let dims: [u64; 2] = if dim == 0 { [8, 5] } else { [5, 8] };
        let x = operand("x", DType::F32, &[3, dims[1]], Sharding::Replicated);
        [x, operand("w", DType::F32, &dims, shared(dim))]
    };
    refused(LINEAR.shard(&view(&attrs, &product(1), 3), 2).unwrap_err());
    assert!(LINEAR.shard(&view(&attrs, &product(1), 3), 1).is_ok());
    // Shared columns of the output are computed by both ranks, and counted once.
    assert!(LINEAR.shard(&view(&attrs, &product(0), 3), 2).is_ok());
    let table = [operand("w", DType::F32, &[8, 5], shared(0))];
    refused(Embedding.shard(&view(&attrs, &table, 3), 2).unwrap_err());
    let logits = [operand("w", DType::F32, &[3, 8], shared(1))];
    refused(slice_of_rank(&view(&attrs, &logits, 3).inputs[0], 2, 2).unwrap_err());
    refused(logits_need(&view(&attrs, &logits, 3).inputs[0], 2).unwrap_err());
}

fn output_dtype(dtype: DType) -> Attrs {
    [("output_dtype".to_string(), serde_json::Value::from(dtype.name()))].into_iter().collect()
}

/// Runs `linear` on each rank with its share. Returns each rank's output of type `dtype`.
fn run_ranks(
    (world, dtype): (u32, DType),
    rows: u32,
    x: (&[f32], &Sharding),
    weight: (&[f32], &Sharding, u64, u64),
    bias: (&[f32], &Sharding),
) -> Vec<Vec<f32>> {
    let (w, w_sharding, n, k) = weight;
    let operands = [
        operand("x", DType::Bf16, &[u64::from(rows), k], x.1.clone()),
        operand("w", DType::Bf16, &[n, k], w_sharding.clone()),
        operand("b", DType::Bf16, &[n], bias.1.clone()),
    ];
    let attrs = output_dtype(dtype);
    let global = view(&attrs, &operands, rows);
    assert_eq!(LINEAR.infer(&global).unwrap()[0].dtype, dtype);
    let every = |count: u64| (0..count as usize).collect::<Vec<_>>();
    let share = |rank: u32| {
        let own = |sharding: &Sharding, dim: usize, all: u64| match sharding {
            Sharding::Split { dim: d, .. } if *d == dim => held(sharding, rank, world, all),
            _ => every(all),
        };
        let (w_rows, w_columns) = (own(w_sharding, 0, n), own(w_sharding, 1, k));
        let x_columns = own(x.1, 1, k);
        let dims = [w_rows.len() as u32, w_columns.len() as u32];
        let x = take(x.0, k as usize, &every(u64::from(rows)), &x_columns);
        let bias = take(bias.0, 1, &own(bias.1, 0, n), &[0]);
        let mut inputs = [
            TestTensor::new(DType::Bf16, &[rows, x_columns.len() as u32], &x),
            TestTensor::weight(DType::Bf16, &dims, &take(w, k as usize, &w_rows, &w_columns)),
            TestTensor::weight(DType::Bf16, &[bias.len() as u32], &bias),
        ];
        let output =
            TensorType { dtype, dims: vec![u64::from(rows), u64::from(dims[0])], rows: Rows::Tokens };
        let local = LocalOp {
            global: &global,
            inputs: inputs.iter().map(TestTensor::ty).collect(),
            outputs: vec![output],
            rank,
            world,
        };
        let partition = LINEAR.partition(&local, &Target::cpu(3)).unwrap();
        let mut output = TestTensor::poisoned(dtype, &[rows, dims[0]]);
        assert_covered_once(&partition, 0, &output.dims);
        for spec in &partition.tasks {
            let task = TestTask {
                params: partition.params.clone(),
                args: spec.args,
                inputs: spec.reads.iter().map(|r| inputs[usize::from(r.operand)].view(r)).collect(),
                outputs: vec![output.view(&spec.writes[0])],
                scratch_bytes: partition.scratch_bytes,
            };
            assert_eq!(
                run_task("linear", &task, &mut TestBatch::rows(rows), &TestRank::default(), Call::Run),
                0
            );
        }
        output.values()
    };
    (0..world).map(share).collect()
}

#[test]
fn shares_of_the_ranks_make_up_the_whole() {
    let (rows, n, k) = (3u32, 203u64, 331u64);
    let x = rounded(DType::Bf16, &random_values(1, rows as usize * k as usize));
    let w = rounded(DType::Bf16, &random_values(2, n as usize * k as usize));
    let bias = rounded(DType::Bf16, &random_values(3, n as usize));
    let expected = linear(&x, &w, k as usize, Some(&bias), None);
    let all = Sharding::Replicated;
    for world in [1u32, 2, 3, 5, 8] {
        // row-parallel: the partial sums add up, and the bias is counted once
        let split = parts(1, &[k]);
        let partial_sums =
            |dtype| run_ranks((world, dtype), rows, (&x, &split), (&w, &split, n, k), (&bias, &all));
        let outputs = partial_sums(DType::F32);
        let sum: Vec<f32> = (0..expected.len()).map(|i| outputs.iter().map(|o| o[i]).sum()).collect();
        assert_close(&sum, &expected, 4e-6, 4.0, "row-parallel");
        // each is rounded once if it is asked for
        for (part, whole) in partial_sums(DType::Bf16).iter().zip(&outputs) {
            assert_eq!(*part, rounded(DType::Bf16, whole));
        }

        // column-parallel in three parts: every column on exactly one rank
        let columns = parts(0, &[100, 53, 50]);
        let outputs =
            run_ranks((world, DType::F32), rows, (&x, &all), (&w, &columns, n, k), (&bias, &columns));
        let mut seen = vec![0; n as usize];
        for (rank, output) in outputs.iter().enumerate() {
            let held = held(&columns, rank as u32, world, n);
            for (row, values) in output.chunks_exact(held.len()).enumerate() {
                let wanted: Vec<f64> = held.iter().map(|c| expected[row * n as usize + c]).collect();
                assert_close(values, &wanted, 4e-6, 4.0, "column-parallel");
            }
            held.iter().for_each(|c| seen[*c] += 1);
        }
        assert!(seen.iter().all(|count| *count == 1));
    }
}

#[test]
fn shardings_follow_the_weight() {
    let attrs = Attrs::new();
    let w = |sharding| operand("w", DType::Bf16, &[64, 32], sharding);
    let x = |columns: u64, sharding| operand("x", DType::F32, &[2, columns], sharding);
    let norm = || operand("norm", DType::Bf16, &[32], Sharding::Replicated);

    let operands = [x(32, Sharding::Partial), norm(), w(parts(0, &[48, 16]))];
    let rule = RMSNORM.shard(&view(&attrs, &operands, 2), 2).unwrap();
    assert_eq!(rule.inputs, [Need::Replicated, Need::Replicated, Need::AsIs]);
    assert_eq!(rule.outputs, [parts(1, &[48, 16])]);

    let operands = [x(64, parts(1, &[32, 32])), w(parts(1, &[32]))];
    let rule = SILU_MUL.shard(&view(&attrs, &operands, 2), 2).unwrap();
    let wanted = vec![Need::Split(parts(1, &[32, 32])), Need::AsIs];
    assert_eq!((rule.inputs, rule.outputs), (wanted, vec![Sharding::Partial]));
    let rule = SILU_MUL.shard(&view(&attrs, &operands, 2), 1).unwrap();
    assert_eq!(rule.outputs, [Sharding::Replicated]);
    // by default the partial sums are f32 whatever the weight's type is
    assert_eq!(SILU_MUL.infer(&view(&attrs, &operands, 2)).unwrap()[0].dtype, DType::F32);
    let refused = SILU_MUL.infer(&view(&output_dtype(DType::F16), &operands, 2)).unwrap_err();
    assert_eq!(
        refused.0,
        "the partial sums of the row-parallel `w` (bf16) cannot be f16; set `output_dtype` to f32 or to the weight's type"
    );

    let heads = Sharding::split(1, 32, Split::Queries { heads: 4, head_dim: 8 });
    // If the split of x differs from the weight's, x is exchanged first.
    let operands = [x(32, heads.clone()), w(parts(1, &[32]))];
    let rule = LINEAR.shard(&view(&attrs, &operands, 2), 2).unwrap();
    assert_eq!(rule.inputs, [Need::Split(parts(1, &[32])), Need::AsIs]);
    let operands = [x(32, heads.clone()), w(heads.clone())];
    let rule = LINEAR.shard(&view(&attrs, &operands, 2), 2).unwrap();
    assert_eq!(rule.inputs, [Need::Split(heads), Need::AsIs]);

    let residual = operand("residual", DType::F32, &[2, 64], Sharding::Replicated);
    let operands = [x(32, parts(1, &[32])), w(parts(1, &[32])), residual];
    assert!(WITH_RESIDUAL.shard(&view(&attrs, &operands, 2), 2).is_err());
    assert!(WITH_RESIDUAL.shard(&view(&attrs, &operands, 2), 1).is_ok());
}

#[test]
fn a_gate_is_fused_where_workers_are_many_and_the_ups_begin_at_a_tile() {
    let attrs = Attrs::new();
    let operands = |n: u64, sharding: Sharding| {
        [
            operand("x", DType::F32, &[2, 32], Sharding::Replicated),
            operand("norm", DType::Bf16, &[32], Sharding::Replicated),
            operand("w", DType::Bf16, &[n, 32], sharding),
        ]
    };
    let fuses = |n: u64, sharding: Sharding, world: u32, workers: u32| {
        let operands = operands(n, sharding);
        GATED.fuses(&view(&attrs, &operands, 2), world, &Target::cpu(workers))
    };
    assert!(fuses(192, Sharding::Replicated, 1, 132));
    assert!(!fuses(192, Sharding::Replicated, 1, 4), "few workers");
    assert!(!fuses(194, Sharding::Replicated, 1, 132), "97 gates");
    assert!(fuses(192, parts(0, &[96, 96]), 2, 132), "48 gates on each rank");
    assert!(!fuses(80, parts(0, &[40, 40]), 2, 132), "a rank with gates that end within a tile");
    let fuses_in_pairs = |n: u64, sharding: Sharding, world: u32| {
        let operands = operands(n, sharding);
        GATED.fuses(&view(&attrs, &operands, 2), world, &cuda())
    };
    assert!(fuses_in_pairs(208, Sharding::Replicated, 1), "104 gates");
    assert!(!fuses_in_pairs(200, Sharding::Replicated, 1), "100 gates");
    let eights = |len| Part { len, split: Split::Even { unit: 8 } };
    let split = Sharding::Split { dim: 0, parts: vec![eights(48), eights(48)] };
    assert!(fuses_in_pairs(96, split, 2), "24 gates on each rank");

    let halves = operands(192, parts(0, &[96, 96]));
    let rule = GATED.shard(&view(&attrs, &halves, 2), 2).unwrap();
    assert_eq!(rule.outputs, [parts(1, &[96])]);
    assert_eq!(GATED.infer(&view(&attrs, &halves, 2)).unwrap()[0].dims, [2, 96]);
    let uneven = operands(192, parts(0, &[128, 64]));
    let message = GATED.shard(&view(&attrs, &uneven, 2), 2).unwrap_err().0;
    assert!(
        message.contains("`w`") && message.contains("gate") && message.contains("two equal `parts`"),
        "{message}"
    );
    assert!(GATED.infer(&view(&attrs, &operands(191, Sharding::Replicated), 2)).is_err());
}

fn cuda() -> Target {
    Target::cuda(device("h200").unwrap())
}

/// In pairs of rows, a worker has whole tiles of 8 gates and 8 ups, as one range of the weight as it lies in memory, and two of the
/// bias.
#[test]
fn gated_products_are_cut_into_tiles_of_eight_gates() {
    let (attrs, k) = (Attrs::new(), 32u64);
    // Qwen3-0.6B on one rank; the same columns on 8 ranks; 8B on four.
    for (columns, most) in [(3072u32, 3), (384, 1), (3072 * 4 + 8, 12)] {
        let n = u64::from(columns);
        let operands = [
            operand("x", DType::F32, &[1, k], Sharding::Replicated),
            operand("norm", DType::Bf16, &[k], Sharding::Replicated),
            operand("w", DType::Bf16, &[2 * n, k], Sharding::Replicated),
            operand("b", DType::Bf16, &[2 * n], Sharding::Replicated),
        ];
        let global = view(&attrs, &operands, 1);
        let inputs = operands.iter().map(|o| o.ty.clone()).collect();
        let outputs = GATED.infer(&global).unwrap();
        let local = LocalOp { global: &global, inputs, outputs, rank: 0, world: 1 };
        let partition = GATED.partition(&local, &cuda()).unwrap();
        assert_covered_once(&partition, 0, &[1, columns]);
        for task in &partition.tasks {
            let [_, _, weight, gate_bias, up_bias] = &task.reads[..] else { panic!("{:?}", task.reads) };
            let range = |access: &Access| access.region.lo[0]..access.region.hi[0];
            let (from, to) = (task.writes[0].region.lo[1], task.writes[0].region.hi[1]);
            assert!(from % 8 == 0 && (to - from) <= 8 * most, "{from}..{to}");
            assert_eq!(range(weight), 2 * from..2 * to);
            assert_eq!((range(gate_bias), range(up_bias)), (from..to, columns + from..columns + to));
        }
    }
}

#[test]
fn gates_that_fill_no_tile_are_refused() {
    let attrs = Attrs::new();
    let operands = [
        operand("x", DType::F32, &[1, 32], Sharding::Replicated),
        operand("norm", DType::Bf16, &[32], Sharding::Replicated),
        operand("w", DType::Bf16, &[24, 32], Sharding::Replicated),
    ];
    let global = view(&attrs, &operands, 1);
    let inputs = operands.iter().map(|o| o.ty.clone()).collect();
    let outputs = GATED.infer(&global).unwrap();
    let local = LocalOp { global: &global, inputs, outputs, rank: 0, world: 1 };
    for (target, unit) in [(Target::cpu(4), 16), (cuda(), 8)] {
        let message = GATED.partition(&local, &target).unwrap_err().0;
        assert!(message.contains("12 rows of gates") && message.contains(&unit.to_string()), "{message}");
        assert!(message.contains("use `rmsnorm_linear`, then `silu_mul`"), "says what to do: {message}");
    }
}

/// The GPU's products have no code for other gates than SiLU, and would compute with SiLU.
#[test]
fn gates_that_a_gpu_lacks_are_refused_there() {
    let with_residual = Family { residual: true, ..SILU_MUL };
    for (family, separate) in [
        (GATED, "use `rmsnorm_linear`, then `silu_mul`"),
        (SILU_MUL, "use `silu_mul`, then `linear`"),
        (with_residual, "use `silu_mul`, then `linear_with_residual`"),
    ] {
        let mut operands = vec![operand("x", DType::F32, &[1, 64], Sharding::Replicated)];
        let k = if family.gated { 64 } else { 32 };
        operands.extend(family.gated.then(|| operand("norm", DType::Bf16, &[k], Sharding::Replicated)));
        operands.push(operand("w", DType::Bf16, &[32, k], Sharding::Replicated));
        let residual = operand("residual", DType::F32, &[1, 32], Sharding::Replicated);
        operands.extend(family.residual.then_some(residual));
        for activation in ["silu", "gelu", "gelu-tanh"] {
            let attrs = Attrs::from_iter([("activation".to_string(), activation.into())]);
            let global = view(&attrs, &operands, 1);
            let inputs = operands.iter().map(|o| o.ty.clone()).collect();
            let outputs = family.infer(&global).unwrap();
            let local = LocalOp { global: &global, inputs, outputs, rank: 0, world: 1 };
            assert!(family.partition(&local, &Target::cpu(4)).is_ok(), "{activation}");
            match family.partition(&local, &cuda()) {
                Ok(_) => assert_eq!(activation, "silu"),
                Err(error) => {
                    assert!(error.0.contains("`activation` can only be silu"), "{}", error.0);
                    assert!(activation != "silu" && error.0.contains(separate), "{}", error.0);
                }
            }
        }
    }
}

/// An operand [rows, columns] as in a GPU site; a weight is packed.
fn gpu_operand(dtype: u32, rows: u32, columns: u32, packed: bool) -> abi::mpk_operand {
    let layout = if packed { abi::MPK_LAYOUT_FRAGMENT } else { abi::MPK_LAYOUT_STRIDED };
    let stride = if packed { columns.next_multiple_of(abi::MPK_FRAGMENT_K) } else { columns };
    abi::mpk_operand {
        addr: 0,
        dims: [rows, columns, 1, 1],
        strides: [stride, 1, 1, 1],
        dtype: dtype as u8,
        ndim: 2,
        layout: layout as u8,
        symmetric: 0,
        pe: -1,
    }
}

#[test]
fn gpu_code_is_named_by_the_tasks_operands() {
    let capacity = Capacity { rows: 16, samples: 16, active: 16 };
    let mut params = abi::mpk_linear_params {
        push: 0,
        rows_kind: 0,
        gather_samples: 0,
        has_bias: 1,
        add_bias: 1,
        has_residual: 0,
        chunk_rows: 16,
        gated: 0,
        eps: 1e-6,
        activation: abi::MPK_ACTIVATION_SILU,
    };
    let x = gpu_operand(abi::MPK_F32, 16, 203, false);
    let vector = abi::mpk_operand { ndim: 1, strides: [1; 4], ..gpu_operand(abi::MPK_F16, 203, 1, false) };
    let weight = gpu_operand(abi::MPK_BF16, 40, 203, true);
    let out = gpu_operand(abi::MPK_BF16, 16, 40, false);
    let code = |params: &abi::mpk_linear_params, family: Family, inputs: &[abi::mpk_operand]| {
        let params = abi::params_words(&abi::mpk_linear_params { gated: u32::from(family.gated), ..*params });
        family.gpu(&GpuSite { params: &params, inputs, outputs: &[out], capacity })
    };
    let expected = "mpk::gpu::Linear<MPK_BF16, mpk::gpu::kRmsNorm, 4096, 2, MPK_F32, MPK_F16>";
    assert_eq!(code(&params, RMSNORM, &[x, vector, weight, vector]).as_deref(), Ok(expected));
    params.has_bias = 0;
    let expected = "mpk::gpu::Linear<MPK_BF16, mpk::gpu::kPlain, 0, 2, MPK_F32, MPK_F32>";
    assert_eq!(code(&params, LINEAR, &[x, weight]).as_deref(), Ok(expected));

    let expected = "mpk::gpu::Linear<MPK_BF16, mpk::gpu::kRmsNorm, 4096, 2, MPK_F32, MPK_F16>";
    let pairs = abi::mpk_operand { layout: abi::MPK_LAYOUT_PAIRED as u8, ..weight };
    assert_eq!(code(&params, GATED, &[x, vector, pairs]).as_deref(), Ok(expected));
    assert!(code(&params, GATED, &[x, vector, weight]).is_err(), "rows in order");
    assert!(code(&params, RMSNORM, &[x, vector, pairs]).is_err(), "rows in pairs");
    assert!(code(&params, GATED, &[x, vector, pairs, pairs]).is_err(), "two weights");

    // Summands that a norm reads; a part of k, and a residual in three parts.
    let stacked = abi::mpk_operand { dims: [2, 16, 203, 1], strides: [16 * 203, 203, 1, 1], ndim: 3, ..x };
    let expected = "mpk::gpu::Linear<MPK_BF16, mpk::gpu::kRmsNorm, 1024, 2, MPK_F32, MPK_F16, 2>";
    assert_eq!(code(&params, RMSNORM, &[stacked, vector, weight]).as_deref(), Ok(expected));
    let part = abi::mpk_operand { strides: [416, 1, 1, 1], ..weight };
    let expected = "mpk::gpu::Linear<MPK_BF16, mpk::gpu::kPlain, 0, 2, MPK_F32, MPK_F32, 2>";
    assert_eq!(code(&params, LINEAR, &[x, part]).as_deref(), Ok(expected));
    assert!(code(&params, RMSNORM, &[x, vector, part]).is_err(), "a norm needs the whole row");
    let with_residual = abi::mpk_linear_params { has_residual: 1, ..params };
    let residual = abi::mpk_operand { dims: [3, 16, 40, 1], strides: [640, 40, 1, 1], ndim: 3, ..x };
    let expected = "mpk::gpu::Linear<MPK_BF16, mpk::gpu::kPlain, 0, 2, MPK_F32, MPK_F32, 2>";
    assert_eq!(code(&with_residual, WITH_RESIDUAL, &[x, weight, residual]).as_deref(), Ok(expected));

    // an operand that the parameters do not mention, rows with gaps, a weight for the CPU, columns that do not
    // fit
    assert!(code(&params, LINEAR, &[x, weight, vector]).is_err());
    let gaps = abi::mpk_operand { strides: [406, 2, 1, 1], ..x };
    assert!(code(&params, LINEAR, &[gaps, weight]).is_err());
    let tiled = abi::mpk_operand { layout: abi::MPK_LAYOUT_TILED as u8, ..weight };
    assert!(code(&params, LINEAR, &[x, tiled]).is_err());
    assert!(code(&params, SILU_MUL, &[x, weight]).is_err());
}

#[test]
fn the_gpu_code_takes_the_tasks_of_a_partition() {
    let vector = |name, n| operand(name, DType::Bf16, &[n], Sharding::Replicated);
    let matrix = |name, dtype, dims: &[u64]| operand(name, dtype, dims, Sharding::Replicated);
    let (rows, n, k) = (4u32, 64u64, 32u64);
    for family in [LINEAR, RMSNORM, SILU_MUL, GATED, WITH_RESIDUAL] {
        for bias in [false, true] {
            let x_columns = if family.source == Source::SiluMul { 2 * k } else { k };
            let mut operands = vec![matrix("x", DType::F32, &[rows.into(), x_columns])];
            operands.extend((family.source == Source::RmsNorm).then(|| vector("norm", k)));
            operands.push(matrix("w", DType::Bf16, &[n, k]));
            operands.extend(bias.then(|| vector("b", n)));
            operands.extend(family.residual.then(|| matrix("residual", DType::F32, &[rows.into(), n])));
            let attrs = Attrs::new();
            let global = view(&attrs, &operands, rows);
            let outputs = family.infer(&global).unwrap();
            let inputs = operands.iter().map(|o| o.ty.clone()).collect();
            let local = LocalOp { global: &global, inputs, outputs: outputs.clone(), rank: 0, world: 1 };
            let partition = family.partition(&local, &cuda()).unwrap();

            let of_type = |ty: &TensorType, name: &str| {
                let dtype = if ty.dtype == DType::F32 { abi::MPK_F32 } else { abi::MPK_BF16 };
                let columns = ty.dims.get(1).map_or(1, |columns| *columns as u32);
                let plain = gpu_operand(dtype, ty.dims[0] as u32, columns, name == "w");
                let pairs = name == "w" && family.gated;
                abi::mpk_operand {
                    layout: if pairs { abi::MPK_LAYOUT_PAIRED as u8 } else { plain.layout },
                    ..plain
                }
            };
            let out = of_type(&outputs[0], "out");
            for task in &partition.tasks {
                let inputs: Vec<_> = task
                    .reads
                    .iter()
                    .map(|read| &operands[usize::from(read.operand)])
                    .map(|o| of_type(&o.ty, o.name))
                    .collect();
                let code = |family: Family| {
                    let (params, capacity) = (&partition.params, global.capacity);
                    family.gpu(&GpuSite { params, inputs: &inputs, outputs: &[out], capacity })
                };
                assert!(code(family).is_ok(), "{family:?}, bias {bias}: {:?}", code(family));
                assert!(code(Family { gated: !family.gated, ..family }).is_err(), "{family:?}");
            }
        }
    }
}
