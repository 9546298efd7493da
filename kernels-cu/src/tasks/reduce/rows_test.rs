//! Tasks that sum rows and norm them.

use super::gpu;
use crate::abi::{MPK_REDUCE_RESIDUAL, MPK_REDUCE_ROWS, mpk_reduce_params, mpk_reduce_rows_params};
use crate::abi::{mpk_wide_rows_params, params_words};
use crate::isa::Isa;
use crate::layout::wide_index;
use crate::registry::GpuSite;
use crate::tasks::wide::wide_dims;
use crate::testing::{Call, TestBatch, TestRank, TestTask, TestTensor, random_values, rounded, run_task};
use taskgraph::task_type::Access;
use taskgraph::{Capacity, DType, Region};

const EPS: f32 = 1e-3;
/// Rows of the tensor, of which the task has some, and of which some of those are in use.
const ROWS: u32 = 200;
const FIRST: u32 = 128;
const HEIGHT: u32 = 32;
const USED: u32 = 141;

/// The sum is the one in rank order, bit for bit. Its norm is the one in double precision, rounded.
#[test]
fn rows_are_summed_and_normed() {
    for (world, columns, summands, act, residual) in [
        (2u32, 256u32, DType::Bf16, DType::Bf16, true),
        (3, 70, DType::F32, DType::F16, true),
        (4, 37, DType::F16, DType::F16, false),
        (8, 64, DType::F32, DType::Bf16, false),
    ] {
        let what = format!("{world} ranks, {columns} columns, {summands}, {act}, residual {residual}");
        let (rank, size) = (world - 1, (ROWS * columns) as usize);
        let of_ranks: Vec<Vec<f32>> =
            (0..world).map(|rank| rounded(summands, &random_values(u64::from(rank) + 1, size))).collect();
        let rest = random_values(77, size);
        let weight = rounded(act, &random_values(78, columns as usize));
        // The rank's own slot is not read.
        let received =
            |other: u32| if other == rank { vec![f32::NAN; size] } else { of_ranks[other as usize].clone() };
        let received: Vec<f32> = (0..world).flat_map(received).collect();
        let mut own = TestTensor::new(summands, &[ROWS, columns], &of_ranks[rank as usize]);
        let mut receive = TestTensor::new(summands, &[world, ROWS, columns], &received);
        let mut rest_of_rows = TestTensor::new(DType::F32, &[ROWS, columns], &rest);
        let mut norm = TestTensor::weight(act, &[columns], &weight);
        let dims: Vec<u32> = wide_dims(ROWS.into(), columns.into()).iter().map(|&d| d as u32).collect();
        for isa in Isa::ALL {
            isa.with(|| {
                let mut sum = TestTensor::poisoned(DType::F32, &[ROWS, columns]);
                let mut wide = TestTensor::poisoned(act, &dims);
                let tile = Access::new(0, Region::whole(&[ROWS, columns]).with(0, FIRST, FIRST + HEIGHT));
                let slots = Region::whole(&[world, ROWS, columns]).with(1, FIRST, FIRST + HEIGHT);
                let in_tile = Region::whole(&dims).with(0, FIRST / 128, FIRST / 128 + 1).with(2, 0, HEIGHT);
                let mut inputs = vec![own.view(&tile), receive.view(&Access::new(0, slots))];
                inputs.extend(residual.then(|| rest_of_rows.view(&tile)));
                inputs.push(norm.view(&Access::new(0, Region::whole(&[columns]))));
                let flags = MPK_REDUCE_ROWS | if residual { MPK_REDUCE_RESIDUAL } else { 0 };
                let of_sum = mpk_reduce_params { world, rank, rows_kind: 0, flags };
                let rows = mpk_wide_rows_params {
                    source: 1,
                    gather: 0,
                    rows_kind: 0,
                    rows: ROWS,
                    columns,
                    eps: EPS,
                };
                let params = params_words(&mpk_reduce_rows_params { sum: of_sum, rows });
                let task = TestTask {
                    params,
                    args: [FIRST as i32, FIRST as i32, 0, HEIGHT as i32, 0, 0, 0, 0],
                    inputs,
                    outputs: vec![sum.view(&tile), wide.view(&Access::new(0, in_tile))],
                    scratch_bytes: u64::from(4 * columns + 2 * columns.next_multiple_of(64)),
                };
                let site = GpuSite {
                    params: &task.params,
                    inputs: &task.inputs,
                    outputs: &task.outputs,
                    capacity: Capacity { rows: ROWS, samples: 1, active: 1 },
                };
                assert!(
                    gpu(&site).unwrap().starts_with(&format!("mpk::gpu::ReduceRows<{world}, {residual}, "))
                );
                let batch = &mut TestBatch::rows(USED);
                assert_eq!(run_task("reduce", &task, batch, &TestRank::default(), Call::Run), 0, "{what}");
                let (sums, normed, k) = (sum.values(), wide.values(), columns as usize);
                for row in 0..ROWS as usize {
                    let is_live = (FIRST as usize..USED as usize).contains(&row);
                    let at = row * k..(row + 1) * k;
                    let place = |column: usize| normed[wide_index(row, column, k)];
                    if !is_live {
                        assert!(sums[at].iter().all(|v| v.is_nan()), "{what}: summed row {row}");
                        assert!((0..k).all(|c| place(c).is_nan()), "{what}: normed row {row}");
                        continue;
                    }
                    let sum_of = |i: usize| {
                        let sum = of_ranks[1..].iter().fold(of_ranks[0][i], |sum, part| sum + part[i]);
                        if residual { sum + rest[i] } else { sum }
                    };
                    let expected: Vec<f32> = at.clone().map(sum_of).collect();
                    assert_eq!(sums[at], expected, "{what}: row {row}");
                    let exact: Vec<f64> = expected.iter().map(|&v| f64::from(v)).collect();
                    let mean = exact.iter().map(|v| v * v).sum::<f64>() / k as f64;
                    let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
                    for column in 0..k {
                        let (wanted, found) =
                            (exact[column] * scale * f64::from(weight[column]), place(column));
                        let unit = if act == DType::Bf16 { 1.0 / 256.0 } else { 1.0 / 2048.0 };
                        let difference = (f64::from(found) - wanted).abs();
                        assert!(
                            difference <= unit * wanted.abs() + 1e-6,
                            "{what}: row {row}, column {column}: {found}, {wanted}"
                        );
                    }
                    assert!(
                        (k..k.next_multiple_of(64)).all(|c| place(c) == 0.0),
                        "{what}: padding of row {row}"
                    );
                }
            });
        }
    }
}
