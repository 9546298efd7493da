use crate::isa::Isa;
use crate::testing::{TestBatch, TestOp, TestTensor, assert_close, random_values};
use serde_json::json;
use taskgraph::DType;

/// Two slots of two rows; splits without keys contain whatever was in memory.
#[test]
fn weighs_the_splits_that_have_keys() {
    let (rows, heads, splits, dim) = (5usize, 3usize, 4usize, 22usize);
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        let mut partial = random_values(3, rows * heads * splits * dim);
        let mut softmax = Vec::new();
        let mut expected = Vec::new();
        for row in 0..rows {
            for head in 0..heads {
                let first = (row * heads + head) * splits;
                let empty = |i: usize| (row + head + i).is_multiple_of(3) && i != 1;
                let numbers = random_values(first as u64, 2 * splits);
                let m: Vec<f64> = (0..splits).map(|i| f64::from(numbers[2 * i] * 20.0)).collect();
                let l: Vec<f64> = (0..splits).map(|i| f64::from(numbers[2 * i + 1].abs() + 0.5)).collect();
                for i in 0..splits {
                    if empty(i) {
                        softmax.extend([f32::NEG_INFINITY, 0.0]);
                        partial[(first + i) * dim..][..dim].fill(f32::NAN);
                    } else {
                        softmax.extend([m[i] as f32, l[i] as f32]);
                    }
                }
                let held: Vec<usize> = (0..splits).filter(|i| !empty(*i)).collect();
                let highest = held.iter().map(|i| m[*i]).fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = held.iter().map(|i| (m[*i] - highest).exp() * l[*i]).sum();
                for c in 0..dim {
                    let total: f64 = held
                        .iter()
                        .map(|i| (m[*i] - highest).exp() * f64::from(partial[(first + i) * dim + c]))
                        .sum();
                    expected.push(total / sum);
                }
            }
        }
        let mut bits: Option<Vec<u8>> = None;
        for isa in Isa::ALL {
            let got = isa.with(|| {
                let dims = [rows as u32, heads as u32, splits as u32];
                let mut inputs = [
                    TestTensor::new(DType::F32, &[dims[0], dims[1], dims[2], dim as u32], &partial),
                    TestTensor::new(DType::F32, &[dims[0], dims[1], dims[2], 2], &softmax),
                ];
                let mut batch = TestBatch::rows(4);
                batch.num_active = 2;
                batch.active_first_row = vec![2, 0];
                batch.active_num_rows = vec![2, 2];
                let attrs =
                    json!({"heads": heads, "kv_heads": heads, "head_dim": dim, "dtype": dtype.name()});
                TestOp::new("attention_merge", attrs, rows as u32).run(&mut inputs, &mut batch).unwrap()
            });
            let Some(got) = got.map(|mut outputs| outputs.remove(0)) else { continue };
            let used = 4 * heads * dim;
            let error = match dtype {
                DType::Bf16 => 1.0 / 256.0,
                DType::F16 => 1.0 / 2048.0,
                _ => 2e-6,
            };
            assert_close(&got.values()[..used], &expected[..used], error * 1.01, 1e-1, "merge");
            assert!(got.values()[used..].iter().all(|v| v.is_nan()), "unused rows were written");
            let same = bits.get_or_insert_with(|| got.data.bytes().to_vec());
            assert!(same[..] == *got.data.bytes(), "{isa:?} gives other bits");
        }
    }
}
