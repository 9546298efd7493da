//! Model families of another crate, as a user of the library adds them: one that is a known decoder under another name, and
//! one whose graph is its own.

use launch::engine::config::BackendChoice;
use launch::engine::{Engine, ModelSpec, Request, RunConfig};
use launch::model::error::InputError;
use launch::model::families::{self, Family, GraphOptions};
use launch::model::hf_config::{Architecture, Defaults, ModelConfig, Traits};
use launch::model::json::Fields;
use launch::model::model_json::Sizes;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;
use taskgraph::op_graph::{Role, Tensor};
use taskgraph::{Capacity, DType, OpGraph, Rows, Sharding, Split};

const DEFAULTS: Defaults = Defaults {
    vocab_size: 100,
    hidden_size: 32,
    intermediate_size: 64,
    num_layers: 1,
    num_heads: 2,
    num_kv_heads: None,
    head_dim: None,
    max_position_embeddings: 512,
    eos: None,
};

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
        DEFAULTS
    }
    fn traits(&self, _: &Fields<'_>, _: u32) -> Result<Traits, InputError> {
        Ok(Traits::default())
    }
}

impl Family for Renamed {}

/// The next token follows from the last one alone: embedding, norm, head.
#[derive(Debug)]
struct Bigram;

impl Architecture for Bigram {
    fn name(&self) -> &'static str {
        "BigramLM"
    }
    fn model_type(&self) -> &'static str {
        "bigram"
    }
    fn defaults(&self) -> Defaults {
        DEFAULTS
    }
    fn traits(&self, fields: &Fields<'_>, _: u32) -> Result<Traits, InputError> {
        match fields.u32("order")? {
            None | Some(2) => Ok(Traits::default()),
            Some(_) => Err(fields.unsupported("order", "a longer memory", "only 2 is")),
        }
    }
}

impl Family for Bigram {
    fn op_graph(
        &self,
        config: &ModelConfig,
        sizes: &Sizes,
        options: &GraphOptions,
        name: &str,
        capacity: Capacity,
    ) -> OpGraph {
        let attrs = |value: Value| value.as_object().cloned().unwrap_or_default();
        let (vocabulary, hidden) = (u64::from(config.vocab_size), u64::from(config.hidden_size));
        let dtype = families::dtype(config);
        let mut g = OpGraph::new(name, capacity);
        let table = g.weight("table.weight", dtype, &[vocabulary, hidden], None);
        let x = g.op("embedding", "embedding", &[table], attrs(json!({})));
        let norm = g.weight("norm.weight", dtype, &[hidden], None);
        let x = g.op("norm", "rmsnorm", &[x, norm], attrs(json!({"eps": config.rms_norm_eps})));
        let head = g.weight("head.weight", dtype, &[vocabulary, hidden], Some((0, Split::Even { unit: 16 })));
        let logits =
            g.op("head", "linear", &[x, head], attrs(json!({"gather_samples": true, "output_dtype": "f32"})));
        let records = json!({"top_k": 0, "slices": options.ranks, "tiles": options.argmax_tiles});
        let partials = g.op("argmax_partial", "argmax_partial", &[logits], attrs(records));
        let next = g.add_tensor(Tensor {
            name: "batch.next_token".into(),
            dtype: DType::I32,
            dims: vec![u64::from(sizes.max_batch)],
            rows: Rows::Samples,
            role: Role::Persistent { region_dims: None },
            sharding: Sharding::Replicated,
            output: false,
        });
        g.op_into("argmax_reduce", "argmax_reduce", &[partials], &[next], attrs(json!({"top_k": 0})));
        g
    }
}

fn load(spec: ModelSpec) -> Engine {
    let config = RunConfig { backend: BackendChoice::Cpu, tell: |_| {}, ..RunConfig::default() };
    Engine::load(spec, config).unwrap()
}

#[test]
fn families_of_another_crate_run() {
    families::add(&Renamed).unwrap();
    families::add(&Bigram).unwrap();
    assert!(families::add(&Bigram).is_err_and(|problem| problem.contains("BigramLM")));
    assert_eq!(families::all().len(), 6);

    // Tokens that transformers computed for the Llama checkpoint.
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/llama");
    let folder = tempfile::tempdir().unwrap();
    for file in ["model.safetensors", "model.json", "generation_config.json", "tokenizer.json"] {
        std::fs::copy(fixture.join(file), folder.path().join(file)).unwrap();
    }
    let read = |name: &str| -> Value {
        serde_json::from_slice(&std::fs::read(fixture.join(name)).unwrap()).unwrap()
    };
    let mut config = read("config.json");
    config["architectures"] = json!(["RenamedForCausalLM"]);
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let ids =
        |v: &Value| v.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect::<Vec<_>>();
    let request = &read("expected.json")["requests"][0];
    let tokens = &ids(&request["tokens"])[..request["finish_length"].as_u64().unwrap() as usize];
    let engine = load(ModelSpec::path(folder.path().join("model.json")));
    let prompt = ids(&request["prompt_tokens"]);
    let answer = engine.submit(Request::tokens(prompt, tokens.len() as u32)).unwrap().wait();
    assert_eq!(answer.tokens, tokens);
    engine.shutdown(Duration::MAX).unwrap();

    let bigram = |order: u32| {
        let model = json!({"schema": "mpk-model/1", "config": {"model_type": "bigram", "order": order},
            "weights": {"random": {"seed": 5}}, "max_batch": 2, "max_seq_len": 128});
        ModelSpec::json(&model.to_string()).unwrap()
    };
    let engine = load(bigram(2));
    let requests = (0..40).map(|first| Request::tokens(vec![first], 30)).collect();
    let handles = engine.submit_all(requests).unwrap();
    let mut follows = HashMap::new();
    for (first, handle) in (0u32..).zip(handles) {
        let mut last = first;
        for token in handle.wait().tokens {
            assert_eq!(*follows.entry(last).or_insert(token), token, "what follows {last}");
            last = token;
        }
    }
    assert!(follows.len() >= 40);
    engine.shutdown(Duration::MAX).unwrap();

    let config = RunConfig { backend: BackendChoice::Cpu, tell: |_| {}, ..RunConfig::default() };
    let problem = Engine::load(bigram(3), config).err().unwrap().to_string();
    assert!(problem.contains("`config.order`") && problem.contains("only 2 is"), "{problem}");
}
