use super::reference::rmsnorm;
use crate::testing::{
    TestBatch, TestOp, TestTensor, assert_close, decode, on_all_levels, random_values, rounded, rounding,
};
use serde_json::json;
use taskgraph::DType;

#[test]
fn agrees_with_the_reference() {
    for (x_dtype, dtype) in [
        (DType::F32, DType::F32),
        (DType::F32, DType::Bf16),
        (DType::F16, DType::F16),
        (DType::Bf16, DType::Bf16),
    ] {
        for (rows, used, k) in [(1u32, 1u32, 128u32), (5, 4, 97), (17, 17, 16), (3, 3, 1)] {
            let x = rounded(x_dtype, &random_values(1, (rows * k) as usize));
            let weight = rounded(dtype, &random_values(2, k as usize));
            let expected = rmsnorm(&x, &weight, 1e-5);
            let results = on_all_levels(|| {
                let mut inputs =
                    [TestTensor::new(x_dtype, &[rows, k], &x), TestTensor::weight(dtype, &[k], &weight)];
                let op = TestOp::new("rmsnorm", json!({ "eps": 1e-5 }), rows).workers(4);
                let out = op.run(&mut inputs, &mut TestBatch::rows(used)).unwrap();
                out[0].data.bytes().to_vec()
            });
            for bytes in results {
                let got = decode(dtype, &bytes);
                let live = (used * k) as usize;
                let tolerance = 1.01 * rounding(dtype) + 1e-6;
                assert_close(&got[..live], &expected[..live], tolerance, 1e-3, "rmsnorm");
                assert!(got[live..].iter().all(|v| v.is_nan()));
            }
        }
    }
}
