//! Sampling: the tokens of the CPU target, whatever the settings.

use super::{Emulator, changing, on_cpu, toolkit};
use mpk_tests::{Job, ModelFile};
use serde_json::json;
use std::path::Path;

/// So many tokens that a sample has several parts.
fn model() -> ModelFile {
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "vocab_size": 9040, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": false, "hidden_act": "silu", "attention_bias": false, "dtype": "bfloat16",
    });
    let prompts: Vec<Vec<u64>> = (1..9).map(|i| vec![i * 11, i]).collect();
    ModelFile::random(config, 1)
        .set("max_batch", 8)
        .set("max_seq_len", 64)
        .set("runtime", json!({"prefill_chunk": 8}))
        .set("generate", json!({"prompt_tokens": prompts, "max_new_tokens": 2, "ignore_eos": true}))
}

const SETTINGS: [&str; 9] = [
    "--temperature 0.8 --top-p 0.95",
    "--temperature 0.02 --top-p 0.95",
    "--temperature 0.8",
    "--temperature 0.8 --top-k 20",
    "--temperature 0.6 --top-k 20 --top-p 0.95",
    "--temperature 3 --top-k 300",
    "--temperature 3 --top-k 300 --top-p 0.9",
    "--temperature 1 --min-p 0.1 --repetition-penalty 1.3",
    "--temperature 100 --top-p 0.9",
];

fn arguments(settings: &'static str) -> Vec<&'static str> {
    settings.split(' ').chain(["--seed", "5"]).collect()
}

/// Every way to choose a token, of several samples a task. The same holds with so little room that the candidates of a sample do not fit
/// and that lists are found digit by digit, by warps of which all but the first are slow. Lost candidates are detected.
#[test]
fn tokens_are_the_cpus_whatever_the_sampling() {
    let Some(emulator) = Emulator::quick() else { return };
    let model = model();
    let cpu = SETTINGS.map(|s| on_cpu(&model, &arguments(s)).tokens());
    let differing = |toolkit: &Path, times: usize| -> Vec<&str> {
        let cache = tempfile::tempdir().expect("a temporary folder");
        let tokens = |s| {
            let job = Job::alone().arg(model.path()).args(arguments(s)).arg("--json");
            let job = emulator.job(job, toolkit).env("MPK_CACHE_DIR", &cache.path().display().to_string());
            job.run_beside_others().json().tokens()
        };
        let pairs = SETTINGS.into_iter().zip(&cpu).take(times);
        pairs.filter(|(s, cpu)| tokens(*s) != **cpu).map(|(s, _)| s).collect()
    };
    assert_eq!(differing(&toolkit(), SETTINGS.len()), Vec::<&str>::new());
    let partial = "src/tasks/sample_partial/gpu.cuh";
    let small = [
        (partial, "kPool = 1024", "kPool = 16"),
        ("src/tasks/sample_partial/gpu_few.cuh", "kKeys = 320", "kKeys = 8"),
        (
            "src/tasks/sample_partial/gpu_sample.cuh",
            "const uint32_t taken = room->taken;",
            "if (context.warp != 0) __nanosleep(50000); const uint32_t taken = room->taken;",
        ),
    ];
    assert_eq!(
        differing(&changing(&emulator, "small", &small), SETTINGS.len()),
        Vec::<&str>::new(),
        "little room"
    );
    let from = "const uint32_t place = candidates.used";
    let to = "if (sampling::key_of(own[u], columns.first_token + i + u) < top.key) continue; const uint32_t place = candidates.used";
    let wrong = changing(&emulator, "wrong", &[(partial, from, to)]);
    assert_eq!(differing(&wrong, 1), SETTINGS[..1], "lost candidates are not seen");
}

/// Two ranks exchange records and lists, which each of them merges first.
#[test]
fn two_ranks_choose_the_cpus_tokens() {
    let Some(emulator) = Emulator::quick() else { return };
    let model = model();
    let cache = emulator.folder.path().join("two-ranks").display().to_string();
    for settings in [
        "--temperature 0.8 --top-p 0.95",
        "--temperature 0.8 --top-k 20",
        "--temperature 3 --top-k 300 --top-p 0.9",
    ] {
        let arguments = [&arguments(settings)[..], &["--allreduce", "copy-reduce", "--json"]].concat();
        let cpu = Job::new(2).arg(model.path()).args(["--backend", "cpu"]).args(&arguments);
        let found = Job::new(2).arg(model.path()).args(["--transport", "host"]).args(&arguments);
        let found = emulator.job(found, &toolkit()).env("MPK_CACHE_DIR", &cache).run_beside_others().json();
        assert_eq!(found.tokens(), cpu.run_beside_others().json().tokens(), "{settings}");
    }
}
