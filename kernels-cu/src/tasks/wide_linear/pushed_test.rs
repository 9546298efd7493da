//! Wide products that push their sums to every rank.

use super::WideLinear;
use super::test::{attrs, count, mlp, partition_of};
use crate::registry::registry;
use crate::tasks::linear_knobs::{LEAST_ROWS, PUSHED_ROWS, SHARED_TALL_ROWS};
use crate::testing::pushed::assert_pushed;
use crate::testing::{TestBatch, TestOp, TestTensor, random_values, rounded};
use serde_json::json;
use taskgraph::task_type::TaskType;
use taskgraph::verify::verify;
use taskgraph::{Allreduce, BuildOptions, DType, Placement, Target, TensorId, build_all};

/// Up to a number of rows, a one-shot allreduce gets its words from wide products. With more rows, it is replaced.
#[test]
fn products_of_few_rows_push_their_sums() {
    // The last one has no tiles with all rows in narrow column tiles.
    for (rows, most, tall, pushed) in [
        (12, 16, 64, true),
        (16, 16, 64, true),
        (17, 16, 64, false),
        (40, 64, 64, true),
        (65, 128, 64, false),
        (40, 64, 0, true),
    ] {
        for world in [2, 4] {
            for placement in [Placement::Static, Placement::Dynamic] {
                let mut target = Target { wide: true, ..Target::cpu(7) };
                target.tuning.set(PUSHED_ROWS.name, most);
                target.tuning.set(SHARED_TALL_ROWS.name, tall);
                let mut options = BuildOptions::new(world, target);
                (options.allreduce, options.placement) = (Allreduce::OneShot, placement);
                let what = format!("{world} ranks, {rows} rows, {placement:?}");
                let graphs = build_all(&mlp(rows, 520), &registry(), &options).unwrap();
                if let Err(violations) = verify(&graphs) {
                    panic!("{what}: {}", violations[0]);
                }
                for graph in &graphs {
                    let flagged = graph.tensors.iter().filter(|t| t.dtype == DType::F32Flagged).count();
                    assert_eq!(flagged, usize::from(pushed), "{what}");
                    // Gate and up, and the product whose sums are pushed.
                    let products = graph.tasks.iter().filter(|t| graph.type_name(t) == "wide_linear");
                    let branch = products.filter(|t| graph.op_name(t) == "branch").count();
                    assert!(branch > 0 && count(graph, "linear") == 0, "{what}");
                }
            }
        }
    }
}

/// A task that sums pushed rows norms them, too.
#[test]
fn pushed_rows_are_summed_and_normed_by_one_task() {
    for (world, joined) in [(2, 1), (4, 1), (4, 0)] {
        let mut graph = mlp(12, 520);
        let sum = graph.tensors.iter().position(|tensor| tensor.name == "out").unwrap();
        let norm = graph.weight("norm2", DType::Bf16, &[128], None);
        let normed = graph.op("normed2", "rmsnorm", &[TensorId(sum as u32), norm], attrs(json!({})));
        let weight = graph.weight("last_weight", DType::Bf16, &[128, 128], None);
        let last = graph.op("last", "linear", &[normed, weight], attrs(json!({})));
        graph.tensor_mut(last).output = true;
        let mut target = Target { wide: true, ..Target::cpu(7) };
        target.tuning.set("allreduce.joined_sums", joined);
        let options = BuildOptions { allreduce: Allreduce::Auto, ..BuildOptions::new(world, target) };
        let graphs = build_all(&graph, &registry(), &options).unwrap();
        if let Err(violations) = verify(&graphs) {
            panic!("{world} ranks: {}", violations[0]);
        }
        for graph in &graphs {
            let apart = graph.tasks.iter().any(|task| graph.op_name(task) == "last.rows");
            assert_eq!(apart, joined == 0, "{world} ranks, {joined}");
            assert!(graph.tensors.iter().any(|t| t.dtype == DType::F32Flagged));
        }
    }
}

/// If tiles of 16 columns leave no worker more than one, a row-parallel product of few rows keeps them: wide tiles would be too few.
#[test]
fn products_with_few_columns_are_not_wide_on_several_ranks() {
    // The product has 128 columns.
    for (workers, rows, wide) in [(7, 16, true), (8, 16, false), (8, LEAST_ROWS.default as u32, true)] {
        let mut options = BuildOptions::new(2, Target { wide: true, ..Target::cpu(workers) });
        options.allreduce = Allreduce::OneShot;
        let graphs = build_all(&mlp(rows, 520), &registry(), &options).unwrap();
        for graph in &graphs {
            let branch = graph.tasks.iter().filter(|task| graph.op_name(task) == "branch");
            let is_wide = branch.map(|task| graph.type_name(task) == "wide_linear").collect::<Vec<_>>();
            assert!(!is_wide.is_empty());
            assert!(is_wide.iter().all(|&is| is == wide), "{workers} workers, {rows} rows: {is_wide:?}");
        }
    }
}

/// Every rank gets each sum of the rows in use with the task's tag, and nothing else. Where words are refreshed, all rows count.
#[test]
fn pushed_words_reach_every_rank_with_their_tag() {
    let (rows, k, n) = (13u32, 200u32, 80u32);
    let x = rounded(DType::Bf16, &random_values(1, (rows * k) as usize));
    let weights = rounded(DType::Bf16, &random_values(2, (n * k) as usize));
    let mut inputs = vec![
        TestTensor::new(DType::Bf16, &[rows, k], &x),
        TestTensor::weight(DType::Bf16, &[n, k], &weights),
    ];
    let plain = TestOp::new("linear", json!({"output_dtype": "f32"}), rows);
    let wanted = plain.run(&mut inputs, &mut TestBatch::rows(rows)).unwrap()[0].words();
    let pack = TestOp::new("wide_rows", json!({"act_dtype": "bf16"}), rows);
    inputs[0] = pack.run(&mut inputs[..1], &mut TestBatch::rows(rows)).unwrap().remove(0);

    let attrs = attrs(json!({}));
    let out = TestTensor::poisoned(DType::F32, &[rows, n]).ty();
    let partition = partition_of(&attrs, &inputs, out, [rows, n], 132);
    let push = WideLinear.push_param().unwrap();
    assert_pushed("wide_linear", partition, push, &mut inputs, [rows, n], &wanted);
}
