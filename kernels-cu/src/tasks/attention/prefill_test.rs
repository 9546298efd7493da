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
fn long_contexts_are_divided_among_many_tasks() {
    for (page_size, tasks) in [(1, 2), (16, 7), (64, 16), (64, 50)] {
        for slots in [vec![(2000, 1)], vec![(1500, 1), (0, 70), (900, 3)], vec![(0, 3), (700, 90), (0, 1)]] {
            let prefill = Some(tasks);
            Case { slots, page_size, prefill, ..case(DType::Bf16, 4, 2, 32) }.verify();
        }
    }
}

#[test]
fn many_short_prompts_are_divided_among_all_tasks() {
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

/// A query tile starts in the middle of a request, because an earlier chunk has computed the first rows. One task has
/// this tile, and its rows have the same bits as if the whole request were one chunk.
#[test]
fn tiles_that_start_inside_a_request_have_the_bits_of_the_whole() {
    let (heads, kv_heads, head_dim) = (4, 2, 32);
    let tile_tokens = 128 / (heads / kv_heads); // kTileRows of units.h
    let width = (heads * head_dim) as usize;
    for dtype in [DType::Bf16, DType::F32] {
        // With one task no unit is cut along its keys, which would change the last bits.
        let one = Case { prefill: Some(1), qk_norm: true, ..case(dtype, heads, kv_heads, head_dim) };
        let whole = Case { slots: vec![(0, 300)], ..one.clone() };
        let data = whole.data();
        let (expected, cache) = whole.run(&data, 0);
        whole.check(&data, 0, &expected, &cache);
        let (cached, size) = (cache.values(), width * dtype.size() as usize);
        for (context, rows) in [(1, 200), (tile_tokens, 130), (100, 200), (299, 1)] {
            let chunk = Case { slots: vec![(context, rows)], ..one.clone() };
            let mut chunk_data = chunk.data();
            for p in 0..context {
                for head in 0..kv_heads {
                    let at = whole.cache_at(&data, 0, p, kv_heads, head, false);
                    let key = cached[at..at + head_dim as usize].to_vec();
                    chunk_data.slots[0].keys[p as usize][head as usize] = key;
                }
            }
            let got = chunk.run(&chunk_data, 0).0;
            let (from, n) = (context as usize * size, rows as usize * size);
            assert!(got.data.bytes()[..n] == expected.data.bytes()[from..from + n], "{context} + {rows}");
        }
    }
}

/// One iteration has decode rows with contexts, a prompt, and a chunk of another prompt. Tasks start at query tiles
/// inside the prompt and inside units; together they write each row once, by the reference.
#[test]
fn tasks_start_inside_requests_and_units_of_a_mixed_iteration() {
    let slots = vec![(700, 1), (0, 260), (1300, 1), (200, 150)];
    let tasks = 9;
    let case = Case { slots, prefill: Some(tasks), ..case(DType::F32, 4, 2, 16) };
    case.verify();
    let data = case.data();
    let (width, of_head) = (4 * 16, 2 * 16); // columns of a row, and of the queries of a key-value head
    let mut inside_request = 0;
    let mut writers = vec![0; case.slots.iter().map(|(_, rows)| *rows as usize).sum::<usize>() * 2];
    for task in 0..tasks as usize {
        let runs = |op: &str, number| op == "attention_append" || op == "attention_prefill" && number == task;
        let out = case.run_with(&data, 0, &mut case.batch(&data), runs).0.values();
        // (row, head) of whole units.
        let written: Vec<usize> =
            (0..writers.len()).filter(|i| !out[i / 2 * width + i % 2 * of_head].is_nan()).collect();
        written.iter().for_each(|&i| writers[i] += 1);
        for head in 0..2 {
            let first = written.iter().filter(|&&i| i % 2 == head).map(|i| i / 2).min();
            // Rows of the prompt are 1..261.
            inside_request += usize::from(first.is_some_and(|row| (2..261).contains(&row)));
        }
    }
    // The merge writes those rows.
    let in_parts = writers.iter().filter(|&&n| n == 0).count();
    assert!(writers.iter().all(|&n| n <= 1), "a row is computed twice: {writers:?}");
    assert!(inside_request > 0, "no task starts inside the prompt");
    assert!(in_parts > 0, "no unit is cut");
}
