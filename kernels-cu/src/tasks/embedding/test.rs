use super::Embedding;
use super::reference::embedding;
use crate::testing::{
    Call, TestBatch, TestOp, TestRank, TestTask, TestTensor, assert_close, assert_covered_once,
    on_all_levels, random_values, rounded, run_task,
};
use serde_json::json;
use taskgraph::op_graph::Role;
use taskgraph::task_type::{LocalOp, OpView, OperandView, TensorType};
use taskgraph::{Attrs, Capacity, DType, Rows, Sharding, Split, Target, TaskType};

#[test]
fn takes_the_rows_of_the_tokens() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for (vocabulary, k) in [(100u32, 64u32), (203, 97), (5, 600)] {
            let table = rounded(dtype, &random_values(1, (vocabulary * k) as usize));
            let tokens = vec![0, vocabulary as i32 - 1, 3, 3];
            let expected = embedding(&table, k as usize, &tokens);
            on_all_levels(|| {
                let mut inputs = [TestTensor::weight(dtype, &[vocabulary, k], &table)];
                let mut batch = TestBatch { row_token: tokens.clone(), ..TestBatch::rows(4) };
                let op = TestOp::new("embedding", json!({}), 6).workers(3);
                let out = op.run(&mut inputs, &mut batch).unwrap();
                let live = 4 * k as usize;
                assert_close(&out[0].values()[..live], &expected, 0.0, 0.0, "embedding");
                assert!(out[0].values()[live..].iter().all(|v| v.is_nan()));
            });
        }
    }
}

/// The ranks' summands add up to the look-up, even if the number of ranks does not divide the
/// vocabulary.
#[test]
fn shares_of_the_vocabulary_add_up() {
    let (vocabulary, k, rows) = (203u64, 97u32, 5u32);
    let table = rounded(DType::Bf16, &random_values(1, vocabulary as usize * k as usize));
    let tokens = vec![0, 101, 202, 67, 68];
    let expected = embedding(&table, k as usize, &tokens);
    let sharding = Sharding::split(0, vocabulary, Split::Even { unit: 16 });
    let attrs = Attrs::new();
    let role = Role::Weight { parts: Vec::new() };
    let ty = TensorType { dtype: DType::Bf16, dims: vec![vocabulary, u64::from(k)], rows: Rows::Fixed };
    let view = OpView {
        name: "embedding",
        attrs: &attrs,
        inputs: vec![OperandView { name: "table", ty: ty.clone(), sharding: &sharding, role: &role }],
        outputs: Vec::new(),
        capacity: Capacity { rows, samples: rows, active: rows },
    };
    for world in [1u32, 2, 3, 8] {
        let rule = Embedding.shard(&view, world).unwrap();
        assert_eq!(rule.outputs[0] == Sharding::Partial, world > 1);
        let mut sum = vec![0.0f32; expected.len()];
        for rank in 0..world {
            let range = sharding.ranges(rank, world)[0].clone();
            let part = &table[range.start as usize * k as usize..range.end as usize * k as usize];
            let count = (range.end - range.start) as u32;
            let mut input = TestTensor::weight(DType::Bf16, &[count, k], part);
            let outputs = Embedding.infer(&view).unwrap();
            let local = LocalOp { global: &view, inputs: vec![input.ty()], outputs, rank, world };
            let partition = Embedding.partition(&local, &Target::cpu(2)).unwrap();
            let mut output = TestTensor::poisoned(DType::F32, &[rows, k]);
            assert_covered_once(&partition, 0, &output.dims);
            for spec in &partition.tasks {
                let task = TestTask {
                    params: partition.params.clone(),
                    args: spec.args,
                    inputs: vec![input.view(&spec.reads[0])],
                    outputs: vec![output.view(&spec.writes[0])],
                    scratch_bytes: partition.scratch_bytes,
                };
                let mut batch = TestBatch { row_token: tokens.clone(), ..TestBatch::rows(rows) };
                assert_eq!(run_task("embedding", &task, &mut batch, &TestRank::default(), Call::Run), 0);
            }
            for (s, v) in sum.iter_mut().zip(output.values()) {
                *s += v;
            }
        }
        assert_close(&sum, &expected, 0.0, 0.0, "sum over ranks");
    }
}
