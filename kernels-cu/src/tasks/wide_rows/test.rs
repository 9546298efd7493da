use crate::layout::wide_index;
use crate::testing::{TestBatch, TestOp, TestTensor, random_values, rounded};
use serde_json::json;
use taskgraph::DType;

/// With `gather_samples` the rows are the sampled ones, for every position of a task's block.
#[test]
fn sampled_rows_are_gathered() {
    let (rows, k) = (40u32, 64u32);
    let x = rounded(DType::Bf16, &random_values(1, (rows * k) as usize));
    for workers in [1, 16, 132] {
        let attrs = json!({"act_dtype": "bf16", "gather_samples": true});
        let op = TestOp::new("wide_rows", attrs, rows).workers(workers);
        let sample_row = vec![39, 0, 7, 7, 21];
        let mut batch = TestBatch { num_samples: 5, sample_row: sample_row.clone(), ..TestBatch::rows(rows) };
        let out = op.run(&mut [TestTensor::new(DType::Bf16, &[rows, k], &x)], &mut batch).unwrap();
        let got = out[0].values();
        for (sample, row) in sample_row.iter().enumerate() {
            for column in 0..k as usize {
                assert_eq!(
                    got[wide_index(sample, column, k as usize)],
                    x[*row as usize * k as usize + column],
                    "{workers} workers, sample {sample}, column {column}"
                );
            }
        }
    }
}

/// Rows with the values of the family's plain types, at the places that the ABI defines. Padding is 0, and
/// unused rows stay.
#[test]
fn rows_lie_where_the_abi_says() {
    for dtype in [DType::Bf16, DType::F16] {
        for (rows, used, k, workers) in
            [(130u32, 129u32, 70u32, 3u32), (300, 300, 128, 132), (65, 1, 33, 200)]
        {
            for source in ["plain", "norm", "silu_mul"] {
                let x_dtype = if source == "norm" { DType::F32 } else { dtype };
                let columns = if source == "silu_mul" { 2 * k } else { k };
                let x = rounded(x_dtype, &random_values(1, (rows * columns) as usize));
                let weight = rounded(dtype, &random_values(2, k as usize));
                let mut inputs = vec![TestTensor::new(x_dtype, &[rows, columns], &x)];
                if source == "norm" {
                    inputs.push(TestTensor::weight(dtype, &[k], &weight));
                }
                let plain = match source {
                    "norm" => Some(TestOp::new("rmsnorm", json!({"norm_dtype": dtype.name()}), rows)),
                    "silu_mul" => Some(TestOp::new("silu_mul", json!({}), rows)),
                    _ => None,
                };
                let expected = match plain {
                    Some(op) => op.run(&mut inputs, &mut TestBatch::rows(used)).unwrap()[0].values(),
                    None => x.clone(),
                };
                let attrs = json!({"source": source, "act_dtype": dtype.name()});
                let op = TestOp::new("wide_rows", attrs, rows).workers(workers);
                let out = op.run(&mut inputs, &mut TestBatch::rows(used)).unwrap();
                let got = out[0].values();
                let mut known = vec![false; got.len()];
                let (k, used) = (k as usize, used as usize);
                for row in 0..used {
                    for column in 0..k.next_multiple_of(64) {
                        let at = wide_index(row, column, k);
                        let wanted = if column < k { expected[row * k + column] } else { 0.0 };
                        assert_eq!(
                            got[at], wanted,
                            "{dtype} {source} [{rows}, {k}]: row {row}, column {column}"
                        );
                        assert!(!std::mem::replace(&mut known[at], true));
                    }
                }
                assert!(
                    got.iter().zip(&known).all(|(v, known)| *known || v.is_nan()),
                    "unused rows were written"
                );
            }
        }
    }
}
