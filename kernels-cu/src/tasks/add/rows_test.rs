//! Tasks that add whole rows and norm them.

use super::gpu;
use crate::abi::{mpk_add_params, mpk_add_rows_params, params_words};
use crate::isa::Isa;
use crate::registry::GpuSite;
use crate::tasks::wide_rows::summed_test::{NARROW, WIDE, scratch_bytes};
use crate::testing::{Call, TestBatch, TestRank, TestTask, TestTensor, random_values, rounded, run_task};
use taskgraph::task_type::Access;
use taskgraph::{Capacity, DType, Region};

#[test]
fn rows_are_added_and_normed() {
    for (count, columns, act, rows) in
        [(2usize, 256u32, DType::Bf16, WIDE), (3, 70, DType::F16, NARROW), (4, 37, DType::Bf16, WIDE)]
    {
        let (what, k) = (format!("{count} summands, {columns} columns, {act}"), columns as usize);
        let size = rows.all as usize * k;
        let summands: Vec<Vec<f32>> = (0..count as u64).map(|i| random_values(i + 1, size)).collect();
        let weight = rounded(act, &random_values(78, k));
        let matrix = |values: &Vec<f32>| TestTensor::new(DType::F32, &[rows.all, columns], values);
        let mut tensors: Vec<TestTensor> = summands.iter().map(matrix).collect();
        let mut norm = TestTensor::weight(act, &[columns], &weight);
        let (dims, in_tile) = rows.normed(columns);
        for isa in Isa::ALL {
            isa.with(|| {
                let mut sum = TestTensor::poisoned(DType::F32, &[rows.all, columns]);
                let mut wide = TestTensor::poisoned(act, &dims);
                let tile = rows.within(&[rows.all, columns], 0);
                let mut inputs: Vec<_> = tensors.iter_mut().map(|tensor| tensor.view(&tile)).collect();
                inputs.push(norm.view(&Access::new(0, Region::whole(&[columns]))));
                let of_sum = mpk_add_params { rows_kind: 0, first_row: 0 };
                let task = TestTask {
                    params: params_words(&mpk_add_rows_params { sum: of_sum, rows: rows.params(columns) }),
                    args: rows.args(),
                    inputs,
                    outputs: vec![sum.view(&tile), wide.view(&in_tile)],
                    scratch_bytes: scratch_bytes(columns),
                };
                let capacity = Capacity { rows: rows.all, samples: 1, active: 1 };
                let (inputs, outputs) = (&task.inputs, &task.outputs);
                let site = GpuSite { params: &task.params, inputs, outputs, capacity };
                assert!(gpu(&site).unwrap().starts_with(&format!("mpk::gpu::AddRows<{count}, ")), "{what}");
                let batch = &mut TestBatch::rows(rows.used);
                assert_eq!(run_task("add", &task, batch, &TestRank::default(), Call::Run), 0, "{what}");
                let sum_of = |i: usize| summands[1..].iter().fold(summands[0][i], |sum, part| sum + part[i]);
                rows.check(&what, (&sum.values(), &wide.values()), sum_of, (&weight, act));
            });
        }
    }
}
