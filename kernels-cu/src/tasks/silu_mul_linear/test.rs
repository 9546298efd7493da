use super::reference::silu_mul_linear;
use crate::testing::{
    TestBatch, TestOp, TestTensor, assert_close, on_all_levels, random_values, rounded, rounding,
};
use serde_json::json;
use taskgraph::DType;

#[test]
fn agrees_with_the_reference() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for (rows, k, n) in [(1u32, 128u32, 96u32), (5, 97, 203), (18, 65, 33)] {
            let gate_up = rounded(dtype, &random_values(1, (rows * 2 * k) as usize));
            let w = rounded(dtype, &random_values(2, (n * k) as usize));
            let expected = silu_mul_linear(&gate_up, &w, k as usize, dtype, None, None);
            let results = on_all_levels(|| {
                let mut inputs = [
                    TestTensor::new(dtype, &[rows, 2 * k], &gate_up),
                    TestTensor::weight(dtype, &[n, k], &w),
                ];
                let op = TestOp::new("silu_mul_linear", json!({ "output_dtype": "f32" }), rows).workers(2);
                op.run(&mut inputs, &mut TestBatch::rows(rows)).unwrap()[0].words()
            });
            for words in results {
                let got: Vec<f32> = words.into_iter().map(f32::from_bits).collect();
                assert_close(&got, &expected, rounding(dtype) + 4e-6, 2.0, "silu_mul_linear");
            }
        }
    }
}
