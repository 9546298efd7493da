use crate::abi::{
    MPK_ABORT_DIVERGED, MPK_OK, MPK_SAMPLE_HASH, MPK_SAMPLE_HIGHEST, MPK_SAMPLE_HIGHEST_TOKEN,
    MPK_SAMPLE_WORDS, MPK_SAMPLING_NOISE, MPK_SAMPLING_ON, MPK_WEIGH_WORDS, mpk_sampling,
};
use crate::testing::{Call, TestBatch, TestRank, TestTask, TestTensor, run_task};
use taskgraph::task_type::Access;
use taskgraph::{DType, Region};

/// Two ranks' records and lists of one part: rank r's highest logit is 1 + r, of token 7 + r. `hashes` are what their records say of
/// the batch state, `own` is this rank's.
fn run(sampling: mpk_sampling, hashes: [u32; 2], own: u64) -> (i32, u32) {
    const KEPT: u32 = 8;
    let mut tensors = [MPK_SAMPLE_WORDS, MPK_WEIGH_WORDS]
        .map(|words| TestTensor::poisoned(DType::U32, &[2, 1, 1, words]))
        .to_vec();
    tensors.push(TestTensor::poisoned(DType::U32, &[2, 1, 1, 2 * KEPT]));
    let mut put = |tensor: usize, at: u32, word: u32| {
        tensors[tensor].data.bytes_mut()[4 * at as usize..][..4].copy_from_slice(&word.to_ne_bytes());
    };
    for (rank, hash) in (0..).zip(hashes) {
        let (record, list, value) = (rank * MPK_SAMPLE_WORDS, rank * 2 * KEPT, (1.0 + rank as f32).to_bits());
        put(0, record + MPK_SAMPLE_HASH, hash);
        put(0, record + MPK_SAMPLE_HIGHEST, value);
        put(0, record + MPK_SAMPLE_HIGHEST_TOKEN, 7 + rank);
        put(2, list, value);
        put(2, list + 1, 7 + rank);
    }
    let mut next = TestTensor::poisoned(DType::I32, &[1]);
    let whole = |index: usize, tensor: &mut TestTensor| {
        let region = Region::whole(&tensor.dims);
        tensor.view(&Access::new(index as u8, region))
    };
    let task = TestTask {
        params: vec![KEPT],
        inputs: tensors.iter_mut().enumerate().map(|(index, tensor)| whole(index, tensor)).collect(),
        outputs: vec![whole(0, &mut next)],
        scratch_bytes: 8 * 2 * u64::from(KEPT),
        ..TestTask::default()
    };
    let mut batch = TestBatch::rows(1);
    batch.hash = own;
    batch.sampling = vec![sampling];
    let code = run_task("sample_reduce", &task, &mut batch, &TestRank::default(), Call::Run);
    (code, next.words()[0])
}

#[test]
fn ranks_that_disagree_on_the_batch_end_the_run() {
    let greedy = mpk_sampling::default();
    let best_of_one = mpk_sampling {
        flags: MPK_SAMPLING_ON | MPK_SAMPLING_NOISE,
        top_k: 1,
        inverse_temperature: 1.0,
        top_p: 1.0,
        log_min_p: f32::NEG_INFINITY,
        ..greedy
    };
    let hash = 0xfeed_0000_0000_0001u64;
    let folded = 0xfeed_0001;
    for sampling in [greedy, best_of_one] {
        assert_eq!(run(sampling, [folded; 2], hash), (MPK_OK as i32, 8));
        for hashes in [[folded, folded ^ 1], [folded ^ (1 << 31), folded], [folded + 1; 2]] {
            assert_eq!(run(sampling, hashes, hash), (MPK_ABORT_DIVERGED as i32, u32::MAX));
        }
    }
}
