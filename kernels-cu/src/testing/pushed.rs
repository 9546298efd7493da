//! Products whose tasks push their output to every rank as flagged words.

use super::{AlignedBytes, Call, TestBatch, TestRank, TestTask, TestTensor, run_task};
use crate::abi;
use taskgraph::task_type::Partition;

/// Runs all tasks of `name` as rank 1 of 3, with parameter word `push_param` set, and panics unless every rank has each word of `wanted`
/// (bits of `[rows, columns]` in f32) with the task's tag: those of the rows in use, and nothing else. In the epoch that refreshes
/// flagged words, all rows count.
pub fn assert_pushed(
    name: &str,
    mut partition: Partition,
    push_param: usize,
    inputs: &mut [TestTensor],
    [rows, columns]: [u32; 2],
    wanted: &[u32],
) {
    partition.params[push_param] = 1;
    let (offset, heap_bytes) = (640u64, 640 + u64::from(rows * columns) * 8);
    let mut heaps: Vec<AlignedBytes> = (0..3).map(|_| AlignedBytes::new(heap_bytes as usize)).collect();
    let sym: Vec<u64> = heaps.iter_mut().map(|h| h.bytes_mut().as_mut_ptr() as u64).collect();
    let rank = TestRank { rank: 1, sym: sym.clone() };
    for (epoch, used) in [(7, rows), (8, 1), (abi::MPK_FLAG_REFRESH_EPOCHS, 1)] {
        heaps.iter_mut().for_each(|heap| heap.bytes_mut().fill(0xff));
        let mut batch = TestBatch { epoch, flags: [161, 5], ..TestBatch::rows(used) };
        for spec in &partition.tasks {
            let ([r0, c0, ..], [r1, c1, ..]) = (spec.writes[0].region.lo, spec.writes[0].region.hi);
            let task = TestTask {
                params: partition.params.clone(),
                args: spec.args,
                inputs: spec.reads.iter().map(|r| inputs[usize::from(r.operand)].view(r)).collect(),
                outputs: vec![abi::mpk_operand {
                    addr: sym[1] + offset + u64::from(r0 * columns + c0) * 8,
                    dims: [r1 - r0, c1 - c0, 1, 1],
                    strides: [columns, 1, 0, 0],
                    dtype: abi::MPK_F32_FLAGGED as u8,
                    ndim: 2,
                    layout: 0,
                    symmetric: 1,
                    pe: -2,
                }],
                scratch_bytes: partition.scratch_bytes,
            };
            assert_eq!(run_task(name, &task, &mut batch, &rank, Call::Run), 0);
        }
        let pushed = if epoch == abi::MPK_FLAG_REFRESH_EPOCHS { rows } else { used };
        for heap in &heaps {
            for (i, word) in heap.bytes()[offset as usize..].chunks_exact(8).enumerate() {
                let (value, tag) = (&word[..4], &word[4..]);
                let live = i < (pushed * columns) as usize;
                assert_eq!(tag, if live { epoch * 161 + 5 } else { u32::MAX }.to_ne_bytes(), "word {i}");
                assert!(!live || value == wanted[i].to_ne_bytes(), "word {i}");
            }
        }
    }
}
