use super::reference::{draw, filtered, philox, processed};
use crate::abi::{
    MPK_COUNT_IN_PROMPT, MPK_SAMPLING_NOISE, MPK_SAMPLING_ON, MPK_SAMPLING_PENALTIES, MPK_WEIGH_ENTRIES,
    MPK_WEIGH_ENTRY_WORDS, mpk_sampling,
};
use crate::isa::Isa;
use crate::registry::registry;
use crate::testing::{Call, TestBatch, TestRank, TestTask, TestTensor, run_task};
use serde_json::json;
use taskgraph::op_graph::Role;
use taskgraph::task_type::{LocalOp, OpView, OperandView, TensorType};
use taskgraph::{Capacity, DType, Rows, Sharding, Target};

mod steps;
use steps::{Case, logits, plain, sample, ways, words};

unsafe extern "C" {
    fn mpk_philox4x32_10(counter: *const u32, key: *const u32, out: *mut u32);
    fn mpk_gumbel(word: u32) -> f32;
    fn mpk_most_gumbel(word: u32) -> f32;
}

#[test]
fn philox_gives_the_published_words() {
    // kat_vectors of Random123, philox4x32 with 10 rounds.
    let vectors: [([u32; 4], [u32; 2], [u32; 4]); 3] = [
        ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
        ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
        (
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        ),
    ];
    for (counter, key, wanted) in vectors {
        let mut got = [0; 4];
        // SAFETY: reads four and two words, writes four.
        unsafe { mpk_philox4x32_10(counter.as_ptr(), key.as_ptr(), got.as_mut_ptr()) };
        assert_eq!(got, wanted);
        assert_eq!(philox(counter, key), wanted);
    }
}

/// The token follows from noise and distribution, so equal tokens for many positions show that both are right. If two
/// noisy values are too close for f32 to tell them apart, either token is accepted.
#[test]
fn draws_what_the_reference_draws() {
    let mut compared = 0;
    for (vocabulary, scale) in [(40usize, 3.0), (331, 6.0), (5003, 2.0), (5003, 12.0)] {
        let row = logits(vocabulary as u64, vocabulary, scale);
        for s in ways(0x1234_5678_9abc_def0) {
            let values = processed(&row, &vec![(false, 0); vocabulary], &s);
            let positions: Vec<u32> = (1..6).collect();
            let case = Case::new(vec![row.clone(); 5], vec![s; 5], &positions);
            let (tokens, _) = sample(&case, 1, 3);
            for (&token, &position) in tokens.iter().zip(&positions) {
                if s.flags & MPK_SAMPLING_NOISE == 0 {
                    assert_eq!(token as usize, super::reference::order(&values)[0]);
                    continue;
                }
                let (wanted, margin) = draw(&values, &s, position);
                if margin > 1e-4 {
                    assert_eq!(token as usize, wanted, "{vocabulary} tokens, position {position}, {s:?}");
                    compared += 1;
                }
            }
        }
    }
    assert!(compared > 400, "{compared}");
}

/// The number and weight that decide about each entry of the frontier, compared with float64.
#[test]
fn weights_are_those_of_the_distribution() {
    for (vocabulary, scale) in [(331usize, 6.0), (5003, 1.0), (5003, 20.0)] {
        let row = logits(3, vocabulary, scale);
        let s = mpk_sampling { top_p: 0.9, ..plain(9) };
        let values = processed(&row, &vec![(false, 0); vocabulary], &s);
        let order = super::reference::order(&values);
        let all: f64 = order.iter().map(|&t| (values[t] - values[order[0]]).exp()).sum();
        let case = Case::new(vec![row], vec![s], &[4]);
        let parts = 3;
        let (_, weighed) = sample(&case, 2, parts);
        let records: Vec<Vec<u32>> =
            weighed.words().chunks(weighed.dims[3] as usize).map(<[u32]>::to_vec).collect();
        let low_high = |r: &[u32], at: usize| f64::from(r[at]) + f64::from(r[at + 1]) * 2f64.powi(32);
        let sum: f64 = records.iter().map(|r| low_high(r, 2)).sum();
        assert!((sum / 2f64.powi(31) / all - 1.0).abs() < 1e-6, "{} and {all}", sum / 2f64.powi(31));
        assert!(records[0][0] > 1, "one entry only");
        for i in 0..records[0][0] as usize {
            let at = MPK_WEIGH_ENTRIES as usize + i * MPK_WEIGH_ENTRY_WORDS as usize;
            let place = order.iter().position(|&t| t == records[0][at + 2] as usize).unwrap();
            let tokens: u32 = records.iter().map(|r| r[at + 3]).sum();
            assert_eq!(tokens as usize, place);
            let before: f64 = order[..place].iter().map(|&t| (values[t] - values[order[0]]).exp()).sum();
            let got = records.iter().map(|r| low_high(r, at + 4)).sum::<f64>() / sum;
            assert!((got - before / all).abs() < 1e-6, "entry {i}: {got} and {}", before / all);
        }
    }
}

/// Pearson's test of 100,000 draws for each set of parameters: from as many positions, and from as many seeds.
#[test]
fn draws_follow_the_filtered_distribution() {
    const DRAWS: usize = 100_000;
    const AT_ONCE: usize = 500;
    if crate::sanitizer::enabled() {
        return; // too slow there, and other tests touch the same memory
    }
    let row = logits(17, 30, 2.5);
    let tests = [
        plain(1),
        mpk_sampling { inverse_temperature: 0.5, top_p: 0.8, ..plain(2) },
        mpk_sampling { top_k: 9, top_p: 0.9, log_min_p: 0.01f32.ln(), ..plain(3) },
    ];
    for (number, s) in tests.into_iter().enumerate() {
        let wanted = filtered(&processed(&row, &[(false, 0); 30], &s), &s);
        let mut times = vec![0u32; row.len()];
        for first in (0..DRAWS).step_by(AT_ONCE) {
            let each = |i: usize| mpk_sampling { seed: s.seed + if number == 1 { i as u64 } else { 0 }, ..s };
            let sampling = (first..first + AT_ONCE).map(each).collect();
            let positions: Vec<u32> =
                (first..first + AT_ONCE).map(|i| if number == 1 { 5 } else { 1 + i as u32 }).collect();
            let case = Case::new(vec![row.clone(); AT_ONCE], sampling, &positions);
            sample(&case, 1, 1).0.iter().for_each(|&t| times[t as usize] += 1);
        }
        let (mut chi2, mut free) = (0.0, -1.0);
        for (&times, &p) in times.iter().zip(&wanted) {
            if p == 0.0 {
                assert_eq!(times, 0, "a token that a filter drops was drawn");
                continue;
            }
            let expected = p * DRAWS as f64;
            assert!(expected > 5.0, "too rare for the test: {p}");
            chi2 += (f64::from(times) - expected).powi(2) / expected;
            free += 1.0;
        }
        // Wilson and Hilferty: this is about normal.
        let normal = ((chi2 / free).cbrt() - (1.0 - 2.0 / (9.0 * free))) / (2.0f64 / (9.0 * free)).sqrt();
        assert!(normal.abs() < 4.0, "chi-square {chi2} with {free} degrees of freedom, {s:?}");
    }
}

#[test]
fn tokens_do_not_depend_on_ranks_parts_slots_or_neighbours() {
    for (vocabulary, scale) in [(203usize, 4.0), (5003, 1.5)] {
        let rows: Vec<Vec<f32>> = vec![
            logits(1, vocabulary, scale),
            vec![0.25; vocabulary], // all equal: the filters cut by token id
            logits(2, vocabulary, scale),
        ];
        for s in ways(77) {
            let sampling =
                vec![s, mpk_sampling { seed: 78, ..s }, mpk_sampling { top_p: 0.5, top_k: 0, ..s }];
            let case = Case::new(rows.clone(), sampling.clone(), &[10, 11, 12]);
            let (tokens, _) = sample(&case, 1, 1);
            for (world, parts) in [(1, 4), (2, 1), (2, 3), (4, 2)] {
                assert_eq!(tokens, sample(&case, world, parts).0, "{world} ranks, {parts} parts, {s:?}");
            }
            // The last request alone, in slot 2 of a batch of one.
            let mut alone = Case::new(vec![rows[2].clone()], sampling, &[12]);
            alone.batch.active_slot = vec![2];
            alone.counts = vec![vec![0; vocabulary]; 3];
            assert_eq!(tokens[2..], sample(&alone, 2, 2).0, "{s:?}");
        }
    }
}

#[test]
fn all_levels_give_the_same_tokens() {
    let case = Case::new(vec![logits(5, 997, 3.0); 26], ways(5), &(1..27).collect::<Vec<_>>());
    let results: Vec<_> = Isa::ALL.into_iter().filter_map(|isa| isa.with(|| sample(&case, 1, 2).0)).collect();
    assert!(results.iter().all(|r| *r == results[0]), "{results:?}");
}

#[test]
fn greedy_requests_get_the_highest_logit_and_of_equal_ones_the_first() {
    // As the host writes it: without sampling, all numbers are 0.
    let off =
        mpk_sampling { seed: 0, flags: 0, inverse_temperature: 0.0, top_p: 0.0, log_min_p: 0.0, ..plain(1) };
    let mut row = logits(5, 99, 3.0);
    row[40] = 3.5;
    row[70] = 3.5;
    let zeros: Vec<f32> =
        (0..99).map(|i| if i < 9 { -1.0 } else { -0.0 * (i as f32) + 0.0 * (i % 2) as f32 }).collect();
    for world in [1, 2, 4] {
        let mut case =
            Case::new(vec![row.clone(), row.clone(), zeros.clone()], vec![off, plain(3), off], &[1, 2, 3]);
        let tokens = sample(&case, world, 2).0;
        assert_eq!((tokens[0], tokens[2]), (40, 9));
        assert!(tokens[1] < 99);
        case.batch.sampling.clear(); // a batch without sampled requests
        assert_eq!(sample(&case, world, 2).0, [40, 40, 9]);
    }
}

#[test]
fn nan_and_infinity_still_give_a_token() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let mut mixed = logits(8, 64, 3.0);
    mixed[3] = nan;
    mixed[5] = -inf;
    let mut above = mixed.clone();
    above[50] = inf;
    for s in ways(11) {
        for world in [1, 2] {
            let rows = vec![vec![nan; 64], vec![-inf; 64], mixed.clone(), above.clone()];
            let tokens = sample(&Case::new(rows, vec![s; 4], &[1; 4]), world, 2).0;
            assert!(tokens[..2].iter().all(|t| *t < 64), "{tokens:?}");
            assert!(![3, 5].contains(&tokens[2]), "{tokens:?} {s:?}");
            assert_eq!(tokens[3], 50, "{s:?}");
        }
    }
}

#[test]
fn penalties_are_the_reference_s() {
    let vocabulary = 97;
    let s = mpk_sampling {
        flags: MPK_SAMPLING_ON | MPK_SAMPLING_NOISE | MPK_SAMPLING_PENALTIES,
        repetition: 1.3,
        inverse_repetition: 1.0 / 1.3,
        presence: 0.4,
        frequency: 0.7,
        top_k: 20,
        ..plain(4)
    };
    let seen: Vec<(bool, u32)> = (0..vocabulary)
        .map(|t| match t % 5 {
            0 => (true, 0),
            1 => (true, t % 3 + 1),
            _ => (false, 0),
        })
        .collect();
    let row = logits(6, vocabulary as usize, 3.0);
    let values = processed(&row, &seen, &s);
    let positions: Vec<u32> = (1..30).collect();
    let mut case = Case::new(vec![row; 29], vec![s; 29], &positions);
    let counts = seen.iter().enumerate().map(|(t, &(stands, times))| match (stands, times) {
        (false, _) => 0,
        // As a token of the prompt, or only as a new token.
        (true, times) if times == 0 || t % 2 == 0 => MPK_COUNT_IN_PROMPT | times,
        (true, times) => times,
    });
    let counts: Vec<u32> = counts.collect();
    case.counts = vec![counts; 29];
    for (&token, &position) in sample(&case, 2, 2).0.iter().zip(&positions) {
        let (wanted, margin) = draw(&values, &s, position);
        assert!(margin < 1e-4 || token as usize == wanted, "position {position}");
    }
}

/// Counts of sequences that take turns in the slots, compared with counting by hand.
#[test]
fn counts_are_those_of_the_sequence_in_the_slot() {
    let (vocabulary, slots) = (50u32, 3u32);
    let penalties = mpk_sampling { flags: MPK_SAMPLING_ON | MPK_SAMPLING_PENALTIES, ..plain(0) };
    let mut counts = words(DType::U32, &[slots, vocabulary], &vec![0xdead_beef; 150]);
    // (slot, prompt length, tokens) of sequences that several iterations process, some rows at a time.
    let sequences: [(i32, u32, Vec<i32>); 3] = [
        (1, 4, vec![3, 3, 9, 49, 3, 9, 0]),
        (1, 2, vec![7, 8, 8, 8, 7]),              // the slot's next request
        (1, 4, vec![3, 3, 9, 49, 3, 9, 0, 0, 1]), // the first request again, after it was preempted
    ];
    for (slot, prompt, tokens) in sequences {
        let mut context = 0;
        // A chunk of the prompt, the rest of it, then token by token; the second time all at once.
        let anew = tokens.len() == 9;
        while context < tokens.len() {
            let rows = if anew {
                7.min(tokens.len() - context)
            } else if context == 0 {
                2
            } else {
                1
            };
            let mut batch = TestBatch {
                num_rows: rows as u32 + 2,
                num_active: 2,
                active_slot: vec![0, slot],
                active_first_row: vec![0, 2],
                active_num_rows: vec![2, rows as i32],
                active_context: vec![0, context as i32],
                row_token: [vec![3, 4], tokens[context..context + rows].to_vec()].concat(),
                row_position: [vec![0, 1], (context..context + rows).map(|p| p as i32).collect()].concat(),
                // Slot 0 has a request without penalties: its counts stay as they are.
                sampling: vec![plain(0), mpk_sampling { num_prompt_tokens: prompt, ..penalties }, plain(0)],
                ..TestBatch::default()
            };
            let attrs = json!({"tiles": 2}).as_object().unwrap().clone();
            let contract = registry().get("token_counts").unwrap().clone();
            let view = OpView {
                name: "test",
                attrs: &attrs,
                inputs: vec![OperandView {
                    name: "counts",
                    ty: counts.ty(),
                    sharding: &Sharding::Replicated,
                    role: &Role::Activation,
                }],
                outputs: Vec::new(),
                capacity: Capacity { rows: 9, samples: 2, active: 2 },
            };
            let op = LocalOp {
                global: &view,
                inputs: vec![counts.ty()],
                outputs: vec![counts.ty()],
                rank: 0,
                world: 1,
            };
            for spec in contract.partition(&op, &Target::cpu(1)).unwrap().tasks {
                let view = counts.view(&spec.reads[0]);
                let task = TestTask {
                    params: vec![0],
                    args: spec.args,
                    inputs: vec![view],
                    outputs: vec![view],
                    ..TestTask::default()
                };
                assert_eq!(run_task("token_counts", &task, &mut batch, &TestRank::default(), Call::Run), 0);
            }
            context += rows;
        }
        let mut wanted = vec![0u32; vocabulary as usize];
        for (position, &token) in tokens.iter().enumerate() {
            let word = &mut wanted[token as usize];
            *word = if (position as u32) < prompt { *word | MPK_COUNT_IN_PROMPT } else { *word + 1 };
        }
        let got = counts.words();
        assert_eq!(got[slot as usize * 50..][..50], wanted[..]);
        assert!(got[..50].iter().chain(&got[100..]).all(|w| *w == 0xdead_beef), "another slot was touched");
    }
}

#[test]
fn parts_fit_the_gpu_s_memory_and_keep_its_workers_busy() {
    for vocabulary in [99u64, 32_000, 128_256, 151_936, 262_144] {
        for world in [1, 2, 4, 8] {
            for samples in [1, 2, 8, 64] {
                for (workers, tiles) in [(1, 1), (2, 8), (132, 132), (132, 131)] {
                    let parts = super::parts(vocabulary, world, samples, workers, tiles);
                    let share = vocabulary.div_ceil(u64::from(world)).next_multiple_of(16) + 16;
                    let widest = crate::tasks::argmax_partial::cut(share as u32, parts);
                    let widest = widest.iter().map(|r| r.end - r.start).max().unwrap();
                    assert!(
                        widest <= crate::tasks::sample_family::MOST_COLUMNS,
                        "{vocabulary} {world} {parts}"
                    );
                }
            }
        }
    }
    assert_eq!(super::parts(151_936, 1, 1, 132, 131), 75); // no part is narrower than 2,048 columns
    assert_eq!(super::parts(151_936, 1, 1, 132, 132), 66); // each has two tiles
    assert_eq!(super::parts(151_936, 4, 8, 132, 131), 16);
    assert_eq!(super::parts(151_936, 4, 8, 132, 132), 12);
}

/// Every sample and part has one task, and a worker of an H100 has one task, whatever the batch.
#[test]
fn a_worker_has_one_task_of_some_samples() {
    for (samples, parts, tasks) in [(1, 66, 66), (2, 66, 132), (8, 33, 132), (32, 33, 132), (128, 33, 132)] {
        assert_eq!(super::parts(151_936, 1, samples, 132, 132), parts, "{samples} samples");
        let attrs = json!({"slices": 1, "parts": parts, "kept": 1024}).as_object().unwrap().clone();
        let matrix =
            |rows| TensorType { dtype: DType::F32, dims: vec![u64::from(rows), 151_936], rows: Rows::Fixed };
        let inputs = || vec![matrix(samples), TensorType { dtype: DType::U32, ..matrix(128) }];
        let operand =
            |ty| OperandView { name: "input", ty, sharding: &Sharding::Replicated, role: &Role::Activation };
        let view = OpView {
            name: "test",
            attrs: &attrs,
            inputs: inputs().into_iter().map(operand).collect(),
            outputs: Vec::new(),
            capacity: Capacity { rows: samples, samples, active: samples },
        };
        let op = LocalOp { global: &view, inputs: inputs(), outputs: Vec::new(), rank: 0, world: 1 };
        let contract = registry().get("sample_partial").unwrap().clone();
        let partition = contract.partition(&op, &Target { workers: 132, ..Target::cpu(1) }).unwrap();
        assert_eq!(partition.tasks.len(), tasks, "{samples} samples");
        let mut times = vec![0; samples as usize * parts as usize];
        for task in partition.tasks {
            let [part, _, _, first, count, ..] = task.args.map(|a| a as usize);
            (first..first + count).for_each(|sample| times[sample * parts as usize + part] += 1);
        }
        assert!(times.iter().all(|&n| n == 1), "{samples} samples: {times:?}");
    }
}

/// The GPU code does not compute the noise of a token that this bound excludes.
#[test]
fn no_noise_is_above_its_bound() {
    let words = (0..32).flat_map(|bit| [(1u32 << bit) - 1, 1 << bit, (1 << bit) + 1, 3 << bit >> 1]);
    let more = (0..1_000_000u32).map(|i| i.wrapping_mul(0x9E37_79B9));
    for word in words.chain(more).chain([u32::MAX]) {
        // SAFETY: both are plain arithmetic.
        let (noise, bound) = unsafe { (mpk_gumbel(word), mpk_most_gumbel(word)) };
        assert!(noise < bound, "{word:#x}: {noise} and {bound}");
        // For the high noise that decides, the bound is close.
        assert!(noise < 3.0 || bound - noise < 0.1, "{word:#x}: {noise} and {bound}");
    }
}

/// A short list is chosen for what it costs only: the frontier gives the same tokens.
#[test]
fn a_short_list_gives_the_frontier_s_tokens() {
    let (vocabulary, samples) = (2003usize, 20u32);
    let row = logits(12, vocabulary, 2.0);
    let positions: Vec<u32> = (1..=samples).collect();
    for min_p in [0.0f32, 0.05] {
        let tokens = |top_k, top_p| {
            let s = mpk_sampling { top_k, top_p, log_min_p: min_p.ln(), ..plain(21) };
            sample(
                &Case::new(vec![row.clone(); samples as usize], vec![s; samples as usize], &positions),
                2,
                3,
            )
        };
        // A `top_p` below 1 that keeps all makes a list of any length.
        let all = 1.0 - f32::EPSILON / 2.0;
        for top_k in [64, 65, 300] {
            let (found, listed) = (tokens(top_k, 1.0), tokens(top_k, all));
            assert_eq!(found.0, listed.0, "top-k {top_k}, min-p {min_p}");
            let weighed = |weighed: &TestTensor| weighed.words() != untouched(weighed);
            assert_eq!((weighed(&found.1), weighed(&listed.1)), (top_k > 64, false), "top-k {top_k}");
        }
    }
}

fn untouched(like: &TestTensor) -> Vec<u32> {
    TestTensor::poisoned(like.dtype, &like.dims).words()
}
