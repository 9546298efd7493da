use crate::abi::{MPK_ABORT_PEER, MPK_OK, mpk_nvshmem_copy_params, params_words};
use crate::testing::{
    AlignedBytes, Call, TestBatch, TestRank, TestTask, TestTensor, random_values, run_task,
};
use taskgraph::task_type::Access;
use taskgraph::{DType, Region};

/// A tensor that represents symmetric memory of rank 0. Rank 1's copy is in `peer`, `OFFSET` bytes from its
/// base.
const OFFSET: u64 = 128;

fn copy(dims: &[u32], region: Region, rows_kind: u32, batch: &mut TestBatch) -> (Vec<f32>, Vec<f32>, i32) {
    let count = dims.iter().product::<u32>() as usize;
    let values = random_values(1, count);
    let mut source = TestTensor::new(DType::F32, dims, &values);
    let mut destination = TestTensor::poisoned(DType::F32, dims);
    let mut peer = AlignedBytes::new(OFFSET as usize + count * 4);
    peer.bytes_mut().fill(0xff);
    let own = destination.data.bytes_mut().as_mut_ptr() as u64;
    let rank = TestRank { rank: 0, sym: vec![own - OFFSET, peer.bytes_mut().as_mut_ptr() as u64] };
    destination.pe = 1;
    let access = Access::new(0, region);
    let first_row = if dims.len() > 1 { region.lo[dims.len() - 2] as i32 } else { 0 };
    let task = TestTask {
        params: params_words(&mpk_nvshmem_copy_params { rows_kind }),
        args: [first_row, 0, 0, 0, 0, 0, 0, 0],
        inputs: vec![source.view(&access)],
        outputs: vec![destination.view(&access)],
        ..TestTask::default()
    };
    let code = run_task("nvshmem_copy", &task, batch, &rank, Call::Run);
    assert!(destination.values().iter().all(|v| v.is_nan()), "the own copy was written");
    let arrived = crate::testing::decode(DType::F32, &peer.bytes()[OFFSET as usize..]);
    (values, arrived, code)
}

#[test]
fn rows_in_use_of_the_view_arrive_and_nothing_else() {
    let mut batch = TestBatch::rows(3);
    batch.num_samples = 2;
    for (dims, region) in [
        (vec![5, 40], Region::whole(&[5, 0]).with(1, 7, 30)),
        (vec![5, 40], Region::whole(&[5, 40])),
        // A block of rows; those in use are counted from the tensor's first row.
        (vec![5, 40], Region::whole(&[5, 0]).with(0, 2, 5).with(1, 7, 30)),
        (vec![5, 40], Region::whole(&[5, 0]).with(0, 3, 5).with(1, 7, 30)),
        (vec![3, 5, 8], Region::whole(&[0, 5, 8]).with(0, 1, 2)),
        (vec![3, 2, 5, 6], Region::whole(&[0, 2, 5, 6]).with(0, 2, 3)),
        (vec![9], Region::whole(&[9])),
    ] {
        for rows_kind in [0, 1, 2] {
            let used = if dims.len() == 1 { u32::MAX } else { [3, 2, u32::MAX][rows_kind as usize] };
            let (values, arrived, code) = copy(&dims, region, rows_kind, &mut batch);
            assert_eq!(code, MPK_OK as i32);
            for (i, value) in arrived.iter().enumerate() {
                let mut rest = i as u32;
                let mut index = vec![0; dims.len()];
                for d in (0..dims.len()).rev() {
                    index[d] = rest % dims[d];
                    rest /= dims[d];
                }
                let inside = (0..dims.len()).all(|d| (region.lo[d]..region.hi[d]).contains(&index[d]));
                let row = if dims.len() > 1 { index[dims.len() - 2] } else { 0 };
                if inside && row < used {
                    assert_eq!(*value, values[i]);
                } else {
                    assert!(value.is_nan(), "element {i} of {dims:?} was written");
                }
            }
        }
    }
}

#[test]
fn a_peer_that_cannot_be_reached_ends_the_run() {
    let mut source = TestTensor::new(DType::F32, &[1, 4], &[1.0; 4]);
    let mut destination = TestTensor::poisoned(DType::F32, &[1, 4]);
    destination.pe = 1;
    let access = Access::new(0, Region::whole(&[1, 4]));
    let own = destination.data.bytes_mut().as_mut_ptr() as u64;
    let task = TestTask {
        params: vec![2],
        inputs: vec![source.view(&access)],
        outputs: vec![destination.view(&access)],
        ..TestTask::default()
    };
    let rank = TestRank { rank: 0, sym: vec![own, 0] };
    let code = run_task("nvshmem_copy", &task, &mut TestBatch::rows(1), &rank, Call::Run);
    assert_eq!(code, MPK_ABORT_PEER as i32);
}
