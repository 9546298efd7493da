use super::reference::linear;
use crate::testing::{TestBatch, TestOp, TestTensor, assert_close, on_all_levels, random_values, rounded};
use serde_json::json;
use taskgraph::DType;

#[test]
fn adds_bias_and_residual_once() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for (rows, k, n) in [(1u32, 64u32, 96u32), (6, 97, 203), (20, 31, 40)] {
            let x = rounded(dtype, &random_values(1, (rows * k) as usize));
            let w = rounded(dtype, &random_values(2, (n * k) as usize));
            let bias = rounded(dtype, &random_values(3, n as usize));
            let residual = random_values(4, (rows * n) as usize);
            for with_bias in [false, true] {
                let bias = with_bias.then_some(&bias[..]);
                let expected = linear(&x, &w, k as usize, bias, Some(&residual));
                let results = on_all_levels(|| {
                    let mut inputs =
                        vec![TestTensor::new(dtype, &[rows, k], &x), TestTensor::weight(dtype, &[n, k], &w)];
                    inputs.extend(bias.map(|b| TestTensor::weight(dtype, &[n], b)));
                    inputs.push(TestTensor::new(DType::F32, &[rows, n], &residual));
                    let op = TestOp::new("linear_with_residual", json!({}), rows).workers(3);
                    op.run(&mut inputs, &mut TestBatch::rows(rows)).unwrap()[0].words()
                });
                for words in results {
                    let got: Vec<f32> = words.into_iter().map(f32::from_bits).collect();
                    assert_close(&got, &expected, 4e-6, 4.0, "linear_with_residual");
                }
            }
        }
    }
}
