//! Runs the GPU's own code without a GPU: the emulator (`docs/emulator.md`) takes the place of the CUDA driver and runs
//! nvcc's PTX of the kernel. The CPU target shares no code with it, so results on which both agree are taken as
//! correct, and an error that the test puts into the sources is found. Without nvcc the tests say so and pass; with
//! `MPK_REQUIRE_CUDA=1` they fail. Most of a test is one run of the compiler on one core, so tests run side by side. The operators and
//! prefill attention with heads of 128 are compiled as on a GPU, all else with few optimizations, in a fifth of the time. Most tests
//! that are not about prompts set `prefill_chunk` to `max_batch`: then prompts run in the decode graphs, and less than half is compiled.

use mpk_tests::fixtures::Fixture;
use mpk_tests::reference;
use mpk_tests::run_json::Output;
use mpk_tests::toolkit::{executable, nvcc, repository};
use mpk_tests::{Job, ModelFile, RunJson};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

#[path = "emulator/candidates.rs"]
mod candidates;
#[path = "emulator/few_rows.rs"]
mod few_rows;
#[path = "emulator/sampling.rs"]
mod sampling;

/// The emulator's replacement for a CUDA toolkit.
fn toolkit() -> PathBuf {
    repository().join("kernels-cu/emulator/toolkit")
}

/// A machine with an emulated GPU.
struct Emulator {
    folder: TempDir,
    nvcc: PathBuf,
    quick: bool,
}

impl Emulator {
    /// Compiles as for a GPU.
    fn new() -> Option<Self> {
        Self::with(false)
    }

    /// Compiles with few optimizations. Then a kernel that does not wait for a product's sums is not found.
    fn quick() -> Option<Self> {
        Self::with(true)
    }

    fn with(quick: bool) -> Option<Self> {
        let nvcc = nvcc()?;
        let folder = tempfile::Builder::new().prefix("mpk-emulator").tempdir().expect("a temporary folder");
        // A dependency of this test, so it is built into the same folder.
        let program = std::env::current_exe().expect("this program");
        let library = program.with_file_name("libemulator.so");
        assert!(library.is_file(), "{} is missing", library.display());
        symlink(library, folder.path().join("libcuda.so")).expect("a link");
        Some(Emulator { folder, nvcc, quick })
    }

    /// Runs a model on it, and returns the result.
    fn run(&self, model: &ModelFile, arguments: &[&str], toolkit: &Path) -> RunJson {
        self.run_as(Job::alone(), model, arguments, toolkit)
    }

    /// The same as a job with any number of ranks, which share the GPU.
    fn run_as(&self, job: Job, model: &ModelFile, arguments: &[&str], toolkit: &Path) -> RunJson {
        let found =
            self.job(job.arg(model.path()).args(arguments).arg("--json"), toolkit).run_beside_others().json();
        assert_eq!(found.backend, "cuda");
        found
    }

    /// This job on the emulated GPU.
    fn job(&self, job: Job, toolkit: &Path) -> Job {
        let text = |path: &Path| path.display().to_string();
        let others = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
        let cache = tempfile::tempdir_in(self.folder.path()).expect("a temporary folder").keep();
        job.args(["--backend", "cuda", "--deadline", "200"])
            .env("LD_LIBRARY_PATH", &format!("{}:{others}", text(self.folder.path())))
            .env("CUDA_HOME", &text(toolkit))
            .env("MPK_EMULATOR_NVCC", &text(&self.nvcc))
            .env("MPK_EMULATOR_QUICK", if self.quick { "1" } else { "0" })
            .env("MPK_CACHE_DIR", &text(&cache))
            .env("MPK_DEBUG_POISON", "1")
            .timeout(Duration::from_secs(280))
    }
}

/// The result of the CPU target.
fn on_cpu(model: &ModelFile, arguments: &[&str]) -> RunJson {
    let job = Job::new(1).arg(model.path()).args(["--backend", "cpu", "--json"]).args(arguments);
    job.run_beside_others().json()
}

/// The log-probabilities of all requests, one after the other.
fn logprobs(run: &RunJson) -> Vec<f64> {
    let lists = run.requests.iter().flat_map(|r| r.logprobs.as_ref().expect("log-probabilities"));
    lists.flatten().map(|&(_, logprob)| logprob).collect()
}

/// A prompt of one row, one of many (wide products, prefill attention), and tokens after them.
#[test]
fn a_models_tokens_are_those_of_the_cpu() {
    let Some(emulator) = Emulator::quick() else { return };
    let prompts: Vec<Vec<u64>> =
        [1, 37].map(|length| (0..length).map(|i| 3 + i * 7 % 200).collect()).to_vec();
    let model = Fixture::open("tiny")
        .model()
        .set("max_batch", 1)
        .set("generate", json!({"prompt_tokens": prompts, "max_new_tokens": 3}));
    let cpu = on_cpu(&model, &["--logprobs", "2"]);
    let found = emulator.run(&model, &["--logprobs", "2"], &toolkit());
    assert_eq!(found.tokens(), cpu.tokens());
}

/// Prefill attention on tensor cores, which takes heads of 64 and 128: prompts of several key tiles, cut into chunks, one with rows of
/// another request. Tokens alone would not show a wrong key.
#[test]
fn prefill_attention_of_large_heads_is_that_of_the_cpu() {
    let prompts: Vec<Vec<u64>> =
        [300, 137].map(|length| (0..length).map(|i| 1 + i * 37 % 250).collect()).to_vec();
    // The second layer has a window that is no multiple of a page or of a tile of keys.
    for (head, layers) in [(64, 1), (128, 2)] {
        let Some(emulator) = (if head == 128 { Emulator::new() } else { Emulator::quick() }) else { return };
        let config = json!({
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 512, "intermediate_size": 256,
            "use_sliding_window": true, "sliding_window": 77, "max_window_layers": 1, "num_hidden_layers": layers,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head,
            "vocab_size": 512, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
            "tie_word_embeddings": true, "hidden_act": "silu", "attention_bias": false, "dtype": "bfloat16",
        });
        let model = ModelFile::random(config, 1)
            .set("max_batch", 2)
            .set("max_seq_len", 384)
            .set("page_size", 64)
            .set("runtime", json!({"prefill_chunk": 256}))
            .set("generate", json!({"prompt_tokens": prompts, "max_new_tokens": 2, "ignore_eos": true}));
        let logprobs = |run: RunJson| -> Vec<f64> {
            let of_request = run.requests.into_iter().map(|r| r.logprobs.expect("log-probabilities"));
            of_request.flatten().flatten().map(|(_, logprob)| logprob).collect()
        };
        let cpu = on_cpu(&model, &["--logprobs", "5"]);
        let found = emulator.run(&model, &["--logprobs", "5"], &toolkit());
        assert_eq!(found.tokens(), cpu.tokens(), "head size {head}");
        let (found, cpu) = (logprobs(found), logprobs(cpu));
        let most = found.iter().zip(&cpu).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        println!("head size {head}: log-probabilities differ by {most:.5} at most");
        assert!(most < 0.01 && cpu.len() == 20, "head size {head}: {most}\n{found:?}\n{cpu:?}");
    }
}

/// The log-probability of a sampled token that is not among the best: that of the CPU, from logits of either rank.
#[test]
fn sampled_tokens_have_the_log_probabilities_of_the_cpu() {
    let Some(emulator) = Emulator::quick() else { return };
    let model = Fixture::open("qwen3")
        .model()
        .set("max_batch", 2)
        .set("runtime", json!({"prefill_chunk": 2}))
        .set("generate", json!({"prompt_tokens": [[5, 6, 7], [9]], "max_new_tokens": 3, "ignore_eos": true}));
    for ranks in [1, 2] {
        let options = ["--logprobs", "6", "--temperature", "6", "--seed", "3", "--allreduce", "copy-reduce"];
        let cpu = Job::new(ranks)
            .arg(model.path())
            .args(["--backend", "cpu", "--json"])
            .args(options)
            .run_beside_others()
            .json();
        let by_hosts: &[&str] = if ranks > 1 { &["--transport", "host"] } else { &[] };
        let found = emulator.run_as(Job::new(ranks), &model, &[&options, by_hosts].concat(), &toolkit());
        assert_eq!(found.tokens(), cpu.tokens(), "{ranks} ranks");
        let (mut most, mut outside) = (0f64, 0);
        for (found, cpu) in found.requests.iter().zip(&cpu.requests) {
            let own = found.token_logprobs.as_ref().expect("the tokens' log-probabilities");
            let of_cpu = cpu.token_logprobs.as_ref().expect("the tokens' log-probabilities");
            assert_eq!((own.len(), of_cpu.len()), (3, 3));
            // Relative to 1 + |b|, as in the golden tests: 16-bit activations round, and the two targets add up in different orders.
            most = own.iter().zip(of_cpu).map(|(a, b)| (a - b).abs() / (1.0 + b.abs())).fold(most, f64::max);
            let lists = found.logprobs.iter().flatten();
            outside += lists.zip(own).filter(|(list, own)| list.iter().all(|(_, best)| *own < best)).count();
        }
        println!(
            "{ranks} ranks: log-probabilities differ by {most:.6} at most; {outside} of 6 are not among the best"
        );
        assert!(most < 0.02 && outside >= 3, "{ranks} ranks: {most}, {outside}\n{found:?}\n{cpu:?}");
    }
}

/// An nvcc that changes the sources before it compiles them: in each file, the first text becomes the second.
fn changing(emulator: &Emulator, name: &str, changes: &[(&str, &str, &str)]) -> PathBuf {
    let folder = emulator.folder.path().join(name);
    let mut script = "#!/bin/sh\nset -e\nif [ \"$1\" != --version ]; then\n".to_string();
    for (file, from, to) in changes {
        script += &format!("grep -q '{from}' {file}\nsed -i 's/{from}/{to}/' {file}\n");
    }
    script += &format!("fi\nexec {}/bin/nvcc \"$@\"\n", toolkit().display());
    executable(&folder.join("bin/nvcc"), &script);
    folder
}

/// Two ranks whose kernels put through the hosts: frames in both directions, data before its signal, tokens exchanged.
#[test]
fn two_ranks_that_put_by_their_hosts_compute_the_cpus_tokens() {
    let Some(emulator) = Emulator::quick() else { return };
    let model = Fixture::open("qwen3")
        .model()
        .set("max_batch", 1)
        .set("generate", json!({"prompt_tokens": [[5, 6, 7]], "max_new_tokens": 4, "ignore_eos": true}));
    let arguments = ["--allreduce", "copy-reduce", "--logprobs", "2"];
    let cpu = Job::new(2)
        .arg(model.path())
        .args(["--backend", "cpu", "--json"])
        .args(arguments)
        .run_beside_others()
        .json();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("timeline.json");
    let by_hosts =
        [&arguments[..], &["--transport", "host", "--trace", path.to_str().expect("UTF-8")]].concat();
    let found = emulator.run_as(Job::new(2), &model, &by_hosts, &toolkit());
    assert_eq!(found.tokens(), cpu.tokens());
    every_task_is_in_the_timeline(
        &serde_json::from_slice(&fs::read(&path).expect("a timeline")).expect("JSON"),
    );
}

/// Each iteration of a graph has all of its tasks once, and those of a worker follow each other.
fn every_task_is_in_the_timeline(timeline: &Value) {
    let mut tasks: BTreeMap<(u64, String), BTreeMap<u64, Vec<u64>>> = BTreeMap::new();
    let mut of_worker: BTreeMap<(u64, u64), Vec<(f64, f64)>> = BTreeMap::new();
    for event in timeline["traceEvents"].as_array().expect("events").iter().filter(|e| e["cat"] == "task") {
        let number = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("no number in {event}"));
        let (rank, arguments) = (number(&event["pid"]), &event["args"]);
        let graph = arguments["graph"].as_str().expect("the graph's name").to_string();
        let iterations = tasks.entry((rank, graph)).or_default();
        iterations.entry(number(&arguments["iteration"])).or_default().push(number(&arguments["task"]));
        let (begin, took) = (event["ts"].as_f64().expect("ts"), event["dur"].as_f64().expect("dur"));
        of_worker.entry((rank, number(&event["tid"]))).or_default().push((begin, begin + took));
    }
    assert!(tasks.len() >= 4, "two ranks, a prompt and tokens after it: {:?}", tasks.keys());
    for (of, iterations) in tasks {
        let all = iterations.values().map(Vec::len).max().expect("an iteration") as u64;
        for (iteration, mut found) in iterations {
            found.sort_unstable();
            assert_eq!(found, (2..2 + all).collect::<Vec<_>>(), "{of:?}, iteration {iteration}");
        }
    }
    for (of, mut slices) in of_worker {
        slices.sort_by(|a, b| a.partial_cmp(b).expect("numbers"));
        // Times are rounded to nanoseconds.
        assert!(slices.windows(2).all(|pair| pair[1].0 >= pair[0].1 - 0.002), "{of:?}: tasks overlap");
    }
}

/// Values between -1 and 1, the same in every run.
fn values(count: usize, seed: u64) -> Vec<f64> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f64 / (1u64 << 23) as f64 - 1.0) as f32
    };
    // Exact in bf16.
    (0..count).map(|_| f64::from(f32::from_bits(next().to_bits() & 0xFFFF_0000))).collect()
}

fn tensor(name: &str, kind: &str, dtype: &str, dims: [usize; 2], scale: f64) -> Value {
    let seed = name.bytes().fold(1, |seed, byte| seed * 31 + u64::from(byte));
    let values: Vec<f64> = values(dims[0] * dims[1], seed).iter().map(|v| v * scale).collect();
    json!({"name": name, "kind": kind, "dtype": dtype, "dims": dims, "data": {"values": values}})
}

/// Linears of many rows (wide tiles), of the sample rows, and of one tile; a sum whose tasks also norm its rows.
fn operators() -> ModelFile {
    let rows = 40;
    let tensors = [
        tensor("x", "input", "bf16", [rows, 136], 1.0),
        tensor("w", "weight", "bf16", [80, 136], 0.125),
        tensor("wide", "weight", "bf16", [208, 136], 0.125),
        tensor("odd", "input", "f32", [rows, 61], 1.0),
        tensor("tall", "weight", "bf16", [33, 61], 0.125),
        tensor("stream", "input", "f32", [rows, 208], 1.0),
        json!({"name": "norm", "kind": "weight", "dtype": "bf16", "dims": [208], "data": {"values": values(208, 5)}}),
        tensor("next", "weight", "bf16", [72, 208], 0.125),
    ];
    let op = |inputs: [&str; 2], output: &str, attrs: Value| json!({"op": "linear", "inputs": inputs, "outputs": [output], "attrs": attrs});
    let ops = [
        op(["x", "w"], "y_few", json!({"output_dtype": "f32"})),
        op(["x", "wide"], "y_wide", json!({"output_dtype": "f32"})),
        op(["x", "w"], "y_samples", json!({"output_dtype": "f32", "gather_samples": true})),
        op(["odd", "tall"], "y_odd", json!({"output_dtype": "f32"})),
        json!({"op": "add", "inputs": ["y_wide", "stream"], "outputs": ["y_sum"], "attrs": {}}),
        json!({"op": "rmsnorm", "inputs": ["y_sum", "norm"], "outputs": ["normed"], "attrs": {"eps": 1e-3}}),
        op(["normed", "next"], "y_normed", json!({"output_dtype": "f32"})),
    ];
    let outputs = ["y_few", "y_wide", "y_samples", "y_odd", "y_sum", "y_normed"];
    let graph = json!({"rows": rows, "samples": 3, "tensors": tensors, "ops": ops, "outputs": outputs});
    ModelFile::new(json!({"schema": "mpk-model/1", "graph": graph}))
}

/// Another order of summation changes f32 by less than this.
const ORDER: f64 = 1e-4;

/// Names of the outputs in which a value differs by `least` or more.
fn differing(found: &RunJson, expected: &RunJson, least: f64) -> Vec<String> {
    let differs = |a: &Output, b: &Output| {
        a.dims != b.dims
            || a.values.len() != b.values.len()
            || !a.values.iter().zip(&b.values).all(|(a, b)| (a - b).abs() < least)
    };
    let all =
        expected.outputs.iter().filter(|(name, b)| found.outputs.get(*name).is_none_or(|a| differs(a, b)));
    all.map(|(name, _)| name.clone()).collect()
}

#[test]
fn operators_are_those_of_the_cpu_and_an_injected_error_is_seen() {
    let Some(emulator) = Emulator::new() else { return };
    let model = operators();
    let cpu = on_cpu(&model, &[]);
    assert_eq!(cpu.outputs.len(), 6);
    assert_eq!(differing(&emulator.run(&model, &[], &toolkit()), &cpu, ORDER), Vec::<String>::new());
    // The rows of samples are looked up at the wrong place.
    let wrong = ("src/gpu/linear_rows.cuh", "(gathered\\[row\\])", "(gathered[row]) - row");
    let Some(emulator) = Emulator::quick() else { return };
    let broken = changing(&emulator, "broken", &[wrong]);
    assert_eq!(differing(&emulator.run(&model, &[], &broken), &cpu, ORDER), ["y_samples"]);
}

/// Attention tasks of several slots: more sequences than workers. A sequence of three or four rows has more queries than the tiles of
/// streamed keys hold, so these slots and those of one or two rows lay out the work area in different ways, one after the other. With
/// heads of 128 there is no room for queries and results side by side. The results are written as rows, and in the layout of the wide
/// products that read them: by tasks of several slots, and by the merge of splits.
#[test]
fn attention_tasks_of_several_slots_are_those_of_the_cpu() {
    let Some(emulator) = Emulator::quick() else { return };
    let (heads, kv_heads, size, page) = (8, 2, 128, 16);
    let lengths: Vec<usize> = (0..40).map(|i| 1 + i % 4).collect();
    let (rows, sequences, longest) = (lengths.iter().sum(), lengths.len(), 4);
    let rope: Vec<f64> =
        reference::rope_table(longest, size, 1e4).iter().map(|&v| f64::from(v as f32)).collect();
    let cache = |name| {
        json!({"name": name, "kind": "persistent", "dtype": "bf16",
               "dims": [sequences, 2 * kv_heads, page, size], "region_dims": [sequences, kv_heads, 2]})
    };
    let tensors = [
        tensor("qkv", "input", "bf16", [rows, (heads + 2 * kv_heads) * size], 1.0),
        cache("cache"),
        cache("cache_of_window"),
        cache("cache_of_splits"),
        tensor("o_of_window", "weight", "bf16", [64, heads * size], 0.03),
        tensor("o_of_splits", "weight", "bf16", [64, heads * size], 0.03),
        json!({"name": "rope", "kind": "constant", "dtype": "f32", "dims": [longest, size], "data": {"values": rope}}),
    ];
    let attrs =
        json!({"heads": heads, "kv_heads": kv_heads, "head_dim": size, "splits": 1, "prefill": false});
    let mut with_window = attrs.clone();
    with_window["window"] = json!(3);
    let mut with_splits = attrs.clone();
    with_splits["splits"] = json!(2);
    let product = |inputs: [&str; 2], output: &str| json!({"op": "linear", "inputs": inputs, "outputs": [output], "attrs": {"output_dtype": "f32"}});
    let ops = [
        json!({"op": "attention", "inputs": ["qkv", "cache", "rope"], "outputs": ["y", "cache"], "attrs": attrs}),
        json!({"op": "attention", "inputs": ["qkv", "cache_of_window", "rope"],
               "outputs": ["w", "cache_of_window"], "attrs": with_window}),
        json!({"op": "attention", "inputs": ["qkv", "cache_of_splits", "rope"],
               "outputs": ["s", "cache_of_splits"], "attrs": with_splits}),
        product(["w", "o_of_window"], "y_window"),
        product(["s", "o_of_splits"], "y_splits"),
    ];
    let tokens: Vec<Vec<u32>> = lengths.iter().map(|&length| vec![0; length]).collect();
    let outputs = ["y", "y_window", "y_splits"];
    let graph =
        json!({"rows": rows, "active": sequences, "tensors": tensors, "ops": ops, "outputs": outputs});
    let model = ModelFile::new(
        json!({"schema": "mpk-model/1", "graph": graph, "generate": {"prompt_tokens": tokens}}),
    );
    // Both round to bf16.
    let found = emulator.run(&model, &["--workers", "4"], &toolkit());
    assert_eq!(differing(&found, &on_cpu(&model, &[]), 0.01), Vec::<String>::new());
}

/// Decode tasks of three slots, whose keys of earlier iterations come through the ring: requests of one token to several pages side by
/// side, in one task, so each slot begins and ends in the ring where the one before it says. The second layer has a window, which skips
/// pages of the longer ones.
#[test]
fn slots_of_different_lengths_share_a_decode_task() {
    let Some(emulator) = Emulator::quick() else { return };
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 128,
        "num_hidden_layers": 2, "use_sliding_window": true, "sliding_window": 37, "max_window_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "vocab_size": 256, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": true, "hidden_act": "silu", "attention_bias": false, "dtype": "bfloat16",
    });
    let lengths = [1, 70, 16, 3, 66, 15, 100, 2, 17, 31, 1, 50];
    let prompts: Vec<Vec<usize>> =
        lengths.iter().map(|&length| (0..length).map(|i| 1 + (length + i * 37) % 250).collect()).collect();
    let model = ModelFile::random(config, 1)
        .set("max_batch", lengths.len())
        .set("max_seq_len", 112)
        .set("page_size", 16)
        .set("runtime", json!({"prefill_chunk": 12}))
        .set("generate", json!({"prompt_tokens": prompts, "max_new_tokens": 4, "ignore_eos": true}));
    let cpu = on_cpu(&model, &["--logprobs", "5"]);
    let found = emulator.run(&model, &["--logprobs", "5", "--workers", "4"], &toolkit());
    assert_eq!(found.tokens(), cpu.tokens());
    let (found, cpu) = (logprobs(&found), logprobs(&cpu));
    let most = found.iter().zip(&cpu).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    println!("log-probabilities differ by {most:.5} at most");
    assert!(most < 0.01 && cpu.len() == lengths.len() * 4 * 5, "{most}\n{found:?}\n{cpu:?}");
}

/// Keys and values come through the same ring as weights, but `mpk-bench stream` counts weights. It gives no figures if the kernel has not
/// streamed exactly the graph's weights.
#[test]
fn keys_and_values_do_not_count_as_streamed_weights() {
    let Some(emulator) = Emulator::quick() else { return };
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 128, "intermediate_size": 128,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
        "vocab_size": 256, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": true, "hidden_act": "silu", "attention_bias": false, "dtype": "bfloat16",
    });
    // A small chunk needs few kernel variants.
    let model = ModelFile::random(config, 1).set("page_size", 16).set("runtime", json!({"prefill_chunk": 8}));
    let path = model.path().display().to_string();
    let options = ["stream", "--model", &path, "--without", "products", "--context", "24", "--steps", "8"];
    let job = Job::alone().of("mpk-bench").args(options).args(["--repeats", "1", "--read-rate", "1e9"]);
    let finished = emulator.job(job, &toolkit()).run_beside_others().expect(0);
    let found: Value = serde_json::from_str(finished.stdout.trim()).expect("JSON");
    assert_eq!(found["variants"][0]["streamed"], "the graph's bytes in every step", "{found}");
}
