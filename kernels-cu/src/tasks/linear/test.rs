use super::reference::linear;
use crate::tasks::linear_family::PUSH_PARAM;
use crate::testing::pushed::assert_pushed;
use crate::testing::{
    TestBatch, TestOp, TestTensor, assert_close, on_all_levels, random_values, rounded, rounding,
};
use serde_json::json;
use taskgraph::{DType, Rows};

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

#[test]
fn agrees_with_the_reference_on_odd_shapes_types_and_levels() {
    let shapes: &[(u32, u32, u32)] = &[
        // rows, k, n
        (1, 1, 1),
        (1, 97, 203),
        (1, 128, 64),
        (2, 97, 203),
        (3, 64, 48),
        (4, 33, 100),
        (5, 96, 17),
        (7, 98, 130),
        (8, 256, 96),
        (9, 31, 33),
        (12, 64, 32),
        (13, 65, 80),
        (17, 97, 203),
        (64, 48, 50),
        (131, 16, 35),
    ];
    for dtype in DTYPES {
        for &(rows, k, n) in shapes {
            let x = rounded(dtype, &random_values(u64::from(rows + k), (rows * k) as usize));
            let w = rounded(dtype, &random_values(u64::from(n), (n * k) as usize));
            let bias = rounded(dtype, &random_values(9, n as usize));
            let expected = linear(&x, &w, k as usize, Some(&bias), None);
            for output in ["f32", dtype.name()] {
                let out_dtype = if output == "f32" { DType::F32 } else { dtype };
                let results = on_all_levels(|| {
                    let mut inputs = [
                        TestTensor::new(dtype, &[rows, k], &x),
                        TestTensor::weight(dtype, &[n, k], &w),
                        TestTensor::weight(dtype, &[n], &bias),
                    ];
                    let op = TestOp::new("linear", json!({ "output_dtype": output }), rows).workers(2);
                    let out = op.run(&mut inputs, &mut TestBatch::rows(rows)).unwrap();
                    out[0].data.bytes().to_vec()
                });
                for bytes in results {
                    let got = crate::testing::decode(out_dtype, &bytes);
                    let what = format!("{dtype} -> {out_dtype} [{rows}, {k}] x [{n}, {k}]");
                    assert_close(&got, &expected, 1.01 * rounding(out_dtype) + 4e-6, 4.0, &what);
                }
            }
        }
    }
}

/// The bits must not depend on how many rows or columns are computed together.
#[test]
fn a_row_has_the_same_bits_alone_and_in_a_batch() {
    let (rows, k, n) = (67u32, 130u32, 83u32);
    for dtype in DTYPES {
        let x = rounded(dtype, &random_values(1, (rows * k) as usize));
        let w = rounded(dtype, &random_values(2, (n * k) as usize));
        let product = |first: u32, count: u32, workers: u32| {
            let part = &x[(first * k) as usize..((first + count) * k) as usize];
            let mut inputs =
                [TestTensor::new(dtype, &[count, k], part), TestTensor::weight(dtype, &[n, k], &w)];
            let op = TestOp::new("linear", json!({ "output_dtype": "f32" }), count).workers(workers);
            op.run(&mut inputs, &mut TestBatch::rows(count)).unwrap()[0].words()
        };
        on_all_levels(|| {
            let all = product(0, rows, 1);
            for (first, count, workers) in [(0, 1, 1), (1, 2, 3), (3, 5, 2), (8, 13, 4), (66, 1, 6)] {
                let range = (first * n) as usize..((first + count) * n) as usize;
                assert_eq!(product(first, count, workers), all[range], "{dtype} {first}+{count}");
            }
            all[0]
        });
    }
}

#[test]
fn unused_rows_are_left_alone_and_samples_are_gathered() {
    let (rows, k, n) = (6u32, 20u32, 40u32);
    let x = random_values(1, (rows * k) as usize);
    let w = random_values(2, (n * k) as usize);
    let mut inputs =
        [TestTensor::new(DType::F32, &[rows, k], &x), TestTensor::weight(DType::F32, &[n, k], &w)];
    let expected = linear(&x, &w, k as usize, None, None);

    let out = TestOp::new("linear", json!({}), rows).run(&mut inputs, &mut TestBatch::rows(4)).unwrap();
    assert_close(&out[0].values()[..(4 * n) as usize], &expected[..(4 * n) as usize], 4e-6, 4.0, "used");
    assert!(out[0].values()[(4 * n) as usize..].iter().all(|v| v.is_nan()));

    let op = TestOp::new("linear", json!({ "gather_samples": true }), rows);
    let mut batch = TestBatch { num_samples: 2, sample_row: vec![5, 1], ..TestBatch::rows(6) };
    let out = op.run(&mut inputs, &mut batch).unwrap();
    assert_eq!(out[0].rows, Rows::Samples);
    let n = n as usize;
    assert_close(&out[0].values()[..n], &expected[5 * n..6 * n], 4e-6, 4.0, "sample 0");
    assert_close(&out[0].values()[n..2 * n], &expected[n..2 * n], 4e-6, 4.0, "sample 1");
    assert!(out[0].values()[2 * n..].iter().all(|v| v.is_nan()));
}

#[test]
fn pushed_words_reach_every_rank_with_their_tag() {
    let (rows, k, n) = (3u32, 50u32, 37u32);
    let x = random_values(1, (rows * k) as usize);
    let w = random_values(2, (n * k) as usize);
    let mut inputs =
        [TestTensor::new(DType::F32, &[rows, k], &x), TestTensor::weight(DType::F32, &[n, k], &w)];
    let op = TestOp::new("linear", json!({}), rows);
    let plain = op.run(&mut inputs, &mut TestBatch::rows(rows)).unwrap()[0].words();

    let partition = op.partition(&inputs).unwrap();
    assert_pushed("linear", partition, PUSH_PARAM, &mut inputs, [rows, n], &plain);
}

#[test]
fn refuses_what_does_not_fit() {
    let x = TestTensor::poisoned(DType::Bf16, &[2, 8]);
    let w = |n: u32, k: u32| TestTensor::weight(DType::Bf16, &[n, k], &vec![0.0; (n * k) as usize]);
    let op = TestOp::new("linear", json!({}), 2);
    let message = op.infer(&[x.clone(), w(4, 9)]).unwrap_err().0;
    assert!(message.contains("9 columns"), "{message}");
    assert!(op.infer(std::slice::from_ref(&x)).is_err());
    assert!(op.infer(&[x.clone(), w(4, 8), TestTensor::poisoned(DType::Bf16, &[5])]).is_err());
    let bad = TestOp::new("linear", json!({ "output_dtype": "i32" }), 2);
    assert!(bad.infer(&[x, w(4, 8)]).is_err());
}
