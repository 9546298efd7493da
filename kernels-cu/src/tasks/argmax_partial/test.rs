use super::{cut, reference::top, tiles, words};
use crate::abi::{MPK_SAMPLING_ON, mpk_sampling};
use crate::isa::Isa;
use crate::registry::registry;
use crate::testing::{Call, TestRank, TestTask};
use crate::testing::{TestBatch, TestOp, TestTensor, random_values, run_task};
use serde_json::json;
use taskgraph::op_graph::Role;
use taskgraph::task_type::{LocalOp, OpView, OperandView, TensorType};
use taskgraph::{Capacity, DType, Rows, Sharding, Split, Target};

/// Runs both operators on `world` ranks. Returns next tokens, top tokens and log-probabilities, and the records.
fn exchange(
    logits: &[f32],
    samples: u32,
    used: u32,
    top_k: u32,
    world: u32,
    workers: u32,
    replicated: bool,
) -> (Vec<TestTensor>, Vec<u8>) {
    let vocabulary = logits.len() as u64 / u64::from(samples);
    let target = Target::cpu(workers);
    let tiles = tiles(vocabulary, world, &target);
    let attrs = json!({"top_k": top_k, "slices": world, "tiles": tiles});
    let attrs = attrs.as_object().unwrap().clone();
    let split = Split::Even { unit: 1 };
    let sharding =
        if world == 1 || replicated { Sharding::Replicated } else { Sharding::split(1, vocabulary, split) };
    let contract = registry().get("argmax_partial").unwrap().clone();
    let mut batch = TestBatch::rows(samples);
    batch.num_samples = used;
    batch.hash = 0x1234_5678_9abc_def0;
    let mut gathered = Vec::new();
    for rank in 0..world {
        let own = if world == 1 || replicated { 0..vocabulary } else { split.range(vocabulary, rank, world) };
        let local: Vec<f32> = logits
            .chunks(vocabulary as usize)
            .flat_map(|row| row[own.start as usize..own.end as usize].iter().copied())
            .collect();
        let width = (own.end - own.start) as u32;
        let mut input = TestTensor::new(DType::F32, &[samples, width], &local).with_rows(Rows::Samples);
        let ty =
            TensorType { dtype: DType::F32, dims: vec![u64::from(samples), vocabulary], rows: Rows::Samples };
        let mut view = OpView {
            name: "test",
            attrs: &attrs,
            inputs: vec![OperandView { name: "logits", ty, sharding: &sharding, role: &Role::Activation }],
            outputs: Vec::new(),
            capacity: Capacity { rows: samples, samples, active: samples },
        };
        let out = contract.infer(&view).unwrap().remove(0);
        let rule = contract.shard(&view, world).unwrap();
        let out_sharding = rule.outputs[0].clone();
        view.outputs = vec![OperandView {
            name: "partials",
            ty: out.clone(),
            sharding: &out_sharding,
            role: &Role::Activation,
        }];
        let local_dims = out_sharding.local_dims(&out.dims, rank, world);
        assert_eq!(local_dims[0], 1, "a rank writes its own slice");
        let op = LocalOp {
            global: &view,
            inputs: vec![input.ty()],
            outputs: vec![TensorType { dims: local_dims.clone(), ..out }],
            rank,
            world,
        };
        let partition = contract.partition(&op, &target).unwrap();
        let dims: Vec<u32> = local_dims.iter().map(|d| *d as u32).collect();
        crate::testing::assert_covered_once(&partition, 0, &dims);
        let mut slice = TestTensor::poisoned(DType::U32, &dims);
        for spec in &partition.tasks {
            let task = TestTask {
                params: partition.params.clone(),
                args: spec.args,
                inputs: spec.reads.iter().map(|r| input.view(r)).collect(),
                outputs: spec.writes.iter().map(|w| slice.view(w)).collect(),
                scratch_bytes: partition.scratch_bytes,
            };
            let code = run_task("argmax_partial", &task, &mut batch, &TestRank::default(), Call::Run);
            assert_eq!(code, 0);
        }
        gathered.extend_from_slice(slice.data.bytes());
    }
    let mut partials = TestTensor::poisoned(DType::U32, &[world, tiles, samples, words(top_k) as u32]);
    partials.data.bytes_mut().copy_from_slice(&gathered);
    let mut inputs = [partials.with_rows(Rows::Fixed)];
    let op = TestOp::new("argmax_reduce", json!({"top_k": top_k}), samples);
    (op.run(&mut inputs, &mut batch).unwrap(), gathered)
}

fn check(logits: &[f32], samples: u32, used: u32, top_k: u32, world: u32, workers: u32) {
    let vocabulary = logits.len() / samples as usize;
    let what = format!("{samples} x {vocabulary}, top {top_k}, {world} ranks, {workers} workers");
    let mut bits: Option<Vec<u8>> = None;
    for isa in Isa::ALL {
        for replicated in [false, true] {
            let run = || exchange(logits, samples, used, top_k, world, workers, replicated);
            let Some((got, records)) = isa.with(run) else { continue };
            if !replicated {
                let first = bits.get_or_insert_with(|| records.clone());
                assert!(*first == records, "{what}: {isa:?} gives other bits");
            }
            for s in 0..samples as usize {
                let next = got[0].words()[s];
                if s >= used as usize {
                    assert_eq!(next, u32::MAX, "{what}: a sample that is not in use was written");
                    continue;
                }
                let expected = top(&logits[s * vocabulary..][..vocabulary], top_k.max(1) as usize);
                assert_eq!(next, expected[0].0, "{what}: sample {s}");
                if top_k == 0 {
                    continue;
                }
                let k = top_k as usize;
                let (tokens, logprobs) = (&got[1].words()[s * k..][..k], &got[2].values()[s * k..][..k]);
                for i in 0..k {
                    let (token, logprob) =
                        expected.get(i).map_or((u32::MAX, f64::NEG_INFINITY), |(t, l)| (*t, *l));
                    assert_eq!(tokens[i], token, "{what}: sample {s}, place {i}");
                    let error = (f64::from(logprobs[i]) - logprob).abs();
                    let close = f64::from(logprobs[i]) == logprob || error <= 2e-6 + 1e-6 * logprob.abs();
                    assert!(close, "{what}: {} is not {logprob}", logprobs[i]);
                }
            }
        }
    }
}

fn random_logits(seed: u64, n: usize) -> Vec<f32> {
    random_values(seed, n).iter().map(|v| v * 12.0).collect()
}

#[test]
fn finds_the_best_tokens_and_their_log_probabilities() {
    for vocabulary in [1usize, 15, 16, 203, 331, 1024, 5003] {
        for (top_k, world, workers) in [(0, 1, 1), (1, 1, 3), (5, 2, 2), (5, 4, 7), (20, 3, 2)] {
            check(&random_logits(vocabulary as u64, 3 * vocabulary), 3, 2, top_k, world, workers);
        }
    }
    check(&random_logits(9, 151_936), 1, 1, 5, 2, 2);
}

#[test]
fn ties_take_the_lowest_token_wherever_the_tiles_meet() {
    for world in [1, 2, 4] {
        check(&vec![0.5; 2 * 200], 2, 2, 7, world, 3);
        let mut logits = random_logits(4, 400);
        for i in (0..400).step_by(37) {
            logits[i] = 20.0;
        }
        check(&logits, 1, 1, 9, world, 3);
    }
}

#[test]
fn nan_and_infinity_still_give_a_token() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    for world in [1, 2] {
        for top_k in [0, 3] {
            let mut logits = random_logits(5, 100);
            for i in (0..100).step_by(3) {
                logits[i] = nan;
            }
            check(&logits, 1, 1, top_k, world, 2);
            check(&vec![nan; 100], 1, 1, 0, world, 2);
            check(&vec![-inf; 100], 1, 1, 0, world, 2);
            logits[50] = -inf;
            check(&logits, 1, 1, top_k, world, 2);
            logits[71] = inf;
            logits[93] = inf;
            check(&logits, 1, 1, top_k, world, 2);
        }
    }
}

#[test]
fn padding_columns_are_never_chosen() {
    let mut logits = random_logits(6, 64);
    logits[60] = 100.0;
    let mut inputs = [TestTensor::new(DType::F32, &[1, 64], &logits).with_rows(Rows::Samples)];
    let op = TestOp::new("argmax_partial", json!({"vocab_size": 60, "tiles": 5}), 1);
    let records = op.run(&mut inputs, &mut TestBatch::rows(1)).unwrap();
    let best = top(&logits[..60], 1)[0].0;
    let tokens: Vec<u32> = records[0].words().chunks(6).map(|r| r[5]).collect();
    assert_eq!(tokens.len(), 5);
    assert!(tokens.contains(&best) && !tokens.contains(&60), "{tokens:?}");
    assert_eq!(tokens[4], u32::MAX, "64 columns are four tiles, the fifth has none");
}

/// Requests of one batch that want 0, 2, 5 and 9 of 5 log-probabilities get 0, 2, 5 and 5, with the bits of one that gets all.
#[test]
fn a_request_gets_as_many_log_probabilities_as_it_wants() {
    let (samples, top_k, none) = (4usize, 5usize, f32::NEG_INFINITY.to_bits());
    let logits = random_logits(7, samples * 500);
    let slot_of = [2, 0, 3, 1];
    let wanted_by_slot = [2u32, 9, 0, 5];
    let run = |sampling: Vec<mpk_sampling>| {
        let mut batch =
            TestBatch { active_slot: slot_of.to_vec(), sampling, ..TestBatch::rows(samples as u32) };
        let mut inputs = [TestTensor::new(DType::F32, &[4, 500], &logits).with_rows(Rows::Samples)];
        let partial = TestOp::new("argmax_partial", json!({"top_k": top_k, "tiles": 3}), 4);
        let mut records = partial.run(&mut inputs, &mut batch).unwrap();
        let reduce = TestOp::new("argmax_reduce", json!({"top_k": top_k}), 4);
        reduce.run(&mut [records.remove(0).with_rows(Rows::Fixed)], &mut batch).unwrap()
    };
    let sampling: Vec<mpk_sampling> =
        wanted_by_slot.iter().map(|&logprobs| mpk_sampling { logprobs, ..Default::default() }).collect();
    for isa in Isa::ALL {
        let Some((all, got)) = isa.with(|| (run(Vec::new()), run(sampling.clone()))) else { continue };
        assert_eq!(all[0].words(), got[0].words(), "{isa:?}: the next tokens");
        for sample in 0..samples {
            let wanted = (wanted_by_slot[slot_of[sample] as usize] as usize).min(top_k);
            for (output, missing) in [(1, u32::MAX), (2, none)] {
                let row =
                    |tensors: &[TestTensor]| tensors[output].words()[sample * top_k..][..top_k].to_vec();
                // The highest one is computed for the next token anyway.
                let expected = |place: usize| if place < wanted.max(1) { row(&all)[place] } else { missing };
                assert_eq!(
                    row(&got),
                    (0..top_k).map(expected).collect::<Vec<_>>(),
                    "{isa:?}: sample {sample}"
                );
            }
        }
    }
}

/// Where the sampling operators find the tokens, a request without log-probabilities has no candidates and gets no token here.
#[test]
fn with_sampling_requests_without_log_probabilities_are_left_alone() {
    let (samples, top_k) = (4usize, 2usize);
    let logits = random_logits(8, samples * 500);
    let request = |flags, logprobs| mpk_sampling { flags, logprobs, ..Default::default() };
    let on = MPK_SAMPLING_ON;
    let sampling = vec![request(0, 0), request(on, 0), request(on, 2), request(0, 1)];
    let run = |sampled: bool| {
        let mut batch = TestBatch { sampling: sampling.clone(), ..TestBatch::rows(samples as u32) };
        let mut inputs = [TestTensor::new(DType::F32, &[4, 500], &logits).with_rows(Rows::Samples)];
        let partial = json!({"top_k": top_k, "tiles": 3, "sampled": sampled});
        let mut records = TestOp::new("argmax_partial", partial, 4).run(&mut inputs, &mut batch).unwrap();
        let reduce = TestOp::new("argmax_reduce", json!({"top_k": top_k, "sampled": sampled}), 4);
        reduce.run(&mut [records.remove(0).with_rows(Rows::Fixed)], &mut batch).unwrap()
    };
    for isa in Isa::ALL {
        let Some((all, got)) = isa.with(|| (run(false), run(true))) else { continue };
        for output in 0..3 {
            let each = got[output].words().len() / samples;
            let row = |tensors: &[TestTensor], s: usize| tensors[output].words()[s * each..][..each].to_vec();
            let untouched = TestTensor::poisoned(DType::U32, &[each as u32]).words();
            for (s, request) in sampling.iter().enumerate() {
                let expected = if request.logprobs == 0 { untouched.clone() } else { row(&all, s) };
                assert_eq!(row(&got, s), expected, "{isa:?}: output {output}, sample {s}");
            }
        }
    }
}

#[test]
fn tiles_are_the_target_s() {
    for columns in [0u32, 1, 16, 203, 4096, 18_992] {
        for workers in [1, 2, 7, 132] {
            let wanted = Target::cpu(workers).column_tiles(columns, 1);
            let got = cut(columns, workers);
            assert_eq!(got[..wanted.len()], wanted[..]);
            assert!(got[wanted.len()..].iter().all(|r| r.start == columns && r.end == columns));
        }
    }
}

#[test]
fn records_hold_the_hash_and_ordered_pairs() {
    let mut logits = vec![0.0; 40];
    logits[..6].copy_from_slice(&[1.0, 5.0, 5.0, f32::NAN, 5.0, 6.0]);
    let mut inputs = [TestTensor::new(DType::F32, &[1, 40], &logits).with_rows(Rows::Samples)];
    let mut batch = TestBatch::rows(1);
    batch.hash = 0xaaaa_bbbb_cccc_dddd;
    let op = TestOp::new("argmax_partial", json!({"top_k": 4}), 1);
    let record = op.run(&mut inputs, &mut batch).unwrap()[0].words();
    assert_eq!(record[..3], [0xcccc_dddd, 0xaaaa_bbbb, 6f32.to_bits()]);
    let sum = 1.0 + 3.0 * (-1f64).exp() + (-5f64).exp() + 34.0 * (-6f64).exp();
    assert!((f64::from(f32::from_bits(record[3])) - sum).abs() < 1e-6 * sum);
    let pairs: Vec<(f32, u32)> = record[4..].chunks(2).map(|p| (f32::from_bits(p[0]), p[1])).collect();
    assert_eq!(pairs, [(6.0, 5), (5.0, 1), (5.0, 2), (5.0, 4)]);
}
