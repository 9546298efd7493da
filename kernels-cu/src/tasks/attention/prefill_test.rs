//! The steps for many rows: `attention_append`, `attention_prefill` and its merge.

use super::test::case;
use super::test_case::Case;
use taskgraph::DType;

#[test]
fn many_rows_equal_the_reference_over_head_shapes() {
    for (heads, kv_heads, head_dim) in
        [(2, 2, 16), (8, 1, 64), (6, 2, 18), (16, 8, 128), (7, 1, 34), (16, 1, 8)]
    {
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            for slots in [vec![(37, 1)], vec![(0, 1), (5, 11), (130, 3)], vec![(0, 150), (64, 1)]] {
                let qk_norm = heads % 2 == 0;
                let prefill = Some(1 + heads);
                Case { slots, qk_norm, prefill, ..case(dtype, heads, kv_heads, head_dim) }.verify();
            }
        }
    }
}

/// A decode row with a long context among prompts: several tasks have a part of its keys.
#[test]
fn long_contexts_are_dealt_to_many_tasks() {
    for (page_size, tasks) in [(1, 2), (16, 7), (64, 16), (64, 50)] {
        for slots in [vec![(2000, 1)], vec![(1500, 1), (0, 70), (900, 3)], vec![(0, 3), (700, 90), (0, 1)]] {
            let prefill = Some(tasks);
            Case { slots, page_size, prefill, ..case(DType::Bf16, 4, 2, 32) }.verify();
        }
    }
}

#[test]
fn many_short_prompts_are_dealt_to_all_tasks() {
    for tasks in [1, 5, 64] {
        let slots = (0..40).map(|i| (i * 7 % 90, 1 + i % 5)).collect();
        Case { slots, prefill: Some(tasks), qk_norm: true, ..case(DType::F32, 6, 2, 16) }.verify();
    }
}

#[test]
fn ranks_whose_heads_begin_inside_a_group_fill_their_own_units() {
    for (heads, kv_heads, world) in [(12, 4, 6), (12, 4, 3), (8, 2, 8), (8, 8, 4), (6, 2, 2)] {
        let slots = vec![(20, 2), (0, 3), (800, 40)];
        Case { slots, world, prefill: Some(6), ..case(DType::F32, heads, kv_heads, 16) }.verify();
    }
}
