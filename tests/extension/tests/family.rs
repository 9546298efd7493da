//! Additions of another crate run as a model on one and two ranks, and give the tokens and log-probabilities of a
//! reference in f64.

use launch::engine::config::BackendChoice;
use launch::engine::{Engine, ModelSpec, Request, RunConfig};
use launch::model::families::{self, Family};
use launch::model::hf_config::{Architecture, Defaults, Traits};
use launch::model::{error::InputError, json::Fields};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const VOCABULARY: usize = 61;
const HIDDEN: usize = 24;
const EPSILON: f64 = 1e-5;
const TOP: usize = 3;
/// Tells the checkpoint to the ranks that a test starts.
const CHECKPOINT: &str = "EXTENSION_CHECKPOINT";

struct Weights {
    table: Vec<f32>,
    block: Vec<f32>,
    norm: Vec<f32>,
    head: Vec<f32>,
}

impl Weights {
    fn new() -> Weights {
        let mut state = 7u64;
        let mut values = |n: usize| -> Vec<f32> {
            let next = |_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
            };
            (0..n).map(next).collect()
        };
        Weights {
            table: values(VOCABULARY * HIDDEN),
            block: values(HIDDEN * HIDDEN),
            norm: values(HIDDEN),
            head: values(VOCABULARY * HIDDEN),
        }
    }

    /// Writes a folder as Hugging Face publishes it, with a model.json.
    fn write(&self, folder: &Path) {
        let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
        for (name, dims, values) in [
            ("table.weight", vec![VOCABULARY, HIDDEN], &self.table),
            ("block.weight", vec![HIDDEN, HIDDEN], &self.block),
            ("norm.weight", vec![HIDDEN], &self.norm),
            ("head.weight", vec![VOCABULARY, HIDDEN], &self.head),
        ] {
            let first = data.len();
            values.iter().for_each(|v| data.extend(v.to_le_bytes()));
            let entry = json!({"dtype": "F32", "shape": dims, "data_offsets": [first, data.len()]});
            header.insert(name.into(), entry);
        }
        let header = Value::Object(header).to_string();
        let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
        std::fs::write(folder.join("model.safetensors"), file).unwrap();
        let config = json!({"architectures": ["BigramLM"], "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
            "rms_norm_eps": EPSILON, "torch_dtype": "float32"});
        std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
        let model = json!({"schema": "mpk-model/1", "checkpoint": ".", "max_batch": 4, "max_seq_len": 64});
        std::fs::write(folder.join("model.json"), model.to_string()).unwrap();
    }

    /// Log-probabilities of the tokens after `token`, highest first.
    fn after(&self, token: usize) -> Vec<(usize, f64)> {
        let row = |matrix: &[f32], row: usize, x: &[f64]| -> f64 {
            matrix[row * HIDDEN..][..HIDDEN].iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum()
        };
        let x: Vec<f64> = self.table[token * HIDDEN..][..HIDDEN].iter().map(|&v| f64::from(v)).collect();
        let y: Vec<f64> = (0..HIDDEN).map(|n| x[n] - row(&self.block, n, &x)).collect();
        let scale = (y.iter().map(|v| v * v).sum::<f64>() / HIDDEN as f64 + EPSILON).sqrt();
        let y: Vec<f64> = y.iter().zip(&self.norm).map(|(v, &w)| v / scale * f64::from(w)).collect();
        let logits: Vec<f64> = (0..VOCABULARY).map(|n| row(&self.head, n, &y)).collect();
        let sum = logits.iter().map(|v| v.exp()).sum::<f64>().ln();
        let mut all: Vec<(usize, f64)> = logits.into_iter().map(|v| v - sum).enumerate().collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        assert!(all.windows(2).take(TOP).all(|w| w[0].1 - w[1].1 > 1e-5), "a tie: take other weights");
        all
    }
}

fn engine(spec: ModelSpec) -> Result<Engine, launch::engine::Error> {
    let logprobs = TOP as u32;
    let config = RunConfig { backend: BackendChoice::Cpu, tell: |_| {}, logprobs, ..RunConfig::default() };
    Engine::load(spec, config)
}

/// Not a test, but a rank of the next test's jobs: prints the tokens after each token, and their log-probabilities.
#[test]
#[ignore = "a rank of the test below"]
fn rank() {
    extension::add();
    let Some(checkpoint) = std::env::var_os(CHECKPOINT) else { return };
    let engine = engine(ModelSpec::path(Path::new(&checkpoint).join("model.json"))).unwrap();
    if engine.info().rank > 0 {
        return engine.serve().unwrap();
    }
    let request = |first| Request { logprobs: TOP as u32, ..Request::tokens(vec![first], 12) };
    let handles = engine.submit_all((0..VOCABULARY as u32).map(request).collect()).unwrap();
    for handle in handles {
        let answer = handle.wait();
        println!("\nanswer {}", json!({"tokens": answer.tokens, "logprobs": answer.logprobs}));
    }
    engine.shutdown(Duration::MAX).unwrap();
}

#[test]
fn a_family_runs_on_one_and_two_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let weights = Weights::new();
    weights.write(folder.path());
    let program = std::env::current_exe().unwrap();
    let arguments = ["--ignored", "--exact", "rank", "--nocapture", "--test-threads=1"];
    for ranks in ["1", "2"] {
        let mut job = Command::new("mpirun");
        let output = job.args(["-n", ranks]).arg(&program).args(arguments).env(CHECKPOINT, folder.path());
        let output = output.output().expect("mpirun starts");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success(),
            "{ranks} ranks: {text}\n{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let answers: Vec<Value> = text
            .lines()
            .filter_map(|line| line.strip_prefix("answer "))
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(answers.len(), VOCABULARY, "{ranks} ranks: {text}");
        for (mut last, answer) in answers.iter().enumerate() {
            let (tokens, logprobs) = (answer["tokens"].as_array().unwrap(), &answer["logprobs"]);
            assert_eq!(tokens.len(), 12);
            for (step, token) in tokens.iter().enumerate() {
                let expected = weights.after(last);
                assert_eq!(token.as_u64(), Some(expected[0].0 as u64), "{ranks} ranks: what follows {last}");
                for (found, expected) in logprobs[step].as_array().unwrap().iter().zip(&expected[..TOP]) {
                    assert_eq!(found[0].as_u64(), Some(expected.0 as u64), "{ranks} ranks, after {last}");
                    assert!((found[1].as_f64().unwrap() - expected.1).abs() < 1e-4, "{found} {expected:?}");
                }
                assert_eq!(logprobs[step].as_array().unwrap().len(), TOP);
                last = expected[0].0;
            }
        }
    }
}

#[test]
fn a_name_is_added_once_and_unsupported_models_are_refused() {
    extension::add();
    assert!(families::add(&extension::bigram::Bigram).is_err_and(|problem| problem.contains("BigramLM")));
    let model = json!({"schema": "mpk-model/1", "config": {"model_type": "bigram", "order": 3},
        "weights": {"random": {"seed": 5}}, "max_batch": 2, "max_seq_len": 128});
    let problem = engine(ModelSpec::json(&model.to_string()).unwrap()).err().unwrap().to_string();
    assert!(problem.contains("`config.order`") && problem.contains("only 2 is"), "{problem}");
}

/// Llama under another name.
#[derive(Debug)]
struct Renamed;

impl Architecture for Renamed {
    fn name(&self) -> &'static str {
        "RenamedForCausalLM"
    }
    fn model_type(&self) -> &'static str {
        "renamed"
    }
    fn defaults(&self) -> Defaults {
        extension::bigram::Bigram.defaults()
    }
    fn traits(&self, _: &Fields<'_>, _: u32) -> Result<Traits, InputError> {
        Ok(Traits::default())
    }
}

impl Family for Renamed {}

/// A decoder like the built-in ones overrides nothing: it gives the tokens that transformers computed for the Llama
/// checkpoint.
#[test]
fn a_decoder_under_another_name_runs() {
    families::add(&Renamed).unwrap();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/llama");
    let folder = tempfile::tempdir().unwrap();
    for file in ["model.safetensors", "model.json", "generation_config.json", "tokenizer.json"] {
        std::fs::copy(fixture.join(file), folder.path().join(file)).unwrap();
    }
    let read = |name: &str| -> Value {
        serde_json::from_slice(&std::fs::read(fixture.join(name)).unwrap()).unwrap()
    };
    let mut config = read("config.json");
    config["architectures"] = json!(["RenamedForCausalLM"]);
    config["model_type"] = json!("renamed");
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let ids =
        |v: &Value| v.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect::<Vec<_>>();
    let request = &read("expected.json")["requests"][0];
    let tokens = &ids(&request["tokens"])[..request["finish_length"].as_u64().unwrap() as usize];
    let engine = engine(ModelSpec::path(folder.path().join("model.json"))).unwrap();
    let prompt = ids(&request["prompt_tokens"]);
    let answer = engine.submit(Request::tokens(prompt, tokens.len() as u32)).unwrap().wait();
    assert_eq!(answer.tokens, tokens);
    engine.shutdown(Duration::MAX).unwrap();
}
