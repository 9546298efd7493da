//! `mpk-graph simulate` on the graphs of small models: status, determinism, and what must hold on any machine.

use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

fn model(folder: &TempDir) -> PathBuf {
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 512, "vocab_size": 1000,
        "tie_word_embeddings": false, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 512,
        "torch_dtype": "bfloat16", "hidden_act": "silu"
    });
    let document = json!({
        "schema": "mpk-model/1", "name": "small", "config": config, "weights": {"random": {"seed": 1}},
        "max_batch": 4, "max_seq_len": 256, "page_size": 64
    });
    let path = folder.path().join("model.json");
    std::fs::write(&path, document.to_string()).unwrap();
    path
}

/// The plain cluster of the simulator's tests, with these changes.
fn cluster(folder: &TempDir, changes: &[(&str, f64)]) -> PathBuf {
    let mut cluster: Value =
        serde_json::from_str(include_str!("../../taskgraph/simulate/tests/plain.json")).unwrap();
    for (pointer, value) in changes {
        *cluster.pointer_mut(pointer).unwrap() =
            if value.fract() == 0.0 { json!(*value as i64) } else { json!(value) };
    }
    let path = folder.path().join("cluster.json");
    std::fs::write(&path, cluster.to_string()).unwrap();
    path
}

fn run(model: &Path, cluster: &Path, options: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mpk-graph"));
    command.arg("simulate").arg(model).arg("--cluster").arg(cluster).args(options);
    command.output().unwrap()
}

fn report(model: &Path, cluster: &Path, options: &[&str]) -> Value {
    let mut all = vec!["--json", "--context", "100"];
    all.extend(options);
    let output = run(model, cluster, &all);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn every_placement_and_lowering_runs_and_never_beats_the_memory() {
    let folder = TempDir::new().unwrap();
    let (model, cluster) = (model(&folder), cluster(&folder, &[("/ranks_per_node", 2.0)]));
    for placement in ["static", "dynamic"] {
        for lowering in ["one-shot", "two-shot", "copy-reduce", "hierarchical"] {
            for ranks in ["1", "4"] {
                let options = ["--ranks", ranks, "--placement", placement, "--allreduce", lowering];
                let report = report(&model, &cluster, &options);
                let [ms, floor] = ["ms_per_token", "floor_ms"].map(|key| report[key].as_f64().unwrap());
                assert!(ms > floor && floor > 0.0, "{options:?}: {ms} ms, floor {floor}");
                // The items of the budget add up to the time.
                let parts = report["budget"]["operators"].as_array().unwrap().iter();
                let sum: f64 = parts.map(|o| o["total_us"].as_f64().unwrap()).sum();
                let sum = sum + report["budget"]["between_us"].as_f64().unwrap();
                assert!((sum / 1e3 / ms - 1.0).abs() < 0.02, "{options:?}: {sum} us of {ms} ms");
            }
        }
    }
}

#[test]
fn every_weight_is_read_once() {
    let folder = TempDir::new().unwrap();
    let (model, cluster) = (model(&folder), cluster(&folder, &[]));
    let read = |context| {
        let options = ["--json", "--context", context, "--graph", "decode-1"];
        let output = run(&model, &cluster, &options);
        serde_json::from_slice::<Value>(&output.stdout).unwrap()["bytes_read"].as_u64().unwrap()
    };
    // qkv, o, gate and up, down, head: bf16. Norms and rows of the embedding are small in comparison.
    let layer = 256 * (8 + 2 * 4) * 32 + 8 * 32 * 256 + 3 * 256 * 512;
    let weights = 2 * (3 * layer + 1000 * 256);
    let got = read("0") as f64;
    assert!((0.99..1.06).contains(&(got / f64::from(weights))), "{got} of {weights}");
    // Keys and values of 3 layers, 4 heads of 32.
    assert_eq!(read("200") - read("100"), 3 * 100 * 2 * 4 * 32 * 2);
    // With a window of 128 in the last layer, that layer reads 28 positions more.
    let mut document: Value = serde_json::from_slice(&std::fs::read(&model).unwrap()).unwrap();
    document["config"]["use_sliding_window"] = json!(true);
    document["config"]["sliding_window"] = json!(128);
    document["config"]["max_window_layers"] = json!(2);
    std::fs::write(&model, document.to_string()).unwrap();
    assert_eq!(read("200") - read("100"), (2 * 100 + 28) * 2 * 4 * 32 * 2);
}

#[test]
fn slower_parts_never_make_a_token_faster_and_the_same_input_gives_the_same_output() {
    let folder = TempDir::new().unwrap();
    let model = model(&folder);
    let time = |changes: &[(&str, f64)]| {
        let report = report(&model, &cluster(&folder, changes), &["--ranks", "4"]);
        assert_eq!(report, self::report(&model, &cluster(&folder, changes), &["--ranks", "4"]));
        report["ms_per_token"].as_f64().unwrap()
    };
    let base = time(&[]);
    for change in [
        ("/protocol/hop_us", 4.0),
        ("/protocol/flag_us", 3.0),
        ("/protocol/work_us", 1.0),
        ("/memory/latency_us", 3.0),
        ("/memory/gb_per_s", 100.0),
        ("/peer_link/flag_us", 8.0),
        ("/ranks_per_node", 2.0),
    ] {
        assert!(time(&[change]) > base, "{change:?}");
    }
}

#[test]
fn bad_input_ends_with_status_2_and_names_the_place() {
    let folder = TempDir::new().unwrap();
    let model = model(&folder);
    let refused = |changes: &[(&str, f64)], options: &[&str], told: &str| {
        let output = run(&model, &cluster(&folder, changes), options);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.contains(told), "{message}");
        assert!(output.stdout.is_empty());
    };
    refused(&[("/protocol/hop_us", -1.0)], &["--context", "100"], "protocol.hop_us");
    refused(&[], &["--context", "100", "--batch", "9"], "--batch 9");
    refused(&[], &["--context", "1000"], "max_seq_len");
    refused(&[], &["--context", "100", "--ranks", "3"], "3 ranks do not divide");
    refused(&[], &["--context", "100", "--graph", "decode-3"], "decode-3");
    let output = run(&model, Path::new("/no/such/cluster.json"), &[]);
    assert_eq!(output.status.code(), Some(2));
    let empty = folder.path().join("empty.json");
    std::fs::write(&empty, "").unwrap();
    let message = String::from_utf8_lossy(&run(&model, &empty, &[]).stderr).into_owned();
    assert!(message.contains("empty.json: EOF while parsing"), "{message}");
}

/// The graphs of 4,096 ranks take minutes to build. A cluster without a network is refused before.
#[test]
fn ranks_without_a_network_are_refused_at_once() {
    let folder = TempDir::new().unwrap();
    let path = cluster(&folder, &[]);
    let mut cluster: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    cluster.as_object_mut().unwrap().remove("network");
    std::fs::write(&path, cluster.to_string()).unwrap();
    let mlp = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/graph/mlp.json");
    let output = run(&mlp, &path, &["--ranks", "4096"]);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(
        message.contains("4096 ranks take 512 nodes of 8 ranks, but the cluster file has no `network`"),
        "{message}"
    );
}

/// A user graph has a name, even if its model.json gives none.
#[test]
fn a_user_graph_is_named() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.json");
    let graph = serde_json::json!({"name": "mine", "rows": 1, "outputs": ["y"],
        "tensors": [{"name": "x", "kind": "input", "dtype": "f32", "dims": [1, 64]},
                    {"name": "w", "kind": "weight", "dtype": "f32", "dims": [64, 64]}],
        "ops": [{"op": "linear", "inputs": ["x", "w"], "outputs": ["y"]}]});
    let model = serde_json::json!({"schema": "mpk-model/1", "graph": graph});
    std::fs::write(&path, model.to_string()).unwrap();
    let output = run(&path, &cluster(&folder, &[]), &[]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.starts_with("mine on "), "{output:?}");
}

#[test]
fn the_timeline_is_one_json_object_of_all_ranks() {
    let folder = TempDir::new().unwrap();
    let (model, cluster) = (model(&folder), cluster(&folder, &[]));
    let trace = folder.path().join("trace.json");
    let options = ["--context", "100", "--ranks", "2", "--trace", trace.to_str().unwrap()];
    let output = run(&model, &cluster, &options);
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).contains("ms per token"));
    let trace: Value = serde_json::from_slice(&std::fs::read(trace).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    for rank in 0..2 {
        let tasks = events.iter().filter(|e| e["pid"] == rank && e["cat"] == "task");
        // A worker does one thing at a time.
        let mut last = [0.0; 2];
        for task in tasks {
            let worker = task["tid"].as_u64().unwrap() as usize;
            let begin = task["ts"].as_f64().unwrap();
            assert!(begin >= last[worker] - 1e-6, "{task}");
            last[worker] = begin + task["dur"].as_f64().unwrap();
        }
        assert!(last.iter().all(|end| *end > 0.0));
    }
}

/// A Hugging Face folder is a model, as for the other programs. Numbers and nouns agree.
#[test]
fn a_folder_is_a_model() {
    let folder = TempDir::new().unwrap();
    let cluster = cluster(&folder, &[("/ranks_per_node", 1.0)]);
    let checkpoint = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/qwen3");
    let output = run(&checkpoint, &cluster, &["--context", "8", "--graph", "decode-1"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains(", 1 rank on 1 node, "), "{output:?}");
}
