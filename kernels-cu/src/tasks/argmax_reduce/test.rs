use crate::abi::{MPK_ABORT_DIVERGED, MPK_OK};
use crate::testing::{Call, TestBatch, TestRank, TestTask, TestTensor, run_task};
use taskgraph::task_type::Access;
use taskgraph::{DType, Region};

/// Two ranks' records of one tile; the tokens themselves are compared in `argmax_partial`'s tests.
fn run(hashes: [u64; 2], own: u64) -> (i32, u32) {
    let mut records = TestTensor::poisoned(DType::U32, &[2, 1, 1, 6]);
    for (rank, hash) in hashes.into_iter().enumerate() {
        let value = 1.0f32 + rank as f32;
        let words = [
            hash as u32,
            (hash >> 32) as u32,
            value.to_bits(),
            1f32.to_bits(),
            value.to_bits(),
            7 + rank as u32,
        ];
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
        records.data.bytes_mut()[rank * 24..][..24].copy_from_slice(&bytes);
    }
    let mut next = TestTensor::poisoned(DType::I32, &[1]);
    let task = TestTask {
        params: vec![1, 0, 0, 0],
        inputs: vec![records.view(&Access::new(0, Region::whole(&[2, 1, 1, 6])))],
        outputs: vec![next.view(&Access::new(0, Region::whole(&[1])))],
        scratch_bytes: 8,
        ..TestTask::default()
    };
    let mut batch = TestBatch::rows(1);
    batch.hash = own;
    let code = run_task("argmax_reduce", &task, &mut batch, &TestRank::default(), Call::Run);
    (code, next.words()[0])
}

#[test]
fn ranks_that_disagree_on_the_batch_end_the_run() {
    let hash = 0xfeed_0000_0000_0001;
    assert_eq!(run([hash, hash], hash), (MPK_OK as i32, 8));
    for hashes in [[hash, hash ^ 1], [hash ^ (1 << 63), hash], [hash + 1, hash + 1]] {
        assert_eq!(run(hashes, hash), (MPK_ABORT_DIVERGED as i32, u32::MAX));
    }
}
