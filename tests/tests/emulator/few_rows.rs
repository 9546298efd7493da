//! Wide products of a batch of few rows, on several ranks.

use super::{Emulator, logprobs, toolkit};
use mpk_tests::{Job, ModelFile};
use serde_json::json;

/// Tiles of 16 rows of x, gated ones with 96 or 192 rows of the weight, and partial sums that are copied to the other rank, or pushed while the
/// products compute them. The tasks that sum also norm the sums, or not. What need not be inlined is compiled as functions. Twelve
/// requests of different lengths decode together.
#[test]
fn two_ranks_have_the_cpus_log_probabilities() {
    let Some(emulator) = Emulator::quick() else { return };
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 192, "intermediate_size": 640,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "vocab_size": 320, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": true, "hidden_act": "silu", "attention_bias": false, "dtype": "bfloat16",
    });
    let prompts: Vec<Vec<usize>> =
        (1..13).map(|length| (0..length).map(|i| 1 + (length + i * 37) % 300).collect()).collect();
    let model = ModelFile::random(config, 1)
        .set("max_batch", prompts.len())
        .set("page_size", 16)
        .set("runtime", json!({"prefill_chunk": 12}))
        .set("generate", json!({"prompt_tokens": prompts, "max_new_tokens": 4, "ignore_eos": true}));
    let asked = ["--logprobs", "5"];
    let cpu =
        Job::new(2).arg(model.path()).args(["--backend", "cpu", "--json"]).args(asked).run_beside_others();
    let cpu = cpu.json();
    let tuned = ["linear.gating_workers=1", "code.functions=1"].map(|value| ["--tune", value]).concat();
    let wanted = logprobs(&cpu);
    assert_eq!(wanted.len(), prompts.len() * 4 * 5);
    // With 7 workers, tiles of 32 rows of the weight are the fastest, and gated ones of 96.
    let ways = [
        ("4", "copy-reduce", "allreduce.joined_sums=0"),
        ("4", "one-shot", "allreduce.joined_sums=1"),
        ("7", "copy-reduce", "allreduce.joined_sums=2"),
        ("7", "one-shot", "allreduce.joined_sums=2"),
    ];
    let found = ways.map(|(workers, allreduce, joined)| {
        let way = ["--workers", workers, "--transport", "host", "--allreduce", allreduce, "--tune", joined];
        let options = [&asked[..], &way, &tuned].concat();
        let job = Job::new(2).env("MPK_EMULATOR_SMS", workers);
        let run = emulator.run_as(job, &model, &options, &toolkit());
        assert_eq!(run.tokens(), cpu.tokens(), "{workers} workers, {allreduce}, {joined}");
        logprobs(&run)
    });
    let differences = found.iter().flat_map(|of_way| of_way.iter().zip(&wanted).map(|(a, b)| (a - b).abs()));
    let most = differences.fold(0.0, f64::max);
    println!("log-probabilities differ by {most:.5} at most");
    assert!(most < 0.01, "{most}\n{found:?}\n{wanted:?}");
    // The ranks' parts are summed in the same order.
    assert_eq!(found[0], found[1]);
    assert_eq!(found[2], found[3]);
}
