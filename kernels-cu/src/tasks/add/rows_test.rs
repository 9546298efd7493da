//! Tasks that add whole rows and norm them.

use super::gpu;
use crate::abi::{mpk_add_params, mpk_add_rows_params, mpk_wide_rows_params, params_words};
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

/// The sum is the one in the order of an `add`, bit for bit. Its norm is the one in double precision, rounded.
#[test]
fn rows_are_added_and_normed() {
    for (count, columns, act) in [(2usize, 256u32, DType::Bf16), (3, 70, DType::F16), (4, 37, DType::Bf16)] {
        let (what, k) = (format!("{count} summands, {columns} columns, {act}"), columns as usize);
        let size = ROWS as usize * k;
        let summands: Vec<Vec<f32>> = (0..count as u64).map(|i| random_values(i + 1, size)).collect();
        let weight = rounded(act, &random_values(78, k));
        let matrix = |values: &Vec<f32>| TestTensor::new(DType::F32, &[ROWS, columns], values);
        let mut tensors: Vec<TestTensor> = summands.iter().map(matrix).collect();
        let mut norm = TestTensor::weight(act, &[columns], &weight);
        let dims: Vec<u32> = wide_dims(ROWS.into(), columns.into()).iter().map(|&d| d as u32).collect();
        for isa in Isa::ALL {
            isa.with(|| {
                let mut sum = TestTensor::poisoned(DType::F32, &[ROWS, columns]);
                let mut wide = TestTensor::poisoned(act, &dims);
                let rows = Access::new(0, Region::whole(&[ROWS, columns]).with(0, FIRST, FIRST + HEIGHT));
                let in_tile = Region::whole(&dims).with(0, FIRST / 128, FIRST / 128 + 1).with(2, 0, HEIGHT);
                let mut inputs: Vec<_> = tensors.iter_mut().map(|tensor| tensor.view(&rows)).collect();
                inputs.push(norm.view(&Access::new(0, Region::whole(&[columns]))));
                let sum_params = mpk_add_params { rows_kind: 0, first_row: 0 };
                let of_rows = mpk_wide_rows_params {
                    source: 1,
                    gather: 0,
                    rows_kind: 0,
                    rows: ROWS,
                    columns,
                    eps: EPS,
                };
                let task = TestTask {
                    params: params_words(&mpk_add_rows_params { sum: sum_params, rows: of_rows }),
                    args: [FIRST as i32, FIRST as i32, 0, HEIGHT as i32, 0, 0, 0, 0],
                    inputs,
                    outputs: vec![sum.view(&rows), wide.view(&Access::new(0, in_tile))],
                    scratch_bytes: u64::from(4 * columns + 2 * columns.next_multiple_of(64)),
                };
                let capacity = Capacity { rows: ROWS, samples: 1, active: 1 };
                let (inputs, outputs) = (&task.inputs, &task.outputs);
                let site = GpuSite { params: &task.params, inputs, outputs, capacity };
                assert!(gpu(&site).unwrap().starts_with(&format!("mpk::gpu::AddRows<{count}, ")), "{what}");
                let batch = &mut TestBatch::rows(USED);
                assert_eq!(run_task("add", &task, batch, &TestRank::default(), Call::Run), 0, "{what}");
                let (sums, normed) = (sum.values(), wide.values());
                for row in 0..ROWS as usize {
                    let at = row * k..(row + 1) * k;
                    let place = |column: usize| normed[wide_index(row, column, k)];
                    if !(FIRST as usize..USED as usize).contains(&row) {
                        assert!(sums[at].iter().all(|v| v.is_nan()), "{what}: summed row {row}");
                        assert!((0..k).all(|c| place(c).is_nan()), "{what}: normed row {row}");
                        continue;
                    }
                    let sum_of = |i| summands[1..].iter().fold(summands[0][i], |sum, part| sum + part[i]);
                    let expected: Vec<f32> = at.clone().map(sum_of).collect();
                    assert_eq!(sums[at], expected, "{what}: row {row}");
                    let exact: Vec<f64> = expected.iter().map(|&v| f64::from(v)).collect();
                    let mean = exact.iter().map(|v| v * v).sum::<f64>() / k as f64;
                    let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
                    let unit = if act == DType::Bf16 { 1.0 / 256.0 } else { 1.0 / 2048.0 };
                    for column in 0..k {
                        let (wanted, found) =
                            (exact[column] * scale * f64::from(weight[column]), place(column));
                        let difference = (f64::from(found) - wanted).abs();
                        let what = format!("{what}: row {row}, column {column}: {found}, {wanted}");
                        assert!(difference <= unit * wanted.abs() + 1e-6, "{what}");
                    }
                    let padding = k..k.next_multiple_of(64);
                    assert!(padding.clone().all(|c| place(c) == 0.0), "{what}: padding of row {row}");
                }
            });
        }
    }
}
