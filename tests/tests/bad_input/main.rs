//! Proves that bad input gives one clear error from one rank and exit status 2 on all ranks, alone and under
//! `mpirun`, with nothing on stdout, no panic, and nothing left in shared memory or on disk.

mod checkpoints;

use mpk_tests::{Job, ModelFile};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// Runs `arguments` on one rank, and expects one error that contains all of `words`.
fn refused(what: &str, arguments: &[&str], words: &[&str]) {
    refused_by(Job::alone().args(arguments), what, words);
}

/// The same under `mpirun`, once for each kind of error, because `mpirun` takes a second or two to end a failing
/// job.
fn refused_on_all_ranks(what: &str, arguments: &[&str], words: &[&str]) {
    refused(what, arguments, words);
    refused_by(Job::under_mpirun(2).args(arguments), what, words);
}

fn refused_by(job: Job, what: &str, words: &[&str]) {
    let outputs = tempfile::Builder::new().prefix("mpk-out").tempdir().expect("a temporary folder");
    let trace = outputs.path().join("trace.json");
    // A build has no trace.
    let traced = !job.describe().contains("--check");
    let finished = if traced { job.arg("--trace").arg(&trace).run() } else { job.run() };
    let what = format!("{what}: {}\nstderr: {}", finished.description, finished.stderr);
    assert_eq!((finished.status, finished.signal), (Some(2), None), "{what}");
    assert_eq!(finished.stdout, "", "{what}");
    let errors = finished.error_lines();
    assert_eq!(errors.len(), 1, "one error: {what}");
    assert!(!finished.stderr.contains("panicked"), "{what}");
    for word in words {
        assert!(finished.stderr.contains(word), "the error does not say {word:?}: {what}");
    }
    assert!(!trace.exists(), "a trace file is left: {what}");
    finished.expect_nothing_left();
}

/// A model.json that is refused.
fn model_refused(what: &str, model: &ModelFile, words: &[&str]) {
    refused(what, &[text(&model.path()), "--prompt-tokens", "1,2,3"], words);
}

fn model_refused_on_all_ranks(what: &str, model: &ModelFile, words: &[&str]) {
    refused_on_all_ranks(what, &[text(&model.path()), "--prompt-tokens", "1,2,3"], words);
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

/// Writes a model.json with this text.
fn raw(text: &str) -> ModelFile {
    let file = ModelFile::new(json!({}));
    fs::write(file.path(), text).expect("model.json can be written");
    file
}

fn qwen3_config() -> Value {
    mpk_tests::model_file::read_json(&mpk_tests::folders::model_folder("qwen3").join("config.json"))
}

/// A small model of random weights with one field of its configuration changed.
fn config_with(name: &str, value: Value) -> ModelFile {
    let mut config = qwen3_config();
    config[name] = value;
    ModelFile::random(config, 1).set("max_seq_len", 64)
}

#[test]
fn missing_and_unreadable_files() {
    refused_on_all_ranks(
        "missing",
        &["/nonexistent/model.json"],
        &["/nonexistent/model.json", "No such file"],
    );
    let folder = tempfile::tempdir().expect("a temporary folder");
    refused("a folder", &[text(folder.path())], &["a folder without config.json"]);
    let model = ModelFile::new(json!({"schema": "mpk-model/1", "checkpoint": "nowhere"}));
    model_refused_on_all_ranks("missing checkpoint", &model, &["nowhere", "cannot read"]);
    fs::create_dir(model.folder().join("nowhere")).expect("a folder");
    model_refused("empty checkpoint", &model, &["config.json", "cannot read"]);
}

#[test]
fn json_errors_name_line_and_column() {
    model_refused_on_all_ranks(
        "syntax",
        &raw("{\n  \"schema\": \"mpk-model/1\",\n  \"checkpoint\" \".\"\n}"),
        &["model.json:3:16"],
    );
    model_refused("empty file", &raw(""), &["model.json: is empty"]);
    model_refused("cut off", &raw("{\"schema\": \"mpk-model/1\",\n"), &["model.json:2:0", "JSON"]);
    model_refused("not an object", &raw("[1]"), &["expected an object"]);
    model_refused("not text", &raw("\u{1}\u{2}"), &["model.json:1:1"]);
    let model = ModelFile::copy_of_fixture("qwen3").edit_bytes("config.json", |b| b.truncate(20));
    model_refused_on_all_ranks("config.json", &model, &["config.json:", "JSON"]);
    let model =
        ModelFile::copy_of_fixture("qwen3").edit_bytes("generation_config.json", |b| b.insert(0, b'}'));
    model_refused("generation_config.json", &model, &["generation_config.json:1:1"]);
    let model = ModelFile::copy_of_fixture("llama").edit_bytes("tokenizer.json", |b| b.truncate(100));
    model_refused("tokenizer.json", &model, &["tokenizer.json"]);
}

#[test]
fn unknown_fields_and_wrong_types_name_the_place() {
    let fixture = || ModelFile::of_fixture("mistral");
    model_refused_on_all_ranks(
        "unknown field",
        &fixture().set("max_bach", 3),
        &["max_bach", "unknown field"],
    );
    model_refused("unknown nested", &fixture().set("runtime.placment", "static"), &["runtime", "placment"]);
    model_refused("unknown nested", &fixture().set("generate.prompt", "x"), &["generate", "prompt"]);
    model_refused_on_all_ranks("wrong type", &fixture().set("max_batch", "8"), &["max_batch"]);
    model_refused("negative", &fixture().set("max_seq_len", -1), &["max_seq_len"]);
    model_refused("a fraction", &fixture().set("page_size", 1.5), &["page_size"]);
    model_refused(
        "wrong choice",
        &fixture().set("runtime.allreduce", "ring"),
        &["runtime.allreduce", "one-shot"],
    );
    model_refused("wrong nested", &fixture().set("generate.prompts", json!([1])), &["generate.prompts[0]"]);
    model_refused("zero", &fixture().set("max_batch", 0), &["max_batch", "at least 1"]);
    model_refused("not a power of two", &fixture().set("page_size", 48), &["page_size", "power of two"]);
    let model = fixture().set("runtime.prefill_chunk", 2);
    model_refused("chunk below slots", &model, &["runtime.prefill_chunk", "max_batch"]);
    model_refused("schema", &fixture().set("schema", "mpk-model/9"), &["schema", "mpk-model/1"]);
    model_refused("no schema", &ModelFile::new(json!({"checkpoint": "."})), &["schema", "missing"]);
    model_refused("no model", &ModelFile::new(json!({"schema": "mpk-model/1"})), &["checkpoint"]);
    model_refused("two models", &fixture().set("config", json!({})), &["checkpoint", "config"]);
    let model = ModelFile::new(json!({"schema": "mpk-model/1", "config": qwen3_config()}));
    model_refused("no weights", &model, &["weights", "seed"]);
}

#[test]
fn unsupported_models_are_refused_with_what_is_supported() {
    let supported = ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"];
    let model = config_with("architectures", json!(["GPT2LMHeadModel"]));
    model_refused_on_all_ranks("architecture", &model, &[&["GPT2LMHeadModel"][..], &supported].concat());
    let model = ModelFile::copy_of_fixture("qwen3")
        .edit("config.json", |c| c["architectures"] = json!(["Qwen3MoeForCausalLM"]));
    model_refused(
        "architecture",
        &model,
        &[&["Qwen3MoeForCausalLM", "config.json"][..], &supported].concat(),
    );
    for (name, value, words) in [
        ("hidden_act", json!("gelu"), &["hidden_act", "gelu"][..]),
        ("quantization_config", json!({"quant_method": "fp8"}), &["quantization_config"]),
        (
            "rope_parameters",
            json!({"rope_type": "longrope", "factor": 4.0, "rope_theta": 1e6}),
            &["rope_type", "longrope"],
        ),
        (
            "rope_parameters",
            json!({"rope_type": "llama3", "factor": 4.0, "rope_theta": 1e6}),
            &["low_freq_factor"],
        ),
        ("rope_scaling", json!({"type": "dynamic", "factor": 2.0}), &["rope_scaling", "dynamic"]),
        ("partial_rotary_factor", json!(0.5), &["partial_rotary_factor"]),
        ("dtype", json!("float8_e4m3fn"), &["dtype", "bfloat16"]),
        ("mlp_bias", json!(true), &["mlp_bias"]),
        ("num_key_value_heads", json!(3), &["num_key_value_heads", "divide"]),
        ("num_hidden_layers", json!(0), &["num_hidden_layers"]),
        ("num_attention_heads", json!("8"), &["num_attention_heads", "8"]),
        ("head_dim", json!(15), &["head_dim"]),
        ("vocab_size", json!(-5), &["vocab_size"]),
        ("rms_norm_eps", json!(0), &["rms_norm_eps"]),
        ("eos_token_id", json!("end"), &["eos_token_id"]),
    ] {
        model_refused(name, &config_with(name, value), words);
    }
    let warned = |model: &ModelFile, more: &[&str]| {
        let job =
            Job::alone().arg(model.path()).args(["--prompt-tokens", "1", "--max-new-tokens", "1"]).args(more);
        job.run()
            .expect(0)
            .stderr
            .lines()
            .filter(|line| line.contains("WARN") && line.contains("max_"))
            .map(String::from)
            .collect::<Vec<_>>()
    };
    let long = warned(&ModelFile::of_fixture("qwen3"), &["--max-seq-len", "1100"]);
    assert!(matches!(&long[..], [one] if one.contains("max_position_embeddings")), "once: {long:?}");
}

#[test]
fn numbers_of_ranks_that_do_not_divide_the_heads() {
    let model = ModelFile::of_fixture("qwen3");
    let arguments = [text(&model.path()).to_string(), "--prompt-tokens".into(), "1".into()];
    for ranks in [3, 16] {
        refused_by(
            Job::under_mpirun(ranks).args(&arguments),
            "ranks",
            &[&ranks.to_string(), "8", "1, 2, 4, 8"],
        );
        let check = Job::alone().args([&arguments[0], "--check", "--ranks", &ranks.to_string()]);
        refused_by(check, "ranks", &[&ranks.to_string(), "1, 2, 4, 8"]);
    }
}

#[test]
fn prompts_that_cannot_run() {
    let model = ModelFile::of_fixture("mistral");
    let path = model.path();
    let path = text(&path);
    let long = vec!["1"; 192].join(",");
    refused_on_all_ranks("too long", &[path, "--prompt-tokens", &long], &["192", "max_seq_len"]);
    refused_on_all_ranks("empty", &[path, "--prompt-tokens", ""], &["empty"]);
    refused(
        "second empty",
        &[path, "--prompt-tokens", "1", "--prompt-tokens", ""],
        &["--prompt-tokens 2", "empty"],
    );
    refused_on_all_ranks("out of range", &[path, "--prompt-tokens", "1,211"], &["211", "0 to 210"]);
    refused("no number", &[path, "--prompt-tokens", "1,two"], &["two"]);
    refused("negative", &[path, "--prompt-tokens=-1"], &["-1"]);
    refused("too large", &[path, "--prompt-tokens", "99999999999"], &["99999999999"]);
    refused_on_all_ranks(
        "no tokenizer",
        &[path, "--prompt", "hello"],
        &["tokenizer.json", "--prompt-tokens"],
    );
    refused_on_all_ranks("no prompt", &[path], &["--prompt"]);
    refused("no new tokens", &[path, "--prompt-tokens", "1", "--max-new-tokens", "0"], &["max_new_tokens"]);
    let few_pages = ModelFile::of_fixture("mistral").set("runtime.kv_pages", 1);
    let sixteen = vec!["1"; 16].join(",");
    refused("pages", &[text(&few_pages.path()), "--prompt-tokens", &sixteen], &["kv_pages"]);
    let llama = ModelFile::of_fixture("llama");
    refused("empty text", &[text(&llama.path()), "--prompt", ""], &["empty"]);
    let in_file = ModelFile::of_fixture("mistral").set("generate.prompt_tokens", json!([[1, 2], [5, 300]]));
    refused("in the file", &[text(&in_file.path())], &["generate.prompt_tokens[1]", "300"]);
    let in_file = ModelFile::of_fixture("mistral").set("generate.prompts", json!(["text"]));
    refused("in the file", &[text(&in_file.path())], &["generate.prompts[0]", "tokenizer.json"]);
}

#[test]
fn sizes_that_overflow() {
    let fixture = || ModelFile::of_fixture("mistral");
    let model = fixture().set("max_seq_len", u32::MAX).set("max_batch", 4096);
    model_refused_on_all_ranks("tokens", &model, &["too large", "max_seq_len"]);
    let model = fixture().set("runtime.kv_pages", i32::MAX).set("page_size", 1u32 << 31);
    model_refused("KV", &model, &["too large"]);
    for field in ["runtime.kv_pages", "runtime.prefill_chunk"] {
        model_refused(field, &fixture().set(field, u32::MAX), &[field, "at most 2147483647"]);
    }
    model_refused("slots", &fixture().set("max_batch", 5000), &["max_batch", "4096"]);
    model_refused("past 32 bits", &fixture().set("max_seq_len", 1u64 << 32), &["max_seq_len"]);
    model_refused("hidden size", &config_with("hidden_size", json!(u32::MAX)), &["4294967295"]);
    model_refused("layers", &config_with("num_hidden_layers", json!(u32::MAX)), &["num_hidden_layers"]);
    model_refused("heads", &config_with("num_attention_heads", json!(1u32 << 30)), &["num_attention_heads"]);
    model_refused("MLP", &config_with("intermediate_size", json!(u32::MAX)), &["intermediate_size"]);
    model_refused("vocabulary", &config_with("vocab_size", json!(u32::MAX)), &["vocab_size"]);
}

#[test]
fn graphs_of_the_users_own_that_are_wrong() {
    let graph = |value: Value| ModelFile::new(json!({"schema": "mpk-model/1", "graph": value}));
    let x = json!({"name": "x", "dtype": "f32", "dims": [2, 8], "kind": "input", "data": {"random": {"seed": 1}}});
    let good = |op: Value| json!({"rows": 2, "tensors": [x.clone()], "ops": [op], "outputs": ["y"]});
    let silu = json!({"op": "silu_mul", "inputs": ["x"], "outputs": ["y"]});
    let with_integers = |value: f64| {
        let k = json!({"name": "k", "dtype": "i32", "dims": [1], "kind": "constant", "data": {"values": [value]}});
        json!({"rows": 2, "tensors": [x, k], "ops": [silu], "outputs": ["y"]})
    };
    // Weights are packed in memory, and other tensors are not. A task would misread a packed tensor as plain, and the
    // other way round.
    let given = |name: &str, kind: &str, rows: usize| json!({"name": name, "dtype": "f32", "dims": [rows, 8], "kind": kind, "data": {"values": vec![1.0; 8 * rows]}});
    let linear = json!({"op": "linear", "inputs": ["x", "w"], "outputs": ["y"]});
    let with_weight = |kind: &str| json!({"rows": 2, "tensors": [x, given("w", kind, 3)], "ops": [linear], "outputs": ["y"]});
    let sum = json!({"op": "add", "inputs": ["c", "c"], "outputs": ["w"]});
    let computed =
        json!({"rows": 2, "tensors": [x, given("c", "constant", 3)], "ops": [sum, linear], "outputs": ["y"]});
    let mut weight = given("w", "weight", 2);
    weight["rows"] = json!("tokens");
    let sum = json!({"op": "add", "inputs": ["x", "w"], "outputs": ["y"]});
    let added = json!({"rows": 2, "tensors": [x, weight], "ops": [sum], "outputs": ["y"]});
    let mut other = given("w", "weight", 3);
    other["data"] = json!({"values": vec![2.0; 24]});
    other["parts"] = json!([{"source": "v", "dims": [3, 8]}]);
    let shared_part =
        json!({"rows": 2, "tensors": [x, given("v", "weight", 3), other], "ops": [linear], "outputs": ["y"]});
    let mut in_file = x.clone();
    in_file["data"] = json!({"file": concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"), "tensor": "x"});
    let in_file = json!({"rows": 2, "tensors": [in_file], "ops": [silu], "outputs": ["y"]});
    let mut random = json!({"name": "k", "dtype": "u32", "dims": [1], "kind": "constant"});
    random["data"] = json!({"random": {"seed": 1}});
    let random = json!({"rows": 2, "tensors": [x, random], "ops": [silu], "outputs": ["y"]});
    let named = json!({"op": "silu_mul", "name": "a\u{1b}[2J", "inputs": ["x"], "outputs": ["y"]});
    for (what, value, words) in [
        ("not an object", json!(3), &["graph"][..]),
        ("data in no safetensors file", in_file, &["Cargo.toml", "not a safetensors file"]),
        ("unknown field", json!({"rows": 2, "ops": [silu], "row": 1}), &["row"]),
        (
            "unknown operator",
            good(json!({"op": "conv", "inputs": ["x"], "outputs": ["y"]})),
            &["conv", "silu_mul"],
        ),
        ("unknown tensor", good(json!({"op": "silu_mul", "inputs": ["z"], "outputs": ["y"]})), &["z"]),
        ("wrong operands", good(json!({"op": "linear", "inputs": ["x"], "outputs": ["y"]})), &["y"]),
        ("unknown output", json!({"rows": 2, "tensors": [x], "ops": [silu], "outputs": ["w"]}), &["w"]),
        (
            "no output",
            json!({"rows": 2, "tensors": [x], "ops": [silu], "outputs": []}),
            &["`graph.outputs` names no tensor", "name at least one, such as `y`"],
        ),
        ("no outputs at all", json!({"rows": 2, "tensors": [x], "ops": [silu]}), &["`graph.outputs`"]),
        (
            "log-probabilities without candidates",
            good(
                json!({"op": "argmax_reduce", "inputs": ["x"], "outputs": ["y"], "attrs": {"log_sum": true}}),
            ),
            &["`log_sum` needs `top_k`"],
        ),
        (
            "no tokens",
            good(json!({"op": "token_logit", "inputs": ["x", "x"], "outputs": ["y"]})),
            &["`x`", "i32"],
        ),
        (
            "no sums",
            good(json!({"op": "token_logprob", "inputs": ["x", "x"], "outputs": ["y"]})),
            &["`x`", "u32"],
        ),
        ("a weight that is no weight", with_weight("constant"), &["`linear`", "`w`", "a constant"]),
        ("a computed weight", computed, &["`w`", "an activation"]),
        ("a weight that is added", added, &["`add`", "`w`", "make it a constant"]),
        ("data of a persistent tensor", with_weight("persistent"), &["data", "zeros"]),
        ("a part with two values", shared_part, &["`v`", "different values"]),
        ("no whole number", with_integers(1.5), &["`k`", "1.5", "i32"]),
        ("random integers", random, &["`k`", "u32", "fractions", "whole numbers"]),
        ("a name that acts on the terminal", good(named), &["graph.ops[0].name", "\\u{1b}"]),
        (
            "more slots than rows",
            json!({"rows": 2, "active": 3, "tensors": [x], "ops": [silu], "outputs": ["y"]}),
            &["graph.active", "3 is more than `rows` (2)"],
        ),
        ("an integer that f32 lacks", with_integers(16777217.0), &["16777217", "2^24"]),
    ] {
        refused(what, &[text(&graph(value).path())], words);
    }
    let twice = raw("{\"schema\": \"mpk-model/1\",\n \"graph\": {\"rows\": 1, \"rows\": 2}}");
    refused("a field twice", &[text(&twice.path())], &["`graph`", "duplicate field `rows`", "line 2"]);
    // These are found when the graph is already loaded.
    let bytes = json!({"name": "b", "dtype": "u8", "dims": [1, 2], "kind": "input",
        "shard": {"dim": 1, "kind": "even"}, "data": {"values": [1, 2]}});
    let gather = json!({"op": "allgather", "inputs": ["b"], "outputs": ["y"]});
    let bytes = graph(json!({"rows": 1, "tensors": [bytes], "ops": [gather], "outputs": ["y"]}));
    refused_on_all_ranks("values of a type that has none", &[text(&bytes.path())], &["u8"]);
    let right = graph(good(silu));
    for option in [
        &["--prompt-tokens", "1"][..],
        &["--logprobs", "2"],
        &["--temperature", "1"],
        &["--ignore-eos"],
        &["--max-batch", "2"],
        &["--kv", "on-demand"],
    ] {
        refused(option[0], &[&[text(&right.path())], option].concat(), &[option[0], "no effect", "graph"]);
    }
    let unknown = graph(good(json!({"op": "conv", "inputs": ["x"], "outputs": ["y"]})));
    refused_on_all_ranks("unknown operator", &[text(&unknown.path())], &["conv"]);
}

/// Usage errors come from the command line's own parser, and end in the same way.
#[test]
fn wrong_usage() {
    let model = ModelFile::of_fixture("mistral");
    let path = model.path();
    let path = text(&path);
    refused("no model", &[], &["MODEL"]);
    refused_on_all_ranks("unknown option", &[path, "--speed", "9"], &["--speed"]);
    refused("unknown placement", &[path, "--placement", "best"], &["best", "static", "dynamic"]);
    refused("no workers", &[path, "--workers", "0"], &["--workers", "0"]);
    refused("too many log-probabilities", &[path, "--logprobs", "129"], &["129"]);
    refused_on_all_ranks("deadline", &[path, "--prompt-tokens", "1", "--deadline", "0"], &["--deadline"]);
    refused("deadline", &[path, "--prompt-tokens", "1", "--deadline", "nan"], &["--deadline"]);
    refused("ranks without a build", &[path, "--prompt-tokens", "1", "--ranks", "2"], &["--ranks", "mpirun"]);
    refused(
        "device without a build",
        &[path, "--prompt-tokens", "1", "--device", "h200"],
        &["--device", "--check"],
    );
    refused_on_all_ranks("unknown device", &[path, "--check", "--device", "abacus"], &["abacus", "h200"]);
    refused_on_all_ranks(
        "JSON of a build",
        &[path, "--check", "--json"],
        &["--json", "no effect", "--check"],
    );
    refused_on_all_ranks(
        "iterations of a model",
        &[path, "--prompt-tokens", "1", "--iterations", "2"],
        &["--iterations", "--max-new-tokens"],
    );
    let nowhere = [path, "--prompt-tokens", "1", "--trace", "/nonexistent/folder/trace.json"];
    for job in [Job::alone(), Job::under_mpirun(2)] {
        let finished = job.args(nowhere).run().expect(2).expect_nothing_left();
        assert_eq!(finished.error_lines().len(), 1, "{}", finished.stderr);
        assert!(finished.stderr.contains("/nonexistent/folder/trace.json"), "{}", finished.stderr);
    }
}

/// `--emit-graph` of a bad model writes nothing.
#[test]
fn nothing_is_emitted_for_a_bad_model() {
    let model = config_with("hidden_act", json!("gelu"));
    let outputs = tempfile::tempdir().expect("a temporary folder");
    let target = outputs.path().join("graphs");
    let job = Job::alone().arg(model.path()).args(["--ranks", "2", "--emit-graph"]).arg(&target);
    let finished = job.run().expect(2).expect_nothing_left();
    assert_eq!(finished.error_lines().len(), 1, "{}", finished.stderr);
    assert!(!target.exists());
    // A target that cannot be a folder.
    fs::write(&target, "x").expect("a file");
    let good = ModelFile::of_fixture("mistral");
    let finished = Job::alone().arg(good.path()).arg("--emit-graph").arg(&target).run().expect(2);
    assert!(finished.stderr.contains(text(&target)), "{}", finished.stderr);
    assert_eq!(fs::read_to_string(&target).expect("the file is as it was"), "x");
}

/// A missing device is a fault of the environment.
#[test]
fn a_lacking_environment_is_status_3() {
    let model = ModelFile::of_fixture("mistral");
    if Path::new("/dev/nvidiactl").exists() {
        println!("skipped: there is a GPU");
        return;
    }
    for job in [Job::alone(), Job::under_mpirun(2)] {
        let job = job.arg(model.path()).args(["--prompt-tokens", "1", "--backend", "cuda"]);
        let finished = job.run().expect(3).expect_nothing_left();
        assert_eq!(finished.error_lines().len(), 1, "{}", finished.stderr);
        assert!(finished.stderr.contains("--backend cpu"), "says what to do: {}", finished.stderr);
        assert_eq!(finished.stdout, "");
    }
}
