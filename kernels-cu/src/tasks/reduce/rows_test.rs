//! Tasks that sum rows and norm them. The summands are copied, or pushed as flagged words.

use super::gpu;
use crate::abi::{
    MPK_REDUCE_FLAGGED, MPK_REDUCE_RESIDUAL, MPK_REDUCE_ROWS, mpk_reduce_params, mpk_reduce_rows_params,
    params_words,
};
use crate::isa::Isa;
use crate::registry::GpuSite;
use crate::tasks::wide_rows::summed_test::{NARROW, WIDE, scratch_bytes};
use crate::testing::{Call, TestBatch, TestRank, TestTask, TestTensor, random_values, rounded, run_task};
use taskgraph::task_type::Access;
use taskgraph::{Capacity, DType, Region};

/// The iteration, which is also the tag of the only flagged tensor's words.
const EPOCH: u32 = 9;

#[test]
fn rows_are_summed_and_normed() {
    for (world, columns, summands, act, residual, rows) in [
        (2u32, 256u32, DType::F32Flagged, DType::Bf16, true, NARROW),
        (3, 70, DType::F32Flagged, DType::F16, false, WIDE),
        (4, 130, DType::F32Flagged, DType::Bf16, true, WIDE),
        (2, 256, DType::Bf16, DType::Bf16, true, WIDE),
        (2, 192, DType::F32, DType::Bf16, true, NARROW),
        (3, 70, DType::F32, DType::F16, true, WIDE),
        (4, 37, DType::F16, DType::F16, false, WIDE),
        (4, 70, DType::F32, DType::Bf16, true, NARROW),
        (8, 64, DType::F32, DType::Bf16, false, WIDE),
    ] {
        let what = format!(
            "{world} ranks, {columns} columns, {summands}, {act}, residual {residual}, narrow {}",
            rows.narrow
        );
        let (rank, size) = (world - 1, (rows.all * columns) as usize);
        let of_ranks: Vec<Vec<f32>> =
            (0..world).map(|rank| rounded(summands, &random_values(u64::from(rank) + 1, size))).collect();
        let rest = random_values(77, size);
        let weight = rounded(act, &random_values(78, columns as usize));
        let flagged = summands == DType::F32Flagged;
        // The rank's own slot is not read. Its own words are.
        let received = |other: u32| match other == rank && !flagged {
            true => vec![f32::NAN; size],
            false => of_ranks[other as usize].clone(),
        };
        let received: Vec<f32> = (0..world).flat_map(received).collect();
        let mut own = TestTensor::new(summands, &[rows.all, columns], &of_ranks[rank as usize]);
        let mut receive = TestTensor::new(summands, &[world, rows.all, columns], &received);
        if flagged {
            let words = receive.data.bytes_mut().chunks_exact_mut(8);
            words.for_each(|word| word[4..].copy_from_slice(&EPOCH.to_ne_bytes()));
        }
        let mut rest_of_rows = TestTensor::new(DType::F32, &[rows.all, columns], &rest);
        let mut norm = TestTensor::weight(act, &[columns], &weight);
        let (dims, in_tile) = rows.normed(columns);
        for isa in Isa::ALL {
            isa.with(|| {
                let mut sum = TestTensor::poisoned(DType::F32, &[rows.all, columns]);
                let mut wide = TestTensor::poisoned(act, &dims);
                let tile = rows.within(&[rows.all, columns], 0);
                let slots = rows.within(&[world, rows.all, columns], 1);
                let mut inputs = Vec::new();
                inputs.extend((!flagged).then(|| own.view(&tile)));
                inputs.push(receive.view(&slots));
                inputs.extend(residual.then(|| rest_of_rows.view(&tile)));
                inputs.push(norm.view(&Access::new(0, Region::whole(&[columns]))));
                let flags = MPK_REDUCE_ROWS
                    | if residual { MPK_REDUCE_RESIDUAL } else { 0 }
                    | if flagged { MPK_REDUCE_FLAGGED } else { 0 };
                let of_sum = mpk_reduce_params { world, rank, rows_kind: 0, flags };
                let params =
                    params_words(&mpk_reduce_rows_params { sum: of_sum, rows: rows.params(columns) });
                let task = TestTask {
                    params,
                    args: rows.args(),
                    inputs,
                    outputs: vec![sum.view(&tile), wide.view(&in_tile)],
                    scratch_bytes: scratch_bytes(columns),
                };
                let site = GpuSite {
                    params: &task.params,
                    inputs: &task.inputs,
                    outputs: &task.outputs,
                    capacity: Capacity { rows: rows.all, samples: 1, active: 1 },
                };
                let code = gpu(&site).unwrap();
                let name = if flagged { "ReducePushedRows" } else { "ReduceRows" };
                assert!(code.starts_with(&format!("mpk::gpu::{name}<{world}, {residual}, ")), "{what}");
                assert!(code.ends_with(&format!(", 1, {}>", dims[3])), "{what}: {code}");
                let batch = &mut TestBatch { epoch: EPOCH, ..TestBatch::rows(rows.used) };
                assert_eq!(run_task("reduce", &task, batch, &TestRank::default(), Call::Run), 0, "{what}");
                let sum_of = |i: usize| {
                    let sum = of_ranks[1..].iter().fold(of_ranks[0][i], |sum, part| sum + part[i]);
                    if residual { sum + rest[i] } else { sum }
                };
                rows.check(&what, (&sum.values(), &wide.values()), sum_of, (&weight, act));
            });
        }
    }
}
