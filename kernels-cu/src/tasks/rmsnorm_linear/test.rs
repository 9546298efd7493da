use super::reference::rmsnorm_linear;
use crate::testing::{
    TestBatch, TestOp, TestTensor, assert_close, on_all_levels, random_values, rounded, rounding,
};
use serde_json::json;
use taskgraph::DType;

#[test]
fn agrees_with_the_reference_and_gathers_samples() {
    for (x_dtype, dtype) in [(DType::F32, DType::F32), (DType::F32, DType::Bf16), (DType::F16, DType::F16)] {
        for (rows, k, n) in [(1u32, 128u32, 96u32), (5, 97, 203), (18, 64, 33)] {
            let x = rounded(x_dtype, &random_values(1, (rows * k) as usize));
            let norm = rounded(dtype, &random_values(2, k as usize));
            let w = rounded(dtype, &random_values(3, (n * k) as usize));
            let bias = rounded(dtype, &random_values(4, n as usize));
            let expected = rmsnorm_linear(&x, &norm, &w, dtype, 1e-6, Some(&bias));
            let inputs = || {
                [
                    TestTensor::new(x_dtype, &[rows, k], &x),
                    TestTensor::weight(dtype, &[k], &norm),
                    TestTensor::weight(dtype, &[n, k], &w),
                    TestTensor::weight(dtype, &[n], &bias),
                ]
            };
            // a normed value halfway between two values of `dtype` may round either
            // way
            let tolerance = 2.0 * rounding(dtype) + 4e-6;
            let results = on_all_levels(|| {
                let op = TestOp::new("rmsnorm_linear", json!({ "output_dtype": "f32" }), rows).workers(2);
                op.run(&mut inputs(), &mut TestBatch::rows(rows)).unwrap()[0].words()
            });
            for words in results {
                let got: Vec<f32> = words.into_iter().map(f32::from_bits).collect();
                assert_close(&got, &expected, tolerance, 4.0, "rmsnorm_linear");
            }
            let attrs = json!({ "output_dtype": "f32", "gather_samples": true });
            let op = TestOp::new("rmsnorm_linear", attrs, rows);
            let last = rows as usize - 1;
            let mut batch =
                TestBatch { num_samples: 1, sample_row: vec![last as i32], ..TestBatch::rows(rows) };
            let got = op.run(&mut inputs(), &mut batch).unwrap()[0].values();
            let n = n as usize;
            assert_close(&got[..n], &expected[last * n..], tolerance, 4.0, "sample");
        }
    }
}

/// The fused kernel and the two separate ones must give the same bits.
#[test]
fn is_the_same_as_norm_then_linear() {
    let (rows, k, n) = (5u32, 130u32, 70u32);
    let x = random_values(1, (rows * k) as usize);
    let norm = TestTensor::weight(DType::Bf16, &[k], &random_values(2, k as usize));
    let w = TestTensor::weight(DType::Bf16, &[n, k], &random_values(3, (n * k) as usize));
    let x = TestTensor::new(DType::F32, &[rows, k], &x);
    let batch = &mut TestBatch::rows(rows);
    let fused = TestOp::new("rmsnorm_linear", json!({ "eps": 1e-5 }), rows);
    let fused = fused.run(&mut [x.clone(), norm.clone(), w.clone()], batch).unwrap();
    let first = TestOp::new("rmsnorm", json!({ "eps": 1e-5 }), rows).run(&mut [x, norm], batch).unwrap();
    let second = TestOp::new("linear", json!({}), rows).run(&mut [first[0].clone(), w], batch).unwrap();
    assert_eq!(fused[0].data.bytes(), second[0].data.bytes());
}
