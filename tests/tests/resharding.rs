//! Proves that an operator gets its inputs however they are sharded: collectives are inserted, and the user's collectives
//! run, in every element type and dimension, with the results of one rank.

use mpk_tests::reference::{self, values};
use mpk_tests::{Job, ModelFile};
use serde_json::{Value, json};

const ROWS: usize = 6;

fn tensor(name: &str, kind: &str, dtype: &str, dims: &[usize], values: &[f64], shard: Value) -> Value {
    json!({"name": name, "kind": kind, "dtype": dtype, "dims": dims, "data": {"values": values}, "shard": shard})
}

fn even(dim: usize) -> Value {
    json!({"dim": dim, "kind": "even"})
}

fn op(name: &str, inputs: &[&str], outputs: &[&str], attrs: Value) -> Value {
    json!({"op": name, "inputs": inputs, "outputs": outputs, "attrs": attrs})
}

fn graph(tensors: &[Value], ops: &[Value], outputs: &[&str]) -> ModelFile {
    let graph = json!({"rows": ROWS, "tensors": tensors, "ops": ops, "outputs": outputs});
    ModelFile::new(json!({"schema": "mpk-model/1", "graph": graph}))
}

/// Checks output `name` on several numbers of ranks, with both placements.
fn check(model: &ModelFile, ranks: &[u32], name: &str, expected: &[f64], tolerance: f64) {
    check_with(&[], model, ranks, name, expected, tolerance);
}

/// The same with more arguments.
fn check_with(
    arguments: &[&str],
    model: &ModelFile,
    ranks: &[u32],
    name: &str,
    expected: &[f64],
    tolerance: f64,
) {
    for &ranks in ranks {
        for placement in ["static", "dynamic"] {
            let run = Job::new(ranks)
                .arg(model.path())
                .args(["--placement", placement])
                .args(arguments.iter().copied())
                .run_json();
            let found = &run.outputs[name].values;
            assert_eq!(found.len(), expected.len());
            for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
                assert!(
                    (found - expected).abs() <= tolerance * (1.0 + expected.abs()),
                    "{name} on {ranks} ranks, {placement}: element {i} is {found}, expected {expected}"
                );
            }
        }
    }
}

/// Values that every element type holds exactly.
fn exact(seed: u64, count: usize) -> Vec<f64> {
    values(seed, count).iter().map(|v| (v * 64.0).round() / 64.0).collect()
}

#[test]
fn a_split_input_feeds_a_norm() {
    let k = 20;
    let (x, one) = (exact(1, ROWS * k), vec![1.0; k]);
    let expected = reference::rmsnorm(&x, &one, 1e-3);
    for dtype in ["f32", "bf16", "f16"] {
        for dim in [0, 1] {
            let tensors = [
                tensor("x", "input", dtype, &[ROWS, k], &x, even(dim)),
                tensor("w", "weight", "f32", &[k], &one, json!("replicated")),
            ];
            let ops = [op("rmsnorm", &["x", "w"], &["y"], json!({"eps": 1e-3}))];
            check(&graph(&tensors, &ops, &["y"]), &[1, 2, 3], "y", &expected, 1e-5);
        }
    }
}

#[test]
fn both_halves_of_a_gate_are_outputs() {
    let (k, n) = (20, 9);
    let (x, w) = (exact(2, ROWS * k), exact(3, 2 * n * k));
    let half = json!({"len": n, "split": {"kind": "even"}});
    for dtype in ["f32", "bf16"] {
        let tensors = [
            tensor("x", "input", dtype, &[ROWS, k], &x, json!("replicated")),
            tensor("w", "weight", dtype, &[2 * n, k], &w, json!({"dim": 0, "parts": [half, half]})),
        ];
        let ops = [
            op("linear", &["x", "w"], &["g"], json!({"output_dtype": "f32"})),
            op("silu_mul", &["g"], &["y"], json!({})),
        ];
        let g = reference::linear(&x, &w, k, None);
        let model = graph(&tensors, &ops, &["g", "y"]);
        check(&model, &[1, 2, 3], "g", &g, 1e-5);
        check(&model, &[2], "y", &reference::silu_mul(&g, n), 1e-5);
    }
}

/// A row-parallel product accepts any x: replicated, split by rows, or split differently by columns.
#[test]
fn x_is_resharded_as_the_weight_needs_it() {
    let (k, n) = (21, 10);
    let (x, w) = (exact(4, ROWS * k), exact(5, n * k));
    let expected = reference::linear(&x, &w, k, None);
    for shard in [json!("replicated"), even(0), json!({"dim": 1, "kind": "even", "unit": 4})] {
        for dtype in ["f32", "bf16", "f16"] {
            let tensors = [
                tensor("x", "input", dtype, &[ROWS, k], &x, shard.clone()),
                tensor("w", "weight", dtype, &[n, k], &w, even(1)),
            ];
            let ops = [op("linear", &["x", "w"], &["y"], json!({}))];
            check(&graph(&tensors, &ops, &["y"]), &[1, 2, 3], "y", &expected, 1e-5);
        }
    }
}

/// Rounds as a bf16 is rounded: to the nearest, ties to even.
fn bf16(value: f64) -> f64 {
    let bits = (value as f32).to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000;
    f64::from(f32::from_bits(rounded))
}

/// A row-parallel product may write its partial sums as bf16. Each rank's is rounded once, also the one that is not sent, and
/// then they are summed in f32.
#[test]
fn partial_sums_are_rounded_before_they_are_summed() {
    let (k, n) = (24, 100);
    let (x, w, residual) = (exact(17, ROWS * k), exact(18, n * k), exact(19, ROWS * n));
    let tensors = [
        tensor("x", "input", "bf16", &[ROWS, k], &x, json!("replicated")),
        tensor("w", "weight", "bf16", &[n, k], &w, even(1)),
        tensor("residual", "input", "f32", &[ROWS, n], &residual, json!("replicated")),
        tensor("v", "weight", "bf16", &[n, k], &w, even(1)),
    ];
    let rounded = json!({"output_dtype": "bf16"});
    let ops = [
        op("linear", &["x", "w"], &["h"], rounded.clone()),
        op("add", &["h", "residual"], &["sum"], json!({})),
        op("linear", &["x", "v"], &["g"], rounded),
        op("reduce_scatter", &["g"], &["share"], json!({"shard": even(0), "dtype": "f32"})),
    ];
    let model = graph(&tensors, &ops, &["sum", "share"]);
    for ranks in [2, 3, 4] {
        let of_rank = |rank: usize| {
            let columns = rank * k / ranks..(rank + 1) * k / ranks;
            let take = |all: &[f64]| -> Vec<f64> {
                all.chunks(k).flat_map(|row| row[columns.clone()].to_vec()).collect()
            };
            reference::linear(&take(&x), &take(&w), k / ranks, None)
        };
        let parts: Vec<Vec<f64>> = (0..ranks).map(of_rank).collect();
        let share: Vec<f64> = (0..ROWS * n).map(|i| parts.iter().map(|part| bf16(part[i])).sum()).collect();
        let sum: Vec<f64> = share.iter().zip(&residual).map(|(a, b)| a + b).collect();
        check(&model, &[ranks as u32], "sum", &sum, 1e-6);
        check(&model, &[ranks as u32], "share", &share, 1e-6);
    }
    // On one rank, the product is not rounded before its residual is added.
    let whole = reference::linear(&x, &w, k, None);
    let sum: Vec<f64> = whole.iter().zip(&residual).map(|(a, b)| a + b).collect();
    check(&model, &[1], "sum", &sum, 1e-6);
    check(&model, &[1], "share", &whole.iter().map(|v| bf16(*v)).collect::<Vec<_>>(), 1e-6);
}

#[test]
fn partial_sums_of_other_types_are_refused() {
    let tensors = [
        tensor("x", "input", "bf16", &[ROWS, 4], &exact(20, ROWS * 4), json!("replicated")),
        tensor("w", "weight", "bf16", &[4, 4], &exact(21, 16), even(1)),
    ];
    let ops = [op("linear", &["x", "w"], &["y"], json!({"output_dtype": "f16"}))];
    let model = graph(&tensors, &ops, &["y"]);
    let run = Job::new(2).arg(model.path()).run().expect(2).expect_nothing_left();
    let wanted =
        "the partial sums of the row-parallel `w` (bf16) cannot be f16; set `output_dtype` to f32 or to";
    assert!(run.stderr.contains(wanted), "{}", run.stderr);
}

#[test]
fn collectives_of_the_users_own() {
    let (k, n) = (21, 40);
    let (x, w) = (exact(6, ROWS * k), exact(7, n * k));
    let expected = reference::linear(&x, &w, k, None);
    for dim in [0, 1] {
        let tensors = [
            tensor("x", "input", "f32", &[ROWS, k], &x, json!("replicated")),
            tensor("w", "weight", "f32", &[n, k], &w, even(1)),
        ];
        let ops = [
            op("linear", &["x", "w"], &["sum"], json!({})),
            op("reduce_scatter", &["sum"], &["share"], json!({"shard": even(dim)})),
            op("all_to_all", &["share"], &["y"], json!({"shard": even(1 - dim)})),
        ];
        check(&graph(&tensors, &ops, &["y"]), &[1, 2, 3], "y", &expected, 1e-5);
    }
}

/// Several workers send pieces of a large block.
#[test]
fn large_blocks_are_gathered_in_pieces() {
    let (k, n) = (8, 1200);
    let (x, w) = (exact(71, ROWS * k), exact(72, n * k));
    let expected = reference::linear(&x, &w, k, None);
    let tensors = [
        tensor("x", "input", "f32", &[ROWS, k], &x, json!("replicated")),
        tensor("w", "weight", "f32", &[n, k], &w, even(0)),
    ];
    let model = graph(&tensors, &[op("linear", &["x", "w"], &["y"], json!({}))], &["y"]);
    let arguments = ["--workers", "3", "--tune", "allgather.piece_bytes=1024"];
    check_with(&arguments, &model, &[2, 3], "y", &expected, 1e-5);
}

/// A sum over the ranks and the user's own allreduce of it are two outputs, and so are a split tensor and its allgather.
#[test]
fn a_tensor_and_its_own_collective_are_both_outputs() {
    let (k, n) = (21, 40);
    let (x, w) = (exact(37, ROWS * k), exact(38, n * k));
    let expected = reference::linear(&x, &w, k, None);
    for (dim, collective) in [(1, "allreduce"), (0, "allgather")] {
        let tensors = [
            tensor("x", "input", "f32", &[ROWS, k], &x, json!("replicated")),
            tensor("w", "weight", "f32", &[n, k], &w, even(dim)),
        ];
        let ops = [op("linear", &["x", "w"], &["h"], json!({})), op(collective, &["h"], &["y"], json!({}))];
        let model = graph(&tensors, &ops, &["h", "y"]);
        for name in ["h", "y"] {
            check(&model, &[1, 3], name, &expected, 1e-5);
            for lowering in ["one-shot", "two-shot"] {
                let run = Job::new(2).arg(model.path()).args(["--allreduce", lowering]).run_json();
                assert_eq!(run.outputs["h"].values, run.outputs["y"].values, "{collective}, {lowering}");
            }
        }
    }
}

/// A split tensor, or a sum over ranks, is stored whole in a persistent tensor, by a collective of the user or an
/// inserted one. With many columns there are several copies.
#[test]
fn persistent_tensors_get_whole_values() {
    let (k, n) = (21, 100);
    let (x, w) = (exact(15, ROWS * k), exact(16, n * k));
    let expected = reference::linear(&x, &w, k, None);
    for dim in [0, 1] {
        for own in [true, false] {
            let tensors = [
                tensor("x", "input", "f32", &[ROWS, k], &x, json!("replicated")),
                tensor("w", "weight", "f32", &[n, k], &w, even(dim)),
                tensor("zero", "constant", "f32", &[ROWS, n], &vec![0.0; ROWS * n], json!("replicated")),
                json!({"name": "state", "kind": "persistent", "dtype": "f32", "dims": [ROWS, n]}),
            ];
            let gather = if dim == 0 { "allgather" } else { "allreduce" };
            let mut ops = vec![op("add", &["state", "zero"], &["y"], json!({}))];
            if own {
                ops.insert(0, op("linear", &["x", "w"], &["h"], json!({})));
                ops.insert(1, op(gather, &["h"], &["state"], json!({})));
            } else {
                ops.insert(0, op("linear", &["x", "w"], &["state"], json!({})));
            }
            check(&graph(&tensors, &ops, &["y"]), &[1, 2, 4], "y", &expected, 1e-5);
        }
    }
}

/// A persistent tensor is read, written, and read again: what was made of it for the first reader is not used for the second one. The
/// second iteration reads what the first one wrote.
#[test]
fn a_persistent_tensor_is_resharded_again_after_it_was_written() {
    let n = 6;
    let (x, w, v) = (exact(39, ROWS * n), exact(40, n * n), exact(41, n * n));
    let first = reference::linear(&x, &w, n, None);
    let sum = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a + b).collect::<Vec<f64>>();
    for (state, of_w, of_v) in [
        (even(0), even(1), json!("replicated")),
        (even(1), even(1), even(0)),
        (json!("replicated"), even(0), even(1)),
    ] {
        let tensors = [
            tensor("x", "input", "f32", &[ROWS, n], &x, json!("replicated")),
            tensor("w", "weight", "f32", &[n, n], &w, of_w),
            tensor("v", "weight", "f32", &[n, n], &v, of_v),
            json!({"name": "s", "kind": "persistent", "dtype": "f32", "dims": [ROWS, n], "rows": "tokens", "shard": state}),
        ];
        let ops = [
            op("add", &["s", "x"], &["before"], json!({})),
            op("linear", &["s", "v"], &["p"], json!({})),
            op("linear", &["before", "w"], &["s"], json!({})),
            op("add", &["s", "x"], &["after"], json!({})),
            op("linear", &["s", "v"], &["q"], json!({})),
        ];
        let model = graph(&tensors, &ops, &["before", "p", "after", "q", "s"]);
        for ranks in [1, 2, 3] {
            let second = reference::linear(&sum(&first, &x), &w, n, None);
            let zero = vec![0.0; ROWS * n];
            for (iterations, old, new) in [("1", &zero, &first), ("2", &first, &second)] {
                let run = Job::new(ranks).arg(model.path()).args(["--iterations", iterations]).run_json();
                for (name, expected) in [
                    ("before", sum(old, &x)),
                    ("p", reference::linear(old, &v, n, None)),
                    ("after", sum(new, &x)),
                    ("q", reference::linear(new, &v, n, None)),
                    ("s", new.clone()),
                ] {
                    for (found, expected) in run.outputs[name].values.iter().zip(&expected) {
                        let near = (found - expected).abs() <= 1e-5 * (1.0 + expected.abs());
                        assert!(
                            near,
                            "{name}, {ranks} ranks, {iterations} iterations: {found}, not {expected}"
                        );
                    }
                }
            }
        }
    }
}

/// A collective sends the value that a persistent tensor has, although a later operator writes that tensor: the puts read a copy. The
/// second iteration sends what the first one wrote.
#[test]
fn a_persistent_tensor_is_sent_before_it_is_written() {
    let n = 6;
    let (x, w) = (exact(44, ROWS * n), exact(45, n * n));
    let product = reference::linear(&x, &w, n, None);
    let expected: Vec<f64> = product.iter().zip(&x).map(|(a, b)| a + b).collect();
    let to_rows = json!({"shard": even(0)});
    for (collective, state, of_w, attrs) in [
        ("all_to_all", even(1), even(0), to_rows.clone()),
        ("allreduce", json!("partial"), even(1), json!({})),
        ("reduce_scatter", json!("partial"), even(1), to_rows),
    ] {
        let tensors = [
            tensor("x", "input", "f32", &[ROWS, n], &x, json!("replicated")),
            tensor("w", "weight", "f32", &[n, n], &w, of_w),
            json!({"name": "s", "kind": "persistent", "dtype": "f32", "dims": [ROWS, n], "rows": "tokens", "shard": state}),
        ];
        let ops = [
            op(collective, &["s"], &["old"], attrs),
            op("linear", &["x", "w"], &["s"], json!({})),
            op("add", &["old", "x"], &["y"], json!({})),
        ];
        let model = graph(&tensors, &ops, &["y"]);
        for placement in ["static", "dynamic"] {
            let how = ["--iterations", "2", "--placement", placement];
            let run = Job::new(2).arg(model.path()).args(how).run_json();
            for (found, expected) in run.outputs["y"].values.iter().zip(&expected) {
                assert!(
                    (found - expected).abs() <= 1e-5,
                    "{collective}, {placement}: {found}, not {expected}"
                );
            }
        }
    }
}

/// A user's slice of a persistent tensor, or on one rank any collective of it, is a copy: it keeps the value that it read.
#[test]
fn a_slice_keeps_the_value_that_it_read() {
    let n = 6;
    let (x, w) = (exact(42, ROWS * n), exact(43, n * n));
    let tensors = [
        tensor("x", "input", "f32", &[ROWS, n], &x, json!("replicated")),
        tensor("w", "weight", "f32", &[n, n], &w, json!("replicated")),
        json!({"name": "s", "kind": "persistent", "dtype": "f32", "dims": [ROWS, n], "rows": "tokens"}),
    ];
    let ops = [
        // A slice of an input looks the same, but needs no copy.
        op("slice", &["x"], &["part"], json!({"shard": even(1)})),
        op("slice", &["s"], &["old"], json!({"shard": even(1)})),
        op("linear", &["x", "w"], &["s"], json!({})),
        op("add", &["part", "old"], &["y"], json!({})),
    ];
    check(&graph(&tensors, &ops, &["y"]), &[1, 2, 3], "y", &x, 1e-6);
}

/// Operators of constants are computed once, at load.
#[test]
fn constants_fold() {
    let n = 7;
    let (x, a, b) = (exact(8, ROWS * n), exact(9, ROWS * n), exact(10, ROWS * n));
    let tensors = [
        tensor("x", "input", "f32", &[ROWS, n], &x, json!("replicated")),
        tensor("a", "constant", "f32", &[ROWS, n], &a, json!("replicated")),
        tensor("b", "constant", "f32", &[ROWS, n], &b, json!("replicated")),
    ];
    let mut tensors = tensors.to_vec();
    tensors[0]["rows"] = json!("fixed");
    let ops = [op("add", &["a", "b"], &["c"], json!({})), op("add", &["x", "c"], &["y"], json!({}))];
    let expected: Vec<f64> = (0..ROWS * n).map(|i| x[i] + a[i] + b[i]).collect();
    check(&graph(&tensors, &ops, &["y"]), &[1, 2], "y", &expected, 1e-6);
}

/// A constant of which each rank holds a summand is not folded: its values are not its value.
#[test]
fn partial_constants_are_summed() {
    let n = 7;
    let (x, a, b) = (exact(8, ROWS * n), exact(9, ROWS * n), exact(10, ROWS * n));
    let tensors = ["x", "a", "b"].map(|name| {
        let (kind, values, shard) = match name {
            "x" => ("input", &x, "replicated"),
            "a" => ("constant", &a, "partial"),
            _ => ("constant", &b, "replicated"),
        };
        let mut tensor = tensor(name, kind, "f32", &[ROWS, n], values, json!(shard));
        tensor["rows"] = json!("fixed");
        tensor
    });
    let ops = [op("add", &["a", "b"], &["c"], json!({})), op("add", &["x", "c"], &["y"], json!({}))];
    for ranks in [1, 3] {
        let expected: Vec<f64> = (0..ROWS * n).map(|i| x[i] + f64::from(ranks) * a[i] + b[i]).collect();
        check(&graph(&tensors, &ops, &["y"]), &[ranks], "y", &expected, 1e-6);
    }
}

/// A bias and a norm's weight are loaded in the part that the operator needs, however they are sharded.
#[test]
fn vectors_need_not_be_sharded_as_they_are_needed() {
    let (k, n) = (21, 10);
    let (x, w, b, norm) = (exact(22, ROWS * k), exact(23, n * k), exact(24, n), exact(25, k));
    let normed = reference::rmsnorm(&x, &norm, 1e-3);
    let expected = reference::linear(&normed, &w, k, Some(&b));
    let unit = json!({"dim": 0, "kind": "even", "unit": 3});
    for (of_weight, of_bias, of_norm) in [
        (even(0), json!("replicated"), json!("replicated")),
        (even(0), unit.clone(), even(0)),
        (json!("replicated"), even(0), unit),
        (even(1), even(0), json!("replicated")),
    ] {
        let tensors = [
            tensor("x", "input", "f32", &[ROWS, k], &x, json!("replicated")),
            tensor("norm", "weight", "f32", &[k], &norm, of_norm),
            tensor("w", "weight", "f32", &[n, k], &w, of_weight),
            tensor("b", "weight", "bf16", &[n], &b, of_bias),
        ];
        let ops = [
            op("rmsnorm", &["x", "norm"], &["h"], json!({"eps": 1e-3})),
            op("linear", &["h", "w", "b"], &["y"], json!({})),
        ];
        check(&graph(&tensors, &ops, &["y"]), &[1, 2, 3], "y", &expected, 1e-5);
    }
}

/// A constant has its own values on each rank, so it must be sharded as it is needed; the error says how.
#[test]
fn a_constant_bias_of_another_shard_is_refused() {
    let tensors = [
        tensor("x", "input", "f32", &[ROWS, 4], &exact(26, ROWS * 4), json!("replicated")),
        tensor("w", "weight", "f32", &[6, 4], &exact(27, 24), even(0)),
        tensor("b", "constant", "f32", &[6], &exact(28, 6), json!("replicated")),
    ];
    let model = graph(&tensors, &[op("linear", &["x", "w", "b"], &["y"], json!({}))], &["y"]);
    let run = Job::new(2).arg(model.path()).run().expect(2).expect_nothing_left();
    let wanted = r#"change that to {"dim":0,"kind":"even","unit":1}"#;
    assert!(run.stderr.contains("`b`") && run.stderr.contains(wanted), "{}", run.stderr);
}

/// A product joins a sum of two summands. With more, the two operators stay apart.
#[test]
fn a_product_is_one_of_several_summands() {
    let (k, n) = (21, 10);
    let (x, w, b) = (exact(29, ROWS * k), exact(30, n * k), exact(31, n));
    let others = [32, 33, 34].map(|seed| exact(seed, ROWS * n));
    let mut tensors = vec![
        tensor("x", "input", "f32", &[ROWS, k], &x, json!("replicated")),
        tensor("w", "weight", "f32", &[n, k], &w, even(0)),
        tensor("b", "weight", "f32", &[n], &b, even(0)),
    ];
    let names = ["p", "q", "r"];
    for (name, values) in names.iter().zip(&others) {
        tensors.push(tensor(name, "input", "f32", &[ROWS, n], values, json!("replicated")));
    }
    for product in [&["x", "w"][..], &["x", "w", "b"]] {
        for count in 1..=3 {
            let summands: Vec<&str> = std::iter::once("h").chain(names[..count].iter().copied()).collect();
            let ops = [op("linear", product, &["h"], json!({})), op("add", &summands, &["y"], json!({}))];
            let bias = (product.len() == 3).then_some(&b[..]);
            let mut expected = reference::linear(&x, &w, k, bias);
            for values in &others[..count] {
                expected.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
            }
            check(&graph(&tensors, &ops, &["y"]), &[1, 2], "y", &expected, 1e-5);
        }
    }
}

/// An attribute of an operator that has no use for it would count for the operator that it is fused with.
#[test]
fn attributes_without_a_use_are_refused() {
    let tensors = [
        tensor("x", "input", "f32", &[ROWS, 4], &exact(35, ROWS * 4), json!("replicated")),
        tensor("norm", "weight", "f32", &[4], &[1.0; 4], json!("replicated")),
        tensor("w", "weight", "f32", &[6, 4], &exact(36, 24), json!("replicated")),
    ];
    for attrs in [json!({"eps": 0.5}), json!({"activation": "gelu"})] {
        let ops = [
            op("rmsnorm", &["x", "norm"], &["h"], json!({})),
            op("linear", &["h", "w"], &["g"], attrs),
            op("silu_mul", &["g"], &["y"], json!({})),
        ];
        let model = graph(&tensors, &ops, &["y"]);
        let run = Job::new(1).arg(model.path()).run().expect(2).expect_nothing_left();
        assert!(run.stderr.contains("`linear` takes `output_dtype`"), "{}", run.stderr);
    }
}

#[test]
fn unknown_attributes_end_with_the_list() {
    let x = exact(11, ROWS * 4);
    let tensors = [
        tensor("x", "input", "f32", &[ROWS, 4], &x, json!("replicated")),
        tensor("w", "weight", "f32", &[4], &[1.0; 4], json!("replicated")),
    ];
    let ops = [op("rmsnorm", &["x", "w"], &["y"], json!({"epsilon": 0.5}))];
    let model = graph(&tensors, &ops, &["y"]);
    let run = Job::new(1).arg(model.path()).run().expect(2).expect_nothing_left();
    assert!(
        run.stderr.contains("unknown attribute `epsilon`; `rmsnorm` takes `eps` (number), `norm_dtype`"),
        "{}",
        run.stderr
    );
}

/// GELU gates, fused like SiLU gates.
#[test]
fn a_gated_mlp_with_gelu() {
    let (hidden, inner) = (24, 15);
    let (x, gate_up) = (exact(12, ROWS * hidden), exact(13, 2 * inner * hidden));
    let down = exact(14, hidden * inner);
    let half = json!({"len": inner, "split": {"kind": "even"}});
    let tensors = [
        tensor("x", "input", "f32", &[ROWS, hidden], &x, json!("replicated")),
        tensor(
            "gate_up",
            "weight",
            "f32",
            &[2 * inner, hidden],
            &gate_up,
            json!({"dim": 0, "parts": [half, half]}),
        ),
        tensor("down", "weight", "f32", &[hidden, inner], &down, even(1)),
    ];
    let ops = [
        op("linear", &["x", "gate_up"], &["g"], json!({})),
        op("silu_mul", &["g"], &["s"], json!({"activation": "gelu-tanh"})),
        op("linear", &["s", "down"], &["y"], json!({})),
    ];
    let g = reference::linear(&x, &gate_up, hidden, None);
    let gelu =
        |v: f64| 0.5 * v * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (v + 0.044715 * v.powi(3))).tanh());
    let s: Vec<f64> =
        g.chunks(2 * inner).flat_map(|row| (0..inner).map(|i| gelu(row[i]) * row[inner + i])).collect();
    let expected = reference::linear(&s, &down, inner, None);
    check(&graph(&tensors, &ops, &["y"]), &[1, 2], "y", &expected, 1e-4);
}
