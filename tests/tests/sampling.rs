//! Proves that tokens are drawn as asked, from the checkpoint to the output. Each token is the one that a reference draws
//! from the log-probabilities that the run reports, on one rank and on several, with both placements, in slots that are
//! reused. The reference sorts in float64 and has its own Philox. Also covers which options are in force, and what is
//! refused.

use mpk_tests::{Job, ModelFile};
use serde_json::{Value, json};

const SEED: u64 = 0x0123_4567_89ab_cdef;
const VOCABULARY: u32 = 120;

/// The options of a run.
#[derive(Clone, Copy, Debug)]
struct Options {
    temperature: f64,
    top_k: usize,
    top_p: f64,
    min_p: f64,
    presence: f64,
    frequency: f64,
}

const PLAIN: Options =
    Options { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, presence: 0.0, frequency: 0.0 };

impl Options {
    fn arguments(&self) -> Vec<String> {
        let mut arguments = vec![format!("--temperature={}", self.temperature), format!("--seed={SEED}")];
        let mut add = |name: &str, value: f64, none: f64| {
            if value != none {
                arguments.push(format!("--{name}={value}"));
            }
        };
        add("top-k", self.top_k as f64, 0.0);
        add("top-p", self.top_p, 1.0);
        add("min-p", self.min_p, 0.0);
        add("presence-penalty", self.presence, 0.0);
        add("frequency-penalty", self.frequency, 0.0);
        arguments
    }

    /// The drawn token, and the margin of the decision. `logprobs` are those of all tokens; `before`: the new tokens so
    /// far.
    fn draw(&self, logprobs: &[(u32, f64)], before: &[u32], position: u32) -> (u32, f64) {
        let mut values: Vec<(u32, f64)> = logprobs
            .iter()
            .map(|&(token, value)| {
                let times = before.iter().filter(|t| **t == token).count() as f64;
                let penalty = if times > 0.0 { self.presence + self.frequency * times } else { 0.0 };
                let divided = if self.temperature > 0.0 { self.temperature } else { 1.0 };
                (token, (value - penalty) / divided)
            })
            .collect();
        values.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let highest = values[0].1;
        let mut margin = f64::INFINITY; // also towards tokens that a filter has dropped
        let weight = |value: f64| (value - highest).exp();
        if self.min_p > 0.0 {
            values.retain(|v| weight(v.1) >= self.min_p);
        }
        if self.top_k > 0 {
            values.truncate(self.top_k);
        }
        let all: f64 = values.iter().map(|v| weight(v.1)).sum();
        let mut sum = 0.0;
        let mut kept = 0;
        for &(_, value) in &values {
            margin = margin.min((sum / all - self.top_p).abs() * 10.0);
            if self.top_p < 1.0 && kept > 0 && sum >= self.top_p * all {
                break;
            }
            sum += weight(value);
            kept += 1;
        }
        values.truncate(kept);
        if self.temperature == 0.0 {
            return (values[0].0, values.get(1).map_or(margin, |v| values[0].1 - v.1));
        }
        let mut noisy: Vec<(u32, f64)> =
            values.iter().map(|&(token, value)| (token, value + noise(position, token))).collect();
        noisy.sort_by(|a, b| b.1.total_cmp(&a.1));
        (noisy[0].0, noisy.get(1).map_or(margin, |v| margin.min(noisy[0].1 - v.1)))
    }
}

/// Gumbel noise of Philox4x32-10.
fn noise(position: u32, token: u32) -> f64 {
    let (mut c, mut k) = ([position, token, 0, 0], [SEED as u32, (SEED >> 32) as u32]);
    for _ in 0..10 {
        let (a, b) = (u64::from(c[0]) * 0xD251_1F53, u64::from(c[2]) * 0xCD9E_8D57);
        c = [(b >> 32) as u32 ^ c[1] ^ k[0], b as u32, (a >> 32) as u32 ^ c[3] ^ k[1], a as u32];
        k = [k[0].wrapping_add(0x9E37_79B9), k[1].wrapping_add(0xBB67_AE85)];
    }
    let v = (f64::from(c[0]) + 0.5) / 2f64.powi(32);
    -(-(-v).ln_1p()).ln()
}

fn config() -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"], "dtype": "float32", "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
        "vocab_size": VOCABULARY, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": false, "eos_token_id": null,
    })
}

/// More requests than slots; a prompt longer than a chunk.
fn model() -> ModelFile {
    let prompt = |length: u32| (0..length).map(|i| i * 7 % VOCABULARY).collect::<Vec<_>>();
    let prompts = [3, 20, 1, 5].map(prompt);
    ModelFile::random(config(), 3)
        .set("max_batch", 2)
        .set("max_seq_len", 64)
        .set("page_size", 16)
        .set("runtime.prefill_chunk", 8)
        .set("generate", json!({"prompt_tokens": prompts, "max_new_tokens": 10}))
}

fn job(model: &ModelFile, ranks: u32, placement: &str, options: &Options) -> Job {
    let job = Job::new(ranks).arg(model.path()).args(["--backend", "cpu", "--placement", placement]);
    job.args(options.arguments())
}

#[test]
fn tokens_are_those_that_the_reference_draws() {
    let model = model();
    let all = [
        Options { temperature: 1.3, ..PLAIN },
        Options { temperature: 0.8, top_k: 40, top_p: 0.9, presence: 0.5, frequency: 0.3, ..PLAIN },
        Options { temperature: 0.7, top_p: 0.8, min_p: 0.02, frequency: -0.4, ..PLAIN },
        Options { temperature: 0.0, presence: 1.5, frequency: 0.5, ..PLAIN },
        Options { top_k: 5, ..PLAIN },
    ];
    let (mut compared, mut first) = (0, 0);
    for options in all {
        for (ranks, placement) in [(1, "static"), (2, "dynamic"), (4, "static")] {
            let run = job(&model, ranks, placement, &options).args(["--logprobs", "120"]).run_json();
            for (number, request) in run.requests.iter().enumerate() {
                let logprobs = request.logprobs.as_ref().expect("log-probabilities");
                assert_eq!(request.tokens.len(), 10);
                for (at, (&token, logprobs)) in request.tokens.iter().zip(logprobs).enumerate() {
                    assert_eq!(logprobs.len(), VOCABULARY as usize);
                    let position = (request.prompt_tokens.len() + at) as u32;
                    let (wanted, margin) = options.draw(logprobs, &request.tokens[..at], position);
                    if margin > 1e-3 {
                        let what =
                            format!("{ranks} ranks, {placement}, request {number}, token {at}: {options:?}");
                        assert_eq!(token, wanted, "{what}");
                        compared += 1;
                        first += u32::from(token == logprobs[0].0);
                    }
                }
            }
        }
    }
    assert!(compared > 550, "only {compared} of 600 draws are clear");
    assert!(first < compared / 2, "{first} of {compared} tokens are the greedy ones");
}

/// With `--logprobs 2` most sampled tokens are not among the two best. Each still has its own log-probability: bit for bit the one
/// in a list of the whole vocabulary, which sums to 1. It is that of the model's own distribution, whatever the penalties,
/// temperature and filters, and has the same bits with every placement and lowering.
#[test]
fn the_log_probability_of_a_sampled_token_is_known_wherever_it_stands() {
    let model = model();
    let all = [
        Options { temperature: 1.3, ..PLAIN },
        Options { temperature: 0.8, top_k: 40, top_p: 0.95, presence: 0.5, frequency: 0.3, ..PLAIN },
        Options { temperature: 0.0, presence: 1.5, frequency: 0.5, ..PLAIN },
    ];
    let (mut outside, mut compared) = (0, 0);
    for options in all {
        for ranks in [1, 2, 4] {
            let run = |placement, lowering, logprobs| {
                let job = job(&model, ranks, placement, &options);
                job.args(["--allreduce", lowering, "--logprobs", logprobs]).run_json()
            };
            let whole = run("static", "copy-reduce", "120");
            let first = run("static", "one-shot", "2");
            let what = format!("{ranks} ranks, {options:?}");
            assert_eq!(first.result(), run("dynamic", "two-shot", "2").result(), "{what}");
            assert_eq!(first.tokens(), whole.tokens(), "{what}");
            for (request, whole) in first.requests.iter().zip(&whole.requests) {
                let own = request.token_logprobs.as_ref().expect("the tokens' log-probabilities");
                assert_eq!(own.len(), request.tokens.len());
                let (best, lists) = (request.logprobs.as_ref().unwrap(), whole.logprobs.as_ref().unwrap());
                for (at, (&token, list)) in request.tokens.iter().zip(lists).enumerate() {
                    let total: f64 = list.iter().map(|(_, logprob)| logprob.exp()).sum();
                    assert!((total - 1.0).abs() < 1e-4, "{what}: {total}");
                    let wanted = list.iter().find(|(id, _)| *id == token).expect("the whole vocabulary").1;
                    assert_eq!(own[at], wanted, "{what}, token {at}: {token}");
                    outside += u32::from(best[at].iter().all(|(id, _)| *id != token));
                    compared += 1;
                }
            }
        }
    }
    assert!(compared == 360 && outside > 200, "{outside} of {compared} tokens are not among the best two");
}

/// A request alone draws the same tokens as among others; other seeds draw other tokens.
#[test]
fn draws_depend_on_the_request_alone() {
    let model = model();
    let options = Options { temperature: 1.2, top_p: 0.95, presence: 0.3, ..PLAIN };
    let all = job(&model, 2, "static", &options).run_json();
    let prompt = all.requests[1].prompt_tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let alone = job(&model, 2, "dynamic", &options).args(["--prompt-tokens", &prompt]).run_json();
    assert_eq!(alone.requests[0].tokens, all.requests[1].tokens);
    let other = Job::new(2).arg(model.path()).args(["--temperature", "1.2", "--seed", "8"]).run_json();
    assert_ne!(other.tokens(), all.tokens());
    // Without a seed every run has a different one, the same on all ranks.
    let run = || Job::new(2).arg(model.path()).args(["--temperature", "1.2"]).run_json().tokens();
    assert_ne!(run(), run());
}

/// `do_sample: true` turns sampling on without an option; an option, or model.json, overrides it.
#[test]
fn generation_config_applies_unless_overridden() {
    let prompt = ["--prompt-tokens", "5,6,7", "--max-new-tokens", "12", "--ignore-eos"];
    let fixture = || ModelFile::copy_of_fixture("qwen3");
    let greedy = Job::new(1).arg(fixture().path()).args(prompt).run_json().tokens();
    let sampled = |temperature: f64| {
        fixture().edit("generation_config.json", |file| {
            file["do_sample"] = json!(true);
            file["temperature"] = json!(temperature);
        })
    };
    let hot = sampled(20.0);
    let finished = Job::new(1).arg(hot.path()).args(prompt).args(["--seed", "1", "--json"]).run().expect(0);
    let line = "sampling: temperature 20, top-k 50, seed 1";
    assert!(finished.stderr.contains(line), "{}", finished.stderr);
    assert_ne!(finished.json().tokens(), greedy);
    for options in [vec!["--greedy"], vec!["--temperature", "0"], vec!["--top-k", "1"]] {
        assert_eq!(Job::new(2).arg(hot.path()).args(prompt).args(&options).run_json().tokens(), greedy);
    }
    let quiet = sampled(20.0).set("generate.greedy", true);
    assert_eq!(Job::new(1).arg(quiet.path()).args(prompt).run_json().tokens(), greedy);
}

#[test]
fn options_that_cannot_take_effect_are_refused_by_name() {
    let model = model();
    let refused = |job: Job, words: &[&str]| {
        let finished = job.run().expect(2);
        for word in words {
            assert!(finished.stderr.contains(word), "{word}: {}", finished.stderr);
        }
        assert_eq!(finished.stdout, "");
        finished.expect_nothing_left();
    };
    let run = |arguments: &[&str]| Job::new(2).arg(model.path()).args(arguments);
    refused(run(&["--temperature", "-0.5"]), &["--temperature: must be 0 to 100, found -0.5"]);
    refused(run(&["--top-p", "0"]), &["--top-p: must be above 0 and at most 1"]);
    refused(run(&["--min-p", "1.5"]), &["--min-p: must be 0 to 1"]);
    refused(run(&["--repetition-penalty", "0"]), &["--repetition-penalty: must be 0.01 to 100"]);
    refused(run(&["--presence-penalty", "nan"]), &["--presence-penalty: must be -2 to 2"]);
    refused(run(&["--top-k", "-3"]), &["--top-k"]);
    refused(run(&["--greedy", "--top-p", "0.5"]), &["--greedy", "--top-p"]);
    let wrong = ModelFile::random(config(), 3).set("generate", json!({"prompt_tokens": [[1]], "top_p": 7}));
    refused(Job::new(1).arg(wrong.path()), &["`generate.top_p`: must be above 0 and at most 1, found 7"]);
    let wrong = ModelFile::random(config(), 3).set("generate", json!({"prompt_tokens": [[1]], "seed": -1}));
    refused(Job::new(1).arg(wrong.path()), &["generate.seed"]);
    let mut large = config();
    large["vocab_size"] = json!(2000);
    let large = ModelFile::random(large, 3).set("generate", json!({"prompt_tokens": [[1]]}));
    let both = Job::new(1).arg(large.path()).args(["--top-k", "1500", "--top-p", "0.9"]);
    refused(both, &["--top-k: 1500 is more than 1024"]);
}
