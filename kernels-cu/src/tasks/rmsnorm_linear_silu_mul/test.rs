use super::reference::rmsnorm_linear_silu_mul;
use crate::testing::{
    TestBatch, TestOp, TestTensor, assert_close, on_all_levels, random_values, rounded, rounding,
};
use serde_json::json;
use taskgraph::DType;

#[test]
fn agrees_with_the_reference() {
    for (x_dtype, dtype) in [(DType::F32, DType::F32), (DType::F32, DType::Bf16), (DType::F16, DType::F16)] {
        for (rows, k, n) in [(1u32, 128u32, 96u32), (5, 97, 208), (18, 64, 32)] {
            let x = rounded(x_dtype, &random_values(1, (rows * k) as usize));
            let norm = rounded(dtype, &random_values(2, k as usize));
            let w = rounded(dtype, &random_values(3, (2 * n * k) as usize));
            let bias = rounded(dtype, &random_values(4, 2 * n as usize));
            let expected = rmsnorm_linear_silu_mul(&x, &norm, &w, dtype, 1e-6, Some(&bias));
            let results = on_all_levels(|| {
                let mut inputs = [
                    TestTensor::new(x_dtype, &[rows, k], &x),
                    TestTensor::weight(dtype, &[k], &norm),
                    TestTensor::weight(dtype, &[2 * n, k], &w),
                    TestTensor::weight(dtype, &[2 * n], &bias),
                ];
                let op = TestOp::new("rmsnorm_linear_silu_mul", json!({}), rows).workers(2);
                op.run(&mut inputs, &mut TestBatch::rows(rows)).unwrap()[0].values()
            });
            // normed values, gate and up may each round either way
            for got in results {
                assert_close(&got, &expected, 4.0 * rounding(dtype) + 8e-6, 8.0, "rmsnorm_linear_silu_mul");
            }
        }
    }
}

/// The fused kernel and the two separate ones must give the same bits.
#[test]
fn is_the_same_as_the_product_then_the_gate() {
    let (rows, k, n) = (14u32, 130u32, 80u32);
    let x = TestTensor::new(DType::F32, &[rows, k], &random_values(1, (rows * k) as usize));
    let norm = TestTensor::weight(DType::Bf16, &[k], &random_values(2, k as usize));
    let w = TestTensor::weight(DType::Bf16, &[2 * n, k], &random_values(3, (2 * n * k) as usize));
    let batch = &mut TestBatch::rows(rows);
    let mut run = |op: &str, mut inputs: Vec<TestTensor>| {
        TestOp::new(op, json!({}), rows).workers(3).run(&mut inputs, batch).unwrap().remove(0)
    };
    let fused = run("rmsnorm_linear_silu_mul", vec![x.clone(), norm.clone(), w.clone()]);
    let product = run("rmsnorm_linear", vec![x, norm, w]);
    let gated = run("silu_mul", vec![product]);
    assert_eq!(fused.data.bytes(), gated.data.bytes());
}
