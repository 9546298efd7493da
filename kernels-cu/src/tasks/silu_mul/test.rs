use super::reference::{gated, silu_mul};
use crate::testing::{
    TestBatch, TestOp, TestTensor, assert_close, decode, on_all_levels, random_values, rounded, rounding,
};
use serde_json::json;
use taskgraph::DType;

#[test]
fn agrees_with_the_reference_far_out_too() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for (rows, used, n) in [(1u32, 1u32, 3072u32), (4, 3, 203), (2, 2, 1)] {
            let values: Vec<f32> =
                random_values(1, (rows * 2 * n) as usize).iter().map(|v| v * 40.0).collect();
            let gate_up = rounded(dtype, &values);
            let expected = silu_mul(&gate_up, n as usize);
            let results = on_all_levels(|| {
                let mut inputs = [TestTensor::new(dtype, &[rows, 2 * n], &gate_up)];
                let op = TestOp::new("silu_mul", json!({}), rows).workers(3);
                let out = op.run(&mut inputs, &mut TestBatch::rows(used)).unwrap();
                out[0].data.bytes().to_vec()
            });
            for bytes in results {
                let got = decode(dtype, &bytes);
                let live = (used * n) as usize;
                // f16 and bf16 both lose relative precision only below the normal range of f16
                let (tolerance, scale) =
                    (1.01 * rounding(dtype) + 5e-7, if dtype == DType::F16 { 1e-3 } else { 0.0 });
                assert_close(&got[..live], &expected[..live], tolerance, scale, "silu_mul");
                assert!(got[live..].iter().all(|v| v.is_nan()));
            }
        }
    }
}

#[test]
fn extreme_gates_neither_overflow_nor_lose_a_nan() {
    let gate = [-1e30f32, -200.0, -88.5, 0.0, 88.5, 1e30, f32::NAN, -0.0];
    let gate_up: Vec<f32> = gate.iter().copied().chain([1.0; 8]).collect();
    on_all_levels(|| {
        let mut inputs = [TestTensor::new(DType::F32, &[1, 16], &gate_up)];
        let out = TestOp::new("silu_mul", json!({}), 1).run(&mut inputs, &mut TestBatch::rows(1)).unwrap();
        let got = out[0].values();
        assert!(got[..6].iter().all(|v| v.is_finite()), "{got:?}");
        assert_eq!((got[0], got[1], got[3], got[5]), (0.0, 0.0, 0.0, 1e30));
        assert!(got[6].is_nan());
    });
}

#[test]
fn every_activation_agrees_with_its_definition() {
    for activation in ["silu", "gelu-tanh", "gelu"] {
        for dtype in [DType::F32, DType::Bf16] {
            let (rows, n) = (3u32, 77u32);
            let values: Vec<f32> =
                random_values(2, (rows * 2 * n) as usize).iter().map(|v| v * 8.0).collect();
            let gate_up = rounded(dtype, &values);
            let expected = gated(activation, &gate_up, n as usize);
            let results = on_all_levels(|| {
                let mut inputs = [TestTensor::new(dtype, &[rows, 2 * n], &gate_up)];
                let op = TestOp::new("silu_mul", json!({"activation": activation}), rows).workers(2);
                op.run(&mut inputs, &mut TestBatch::rows(rows)).unwrap()[0].data.bytes().to_vec()
            });
            for bytes in results {
                // If 1 + erf or 1 + tanh cancels, the result is small compared with the gate.
                assert_close(
                    &decode(dtype, &bytes),
                    &expected,
                    1.01 * rounding(dtype) + 2e-6,
                    1.0,
                    activation,
                );
            }
        }
    }
    let op = TestOp::new("silu_mul", json!({"activation": "relu"}), 1);
    let error = op.infer(&[TestTensor::new(DType::F32, &[1, 2], &[0.0; 2])]).unwrap_err().0;
    assert!(error.contains("silu, gelu-tanh, gelu"), "{error}");
}
