//! Proves that shapes without common divisors run on every number of ranks that divides the query heads. Random f32
//! weights, whose winners are clear, give the same tokens on one rank and on several, with both placements and every
//! lowering; runs that differ only in placement and lowering give the same bits.

use mpk_tests::{Job, ModelFile};
use serde_json::{Value, json};

fn config(architecture: &str, change: Value) -> Value {
    let mut config = json!({
        "architectures": [architecture], "dtype": "float32", "hidden_size": 65, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 10, "intermediate_size": 51,
        "vocab_size": 131, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": false, "eos_token_id": null,
    });
    for (name, value) in change.as_object().expect("an object") {
        config[name] = value.clone();
    }
    config
}

fn check(what: &str, config: &Value, ranks: &[u32], change: impl Fn(ModelFile) -> ModelFile) {
    let vocabulary = config["vocab_size"].as_u64().expect("a number");
    let prompt = |length: u64| (0..length).map(|i| i * 7 % vocabulary).collect::<Vec<_>>();
    let prompts = [1, 40, 5, 17, 2, 1, 33].map(prompt);
    let model = change(
        ModelFile::random(config.clone(), 3)
            .set("max_batch", 4)
            .set("max_seq_len", 128)
            .set("generate", json!({"prompt_tokens": prompts, "max_new_tokens": 12})),
    );
    let mut tokens = None;
    for &ranks in ranks {
        let mut result = None;
        let choices =
            [("static", "auto"), ("dynamic", "copy-reduce"), ("static", "two-shot"), ("dynamic", "one-shot")];
        for (placement, lowering) in &choices[..if ranks == 1 { 2 } else { 4 }] {
            let job =
                Job::new(ranks).arg(model.path()).args(["--placement", placement, "--allreduce", lowering]);
            let found = job.args(["--logprobs", "2"]).run_json();
            let what = format!("{what}, {ranks} ranks, {placement}, {lowering}");
            assert_eq!(found.tokens(), *tokens.get_or_insert_with(|| found.tokens()), "{what}: tokens");
            assert!(found.result() == *result.get_or_insert_with(|| found.result()), "{what}: other bits");
        }
    }
}

#[test]
fn seven_heads_on_seven_ranks() {
    let config = config("LlamaForCausalLM", json!({"num_attention_heads": 7, "num_key_value_heads": 7}));
    check("7 heads", &config, &[1, 7], |m| m);
}

#[test]
fn one_key_value_head_on_sixteen_ranks() {
    let change = json!({"num_attention_heads": 16, "num_key_value_heads": 1, "tie_word_embeddings": true, "vocab_size": 17});
    check("1 KV head", &config("Qwen3ForCausalLM", change), &[1, 2, 16], |m| m);
}

/// Fewer indices than ranks: some ranks hold nothing of a tensor.
#[test]
fn fewer_indices_than_ranks() {
    check("5 hidden", &config("MistralForCausalLM", json!({"hidden_size": 5})), &[1, 8], |m| m);
    check("5 tokens", &config("MistralForCausalLM", json!({"vocab_size": 5})), &[1, 8], |m| m);
    check("3 in the MLP", &config("MistralForCausalLM", json!({"intermediate_size": 3})), &[1, 8], |m| m);
}

#[test]
fn many_workers_and_large_pages() {
    let config = config("Qwen2ForCausalLM", json!({"attention_bias": true}));
    check("33 workers", &config, &[1, 2], |m| m.set("runtime.workers", 33));
    check("one page", &config, &[1, 2], |m| m.set("page_size", 65_536));
}

/// The smallest of everything: one slot, two positions.
#[test]
fn smallest_sizes() {
    let change =
        json!({"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1, "head_dim": 2});
    let model = ModelFile::random(config("Qwen3ForCausalLM", change), 3)
        .set("max_batch", 1)
        .set("max_seq_len", 2)
        .set("page_size", 1)
        .set("runtime.prefill_chunk", 1)
        .set("generate", json!({"prompt_tokens": [[1], [2], [3]], "max_new_tokens": 5}));
    let alone = Job::new(1).arg(model.path()).run_json();
    assert!(
        alone.requests.iter().all(|r| r.tokens.len() == 1),
        "two positions hold a prompt and a new token"
    );
    let both = Job::new(2).arg(model.path()).run_json();
    assert_eq!(both.tokens(), alone.tokens());
}
