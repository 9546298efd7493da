//! Tests `token_logit` and `token_logprob` together, after the operators that they follow.

use crate::tasks::argmax_partial::reference::top;
use crate::testing::{TestBatch, TestOp, TestTensor, random_values};
use serde_json::json;
use taskgraph::{DType, Rows};

const NAN: f32 = f32::NAN;
const INFINITY: f32 = f32::INFINITY;

/// Log-probabilities of `tokens`, and the highest `top_k` tokens and log-probabilities of each sample.
fn run(logits: &[f32], tokens: &[i32], used: u32, top_k: u32) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
    let samples = tokens.len() as u32;
    let vocabulary = logits.len() as u32 / samples;
    let mut batch = TestBatch::rows(samples);
    batch.num_samples = used;
    let logits = TestTensor::new(DType::F32, &[samples, vocabulary], logits).with_rows(Rows::Samples);
    let op = |name, attrs| TestOp::new(name, attrs, samples);
    let mut inputs = [logits];
    let partials = op("argmax_partial", json!({"top_k": top_k, "tiles": 3})).run(&mut inputs, &mut batch);
    let [logits] = inputs;
    let best = json!({"top_k": top_k, "log_sum": true});
    let mut best = op("argmax_reduce", best)
        .run(&mut [partials.unwrap().remove(0).with_rows(Rows::Fixed)], &mut batch)
        .unwrap();
    let (log_sum, top_logprob, top_token) = (best.remove(3), best.remove(2), best.remove(1));
    let mut token = TestTensor::poisoned(DType::I32, &[samples]).with_rows(Rows::Samples);
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_ne_bytes()).collect();
    token.data.bytes_mut().copy_from_slice(&bytes);
    let logit = op("token_logit", json!({})).run(&mut [token, logits], &mut batch).unwrap().remove(0);
    let logprob = op("token_logprob", json!({})).run(&mut [logit, log_sum], &mut batch).unwrap().remove(0);
    (logprob.words(), top_token.words(), top_logprob.words())
}

/// Every token of a vocabulary, compared with float64, and bit by bit with its entry among the highest.
fn check(logits: &[f32], top_k: usize) {
    let wanted = top(logits, logits.len());
    for token in 0..logits.len() {
        let (found, tokens, logprobs) = run(logits, &[token as i32], 1, top_k as u32);
        let found = found[0];
        let wanted = wanted.iter().find(|(t, _)| *t == token as u32);
        let wanted = wanted.map_or(f64::NEG_INFINITY, |(_, logprob)| *logprob);
        let value = f64::from(f32::from_bits(found));
        let close = value == wanted || (value - wanted).abs() <= 2e-6 + 1e-6 * wanted.abs();
        assert!(close, "token {token}: {value} is not {wanted}");
        if let Some(at) = tokens.iter().position(|t| *t == token as u32) {
            assert_eq!(found, logprobs[at], "token {token} is number {at} of the highest");
        }
    }
}

#[test]
fn any_tokens_log_probability_is_that_of_float64() {
    let random = |seed, n| random_values(seed, n).iter().map(|v| v * 12.0).collect::<Vec<f32>>();
    check(&random(1, 203), 5);
    check(&[0.25; 40], 3);
    check(&[7.0], 1);
    let mut odd = random(2, 50);
    (odd[3], odd[9], odd[11]) = (NAN, -INFINITY, -200.0);
    check(&odd, 4);
    odd[20] = INFINITY;
    check(&odd, 4);
}

#[test]
fn samples_have_their_own_tokens_and_those_not_in_use_are_left_alone() {
    let logits: Vec<f32> = random_values(3, 3 * 100);
    let (found, ..) = run(&logits, &[99, 0, 5], 2, 2);
    for (sample, token) in [(0, 99), (1, 0)] {
        let row = &logits[sample * 100..][..100];
        let wanted = top(row, 100).iter().find(|t| t.0 == token).map(|t| t.1).unwrap();
        assert!((f64::from(f32::from_bits(found[sample])) - wanted).abs() < 1e-5);
    }
    assert_eq!(found[2], u32::MAX, "a sample that is not in use was written");
}

#[test]
fn wrong_operands_are_refused_by_name() {
    let tensor = |dtype, dims: &[u32]| TestTensor::poisoned(dtype, dims).with_rows(Rows::Samples);
    let refused = |name, attrs, inputs: &[TestTensor], words: &str| {
        let error = TestOp::new(name, attrs, 2).infer(inputs).unwrap_err();
        assert!(error.0.contains(words), "{}", error.0);
    };
    let logits = || tensor(DType::F32, &[2, 40]);
    refused("token_logit", json!({}), &[tensor(DType::F32, &[2]), logits()], "i32");
    refused("token_logit", json!({}), &[tensor(DType::I32, &[1]), logits()], "a token for each of 2 samples");
    refused("token_logit", json!({"slices": 0}), &[tensor(DType::I32, &[2]), logits()], "above 0");
    let sums = |slots| tensor(DType::U32, &[slots, 3]);
    refused("token_logprob", json!({}), &[tensor(DType::F32, &[1, 2]), sums(1)], "[2 or more, 3]");
    refused("token_logprob", json!({}), &[tensor(DType::I32, &[1, 2]), sums(2)], "f32");
    let records = tensor(DType::U32, &[1, 1, 2, 6]).with_rows(Rows::Fixed);
    refused("argmax_reduce", json!({"log_sum": true}), &[records], "`log_sum` needs `top_k` above 0");
}
