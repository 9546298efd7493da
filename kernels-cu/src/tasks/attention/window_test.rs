//! Attention with a window: a query sees its own position and some before it.

use super::test::case;
use super::test_case::Case;
use serde_json::json;
use taskgraph::DType;

const WINDOWS: [u32; 9] = [1, 2, 7, 16, 37, 64, 100, 131, 1000];

#[test]
fn windows_shorter_and_longer_than_the_context_equal_the_reference() {
    for window in WINDOWS {
        for (slots, page_size, splits) in [
            (vec![(0, 1), (5, 11), (130, 3)], 16, 1),
            (vec![(0, 150), (64, 1), (255, 1)], 8, 1),
            (vec![(299, 1), (3, 70), (63, 2)], 64, 3),
            (vec![(131, 1), (30, 1), (0, 40)], 1, 5),
        ] {
            for dtype in [DType::F32, DType::Bf16] {
                let slots = slots.clone();
                Case { slots, page_size, splits, window, qk_norm: true, ..case(dtype, 4, 2, 32) }.verify();
            }
        }
    }
}

/// Units are cut at the keys that they see: many tasks, long contexts, prompts whose rows see different first keys.
#[test]
fn many_rows_with_a_window_equal_the_reference() {
    for window in WINDOWS {
        for (slots, tasks) in [
            (vec![(0, 150), (64, 1)], 3),
            (vec![(1500, 1), (0, 70), (900, 3)], 7),
            (vec![(700, 300), (0, 1), (90, 130)], 16),
        ] {
            let prefill = Some(tasks);
            Case { slots, prefill, window, ..case(DType::Bf16, 4, 2, 32) }.verify();
        }
    }
    // Windows of many tiles of keys, whose units are cut.
    for window in [900, 1024, 1025] {
        let slots = vec![(2000, 1), (1200, 260)];
        Case { slots, prefill: Some(23), window, ..case(DType::F32, 4, 2, 16) }.verify();
    }
}

#[test]
fn tasks_of_several_heads_and_slots_and_several_ranks_have_windows() {
    for (heads, kv_heads, world, most) in [(8, 8, 1, 2), (16, 4, 1, 4), (12, 4, 6, 1), (16, 8, 2, 4)] {
        let slots = vec![(0, 1), (5, 11), (130, 3), (64, 1)];
        let kv_heads_of_task = most;
        Case { slots, world, kv_heads_of_task, window: 21, ..case(DType::F32, heads, kv_heads, 16) }.verify();
    }
}

/// The bits of a row with a window do not depend on the rows that come with it.
#[test]
fn chunks_with_a_window_give_the_same_bits() {
    let whole = Case { slots: vec![(0, 200)], window: 45, ..case(DType::F32, 4, 2, 32) };
    let data = whole.data();
    let (expected, cache) = whole.run(&data, 0);
    let (cached, size) = (cache.values(), 4 * 32 * 4);
    for (context, rows) in [(0, 1), (44, 2), (45, 60), (100, 37), (199, 1)] {
        let chunk = Case { slots: vec![(context, rows)], ..whole.clone() };
        let mut chunk_data = chunk.data();
        for p in 0..context {
            for head in 0..2 {
                let at = whole.cache_at(&data, 0, p, 2, head, false);
                chunk_data.slots[0].keys[p as usize][head as usize] = cached[at..at + 32].to_vec();
            }
        }
        let got = chunk.run(&chunk_data, 0).0;
        let (from, n) = (context as usize * size, rows as usize * size);
        assert!(got.data.bytes()[..n] == expected.data.bytes()[from..from + n], "{context} + {rows}");
    }
}

/// Pages before every row's window are not read: their numbers may be invalid.
#[test]
fn pages_before_the_window_are_not_read() {
    for (splits, prefill) in [(1, None), (3, None), (1, Some(4))] {
        let slots = vec![(700, 1), (600, 20)];
        let case = Case { slots, splits, prefill, window: 50, ..case(DType::F32, 4, 2, 16) };
        let data = case.data();
        let mut batch = case.batch(&data);
        for active in [0, 1] {
            let first = (case.slots.len() - active) * data.pages_per_slot as usize;
            batch.page_table[first..first + 30].fill(i32::MAX); // positions below 480: also whole tiles of 128 keys below 551
        }
        let (out, cache) = case.run_with(&data, 0, &mut batch, |_, _| true);
        case.check(&data, 0, &out, &cache);
    }
}

#[test]
fn a_window_of_no_positions_is_refused() {
    let attrs = json!({"window": 0});
    let message = crate::tasks::heads::window(attrs.as_object().unwrap()).unwrap_err().0;
    assert!(message.contains("`window` must be at least 1"), "{message}");
    assert_eq!(crate::tasks::heads::window(json!({}).as_object().unwrap()).unwrap(), 0);
}
