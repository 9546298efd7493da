use super::reference::add;
use crate::isa::Isa;
use crate::testing::{TestBatch, TestOp, TestTensor, assert_close, random_values, rounded};
use serde_json::json;
use taskgraph::DType;

#[test]
fn adds_on_every_level_and_leaves_unused_rows_alone() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for (rows, used, columns) in [(1u32, 1u32, 16u32), (5, 3, 203), (8, 8, 1), (17, 17, 97)] {
            let n = (rows * columns) as usize;
            let a = rounded(dtype, &random_values(1, n));
            let residual = random_values(2, n);
            let expected = add(&a, &residual);
            for isa in Isa::ALL {
                let got = isa.with(|| {
                    let mut inputs = [
                        TestTensor::new(dtype, &[rows, columns], &a),
                        TestTensor::new(DType::F32, &[rows, columns], &residual),
                    ];
                    let op = TestOp::new("add", json!({}), rows).workers(3);
                    op.run(&mut inputs, &mut TestBatch::rows(used)).unwrap()[0].values()
                });
                let Some(got) = got else { continue };
                let live = (used * columns) as usize;
                assert_close(&got[..live], &expected[..live], 1e-7, 0.0, "add");
                assert!(got[live..].iter().all(|v| v.is_nan()));
            }
        }
    }
}
