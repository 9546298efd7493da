//! Wide products that push their sums to every rank.

use super::WideLinear;
use super::test::{attrs, count, mlp, partition_of};
use crate::abi;
use crate::registry::registry;
use crate::tasks::linear_knobs::{LEAST_PARTIAL_ROWS, PUSHED_ROWS, SHARED_TALL_ROWS};
use crate::testing::{
    AlignedBytes, Call, TestBatch, TestOp, TestRank, TestTask, TestTensor, random_values, rounded, run_task,
};
use serde_json::json;
use taskgraph::task_type::TaskType;
use taskgraph::verify::verify;
use taskgraph::{Allreduce, BuildOptions, DType, Placement, Target, build_all};

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
                target.tuning.set(LEAST_PARTIAL_ROWS.name, 9);
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
    let mut partition =
        partition_of(&attrs, &inputs, TestTensor::poisoned(DType::F32, &[rows, n]).ty(), [rows, n], 132);
    partition.params[WideLinear.push_param().unwrap()] = 1;
    let (offset, heap_bytes) = (640u64, 640 + u64::from(rows * n) * 8);
    let mut heaps: Vec<AlignedBytes> = (0..3).map(|_| AlignedBytes::new(heap_bytes as usize)).collect();
    let sym: Vec<u64> = heaps.iter_mut().map(|h| h.bytes_mut().as_mut_ptr() as u64).collect();
    let rank = TestRank { rank: 1, sym: sym.clone() };
    for (epoch, used) in [(7, rows), (8, 1), (abi::MPK_FLAG_REFRESH_EPOCHS, 1)] {
        heaps.iter_mut().for_each(|heap| heap.bytes_mut().fill(0xff));
        let mut batch = TestBatch { epoch, flags: [161, 5], ..TestBatch::rows(used) };
        for spec in &partition.tasks {
            let ([r0, c0, ..], [r1, c1, ..]) = (spec.writes[0].region.lo, spec.writes[0].region.hi);
            let task = TestTask {
                params: partition.params.clone(),
                args: spec.args,
                inputs: spec.reads.iter().map(|r| inputs[usize::from(r.operand)].view(r)).collect(),
                outputs: vec![abi::mpk_operand {
                    addr: sym[1] + offset + u64::from(r0 * n + c0) * 8,
                    dims: [r1 - r0, c1 - c0, 1, 1],
                    strides: [n, 1, 0, 0],
                    dtype: abi::MPK_F32_FLAGGED as u8,
                    ndim: 2,
                    layout: 0,
                    symmetric: 1,
                    pe: -2,
                }],
                scratch_bytes: partition.scratch_bytes,
            };
            assert_eq!(run_task("wide_linear", &task, &mut batch, &rank, Call::Run), 0);
        }
        let pushed = if epoch == abi::MPK_FLAG_REFRESH_EPOCHS { rows } else { used };
        for heap in &heaps {
            for (i, word) in heap.bytes()[offset as usize..].chunks_exact(8).enumerate() {
                let (value, tag) = (&word[..4], &word[4..]);
                let live = i < (pushed * n) as usize;
                assert_eq!(tag, if live { epoch * 161 + 5 } else { u32::MAX }.to_ne_bytes());
                assert!(!live || value == wanted[i].to_ne_bytes(), "{i}");
            }
        }
    }
}
