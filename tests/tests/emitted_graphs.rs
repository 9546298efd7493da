//! Proves that emitted task graphs keep the format's contract. They are read without the code that wrote them: files
//! and field names, triggers of all ranks that add up, copies and their owners, placement, and an iteration that
//! reaches its end. This covers the fixtures on the CPU, and real shapes on a described GPU. Also checks what
//! `--check` prints.

use mpk_tests::task_graph::{Emitted, Graph, check, check_copy_reduce, emit, simulate};
use mpk_tests::{Job, ModelFile};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

fn check_all(model: &ModelFile, ranks: u32, arguments: &[&str]) {
    let emitted = emit(model, ranks, arguments);
    for graphs in emitted.all() {
        check(graphs);
        simulate(graphs);
    }
}

#[test]
fn graphs_of_the_fixtures() {
    for (name, ranks) in [("qwen3", 1), ("qwen3", 2), ("llama", 4), ("mistral", 8)] {
        let model = ModelFile::of_fixture(name);
        for placement in ["static", "dynamic"] {
            for lowering in ["copy-reduce", "one-shot", "two-shot"] {
                check_all(
                    &model,
                    ranks,
                    &["--placement", placement, "--allreduce", lowering, "--workers", "3"],
                );
            }
        }
    }
}

/// The main graph is the decode graph of all slots; the others are named.
#[test]
fn there_are_decode_graphs_and_a_prefill_graph() {
    let model = ModelFile::of_fixture("qwen3").set("max_batch", 6);
    let emitted = emit(&model, 2, &[]);
    assert!(emitted.main()[0].name.contains("decode") && emitted.main()[0].name.contains('6'));
    let names: Vec<&str> = emitted.all().map(|g| &g[0].name[..]).collect();
    assert!(names.iter().any(|n| n.contains("prefill")), "{names:?}");
    for size in ["1", "2", "4"] {
        assert!(names.iter().any(|n| n.contains("decode") && n.ends_with(size)), "{names:?}");
    }
}

#[test]
fn copy_reduce_copies_each_tile_to_each_peer() {
    for (ranks, placement) in [(2, "static"), (4, "dynamic"), (8, "static")] {
        let model = ModelFile::of_fixture("llama");
        let emitted = emit(&model, ranks, &["--placement", placement, "--allreduce", "copy-reduce"]);
        for graph in emitted.all().flatten() {
            check_copy_reduce(graph);
            // One after attention, one after the MLP, one for the embedding.
            let mut reduced: Vec<u32> =
                graph.all_tasks.iter().filter(|t| t.task_type == "reduce").map(|t| t.op_id).collect();
            reduced.sort_unstable();
            reduced.dedup();
            assert_eq!(reduced.len(), 2 * 2 + 1, "allreduces of two layers and the embedding");
        }
    }
}

/// A reduce waits for its own partial sum and for the peers' copies.
#[test]
fn reduces_wait_for_own_and_peers() {
    let emitted = emit(&ModelFile::of_fixture("mistral"), 4, &["--allreduce", "copy-reduce"]);
    for graph in emitted.main() {
        let triggered_by_peers = |event: u64| {
            let index = (event & 0xFFFF_FFFF) as usize;
            emitted.main().iter().filter(|g| g.rank != graph.rank).any(|g| {
                g.all_tasks.iter().any(|t| {
                    t.trigger_event >> 48 == 1
                        && (t.trigger_event >> 32 & 0xFFFF) as u32 == graph.rank
                        && (t.trigger_event & 0xFFFF_FFFF) as usize == index
                })
            })
        };
        for task in graph.all_tasks.iter().filter(|t| t.task_type == "reduce") {
            let events = if task.dependent_events.is_empty() {
                task.dependent_event.into_iter().collect()
            } else {
                task.dependent_events.clone()
            };
            let remote = events.iter().filter(|&&e| triggered_by_peers(e)).count();
            assert!(remote >= 1 && remote < events.len(), "rank {}: {task:?}", graph.rank);
        }
    }
}

#[test]
fn one_shot_has_no_copies_in_allreduces() {
    let emitted = emit(&ModelFile::of_fixture("llama"), 4, &["--allreduce", "one-shot"]);
    for graph in emitted.main() {
        let flagged = |g: &Graph| g.tensors.iter().filter(|t| t.dtype == "f32_flagged").count();
        assert!(flagged(graph) > 0, "flagged tensors");
        let reduces: Vec<u32> =
            graph.all_tasks.iter().filter(|t| t.task_type == "reduce").map(|t| t.op_id).collect();
        assert!(!reduces.is_empty());
        let copies =
            graph.all_tasks.iter().filter(|t| t.task_type == "nvshmem_copy" && reduces.contains(&t.op_id));
        assert_eq!(copies.count(), 0);
    }
}

/// With static placement, events are polled; only dynamic placement has launches.
#[test]
fn event_types_fit_the_placement() {
    let model = ModelFile::of_fixture("qwen3");
    let emitted = emit(&model, 2, &["--placement", "static"]);
    for graph in emitted.main() {
        assert_eq!(graph.placement, "static");
        assert!(
            graph.all_events[2..].iter().all(|e| matches!(&e.event_type[..], "empty" | "end_of_task_graph"))
        );
    }
    let emitted = emit(&model, 2, &["--placement", "dynamic"]);
    for graph in emitted.main() {
        assert_eq!(graph.placement, "dynamic");
        assert!(graph.all_events.iter().any(|e| e.event_type == "launch_tasks"));
        // Exactly one event launches a task, and a worker that has taken the task waits only for flagged words.
        let ready = graph.all_tasks[2..].iter().all(|t| t.dependent_events.is_empty());
        assert!(ready, "a task depends on several events");
    }
}

/// Emits the same graphs again, byte by byte.
#[test]
fn emitting_is_deterministic() {
    let model = ModelFile::of_fixture("qwen2");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let read = |name: &str| {
        let target = folder.path().join(name);
        let job = Job::alone().arg(model.path()).args(["--ranks", "4", "--emit-graph"]).arg(&target);
        job.run().expect(0);
        let mut files: Vec<_> =
            std::fs::read_dir(&target).expect("files").flatten().map(|e| e.path()).collect();
        files.sort();
        let name = |p: &std::path::Path| p.file_name().expect("a name").to_owned();
        files.iter().map(|p| (name(p), std::fs::read(p).expect("a file"))).collect::<Vec<_>>()
    };
    let (first, second) = (read("first"), read("second"));
    assert!(first.len() >= 8 && first == second);
}

#[test]
fn a_folder_without_a_ranks_file_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = ModelFile::of_fixture("qwen2");
    let emit = Job::alone().arg(model.path()).args(["--ranks", "2", "--emit-graph"]);
    emit.arg(folder.path()).run().expect(0);
    let check = || Job::alone().of("mpk-graph").arg("check").arg(folder.path()).run();
    check().expect(0);
    let file = |rank: u32| folder.path().join(format!("rank-{rank}.task_graph.json"));
    std::fs::remove_file(file(0)).expect("it was written");
    let error = check().expect(2).stderr;
    assert!(error.contains("has no file of rank 0"), "{error}");
}

fn qwen3_shape(hidden: u32, layers: u32, heads: u32, intermediate: u32) -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16", "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": intermediate,
        "vocab_size": 151_936, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "tie_word_embeddings": false,
    })
}

/// Real shapes on a GPU that is not present: built, verified and described within seconds, without MPI.
#[test]
fn real_shapes_for_a_described_device() {
    for (name, config) in
        [("8B", qwen3_shape(4096, 36, 32, 12_288)), ("32B", qwen3_shape(5120, 64, 64, 25_600))]
    {
        let model = ModelFile::random(config, 1).set("max_batch", 8).set("max_seq_len", 4096);
        let job = Job::alone().arg(model.path()).args(["--ranks", "8", "--device", "h200", "--check"]);
        let finished = job.timeout(Duration::from_secs(60)).run().expect(0).expect_nothing_left();
        println!("{name}: {:?}\n{}", finished.elapsed, finished.stdout);
        let out = finished.stdout.to_lowercase();
        for word in ["tasks", "events", "decode", "prefill", "nvshmem_copy"] {
            assert!(out.contains(word), "--check does not print {word:?}: {out}");
        }
    }
    let model =
        ModelFile::random(qwen3_shape(4096, 2, 32, 12_288), 1).set("max_batch", 2).set("max_seq_len", 1024);
    for placement in ["static", "dynamic"] {
        let emitted =
            emit(&model, 4, &["--device", "h200", "--placement", placement, "--allreduce", "copy-reduce"]);
        for graphs in emitted.all() {
            assert!(graphs.iter().all(|g| g.workers == 132), "an H200 has 132 SMs");
            let gated = |t: &str| graphs[0].all_tasks.iter().any(|task| task.task_type == t);
            // Graphs of many rows have wide products, which apply the gate in registers.
            let made = gated("wide_linear") || gated("rmsnorm_linear_silu_mul");
            assert!(made && !gated("silu_mul_linear"), "gated where it is made");
            check(graphs);
            simulate(graphs);
            graphs.iter().for_each(check_copy_reduce);
        }
    }
}

/// The log names the type of the summands that ranks send, for each graph. The emitted copies have that type.
#[test]
fn the_log_names_the_type_of_the_summands() {
    let model =
        ModelFile::random(qwen3_shape(1024, 1, 8, 2048), 1).set("max_batch", 2).set("max_seq_len", 1024);
    let cases: [(&[&str], &[&str]); 4] = [
        (&["--device", "h200"], &["f32", "bf16"]),
        (&["--device", "h200", "--allreduce-dtype", "f32"], &["f32"]),
        (&["--device", "h200", "--allreduce-dtype", "activation"], &["bf16"]),
        (&["--workers", "2"], &["f32"]),
    ];
    for (options, expected) in cases {
        let folder = tempfile::Builder::new().prefix("mpk-graph").tempdir().expect("a temporary folder");
        let job =
            Job::alone().arg(model.path()).args(["--ranks", "2", "--allreduce", "copy-reduce"]).args(options);
        let finished = job.arg("--emit-graph").arg(folder.path()).run().expect(0);
        let line = finished.stderr.lines().find_map(|line| line.split_once("summands of allreduces: "));
        let (_, said) = line.unwrap_or_else(|| panic!("no line: {}", finished.stderr));
        let said: BTreeMap<&str, BTreeSet<&str>> = said
            .split("; ")
            .map(|part| part.split_once(" in ").expect("a type and graphs"))
            .map(|(dtype, graphs)| (dtype, graphs.split(", ").collect()))
            .collect();
        let emitted = Emitted::read(folder.path(), 2);
        let mut sent: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for graphs in emitted.all() {
            let graph = &graphs[0];
            let is_sum = |op: &str| op.starts_with("layer0.down");
            let copies = graph.all_tasks.iter().filter(|task| task.task_type == "nvshmem_copy");
            let sums = copies.filter(|task| is_sum(&graph.ops[task.op_id as usize]));
            let types: BTreeSet<&str> = sums.map(|task| task.inputs[0].data_type.as_str()).collect();
            assert_eq!(types.len(), 1, "{}: {types:?}", graph.name);
            sent.entry(types.first().expect("one type")).or_default().insert(&graph.name);
        }
        assert_eq!(said, sent, "{options:?}");
        assert_eq!(
            sent.keys().copied().collect::<BTreeSet<_>>(),
            expected.iter().copied().collect(),
            "{options:?}"
        );
    }
}

/// Without `--ranks`, the launcher's number of processes is used.
#[test]
fn launched_builds_are_for_all_ranks() {
    let model = ModelFile::of_fixture("llama");
    let check = |job: Job, more: &[&str]| {
        let job = job.arg(model.path()).arg("--check").args(["--workers", "2"]).args(more);
        job.run().expect(0).expect_nothing_left().stdout
    };
    let of_two = check(Job::alone(), &["--ranks", "2"]);
    assert_ne!(of_two, check(Job::alone(), &[]));
    assert_eq!(check(Job::under_mpirun(2), &[]), of_two);
    assert_eq!(check(Job::under_mpirun(4), &["--ranks", "2"]), of_two);
}

/// `--check` alone prints and writes nothing; with `--emit-graph` both happen.
#[test]
fn check_prints_and_runs_nothing() {
    let model = ModelFile::of_fixture("llama");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let target = folder.path().join("graphs");
    let job = Job::alone().arg(model.path()).args(["--ranks", "2", "--check"]);
    let finished = job.clone().run().expect(0).expect_nothing_left();
    assert!(finished.stdout.contains("tasks") && finished.stdout.contains("events"), "{}", finished.stdout);
    let both = job.arg("--emit-graph").arg(&target).run().expect(0);
    assert_eq!(both.stdout, finished.stdout);
    assert!(target.join("rank-1.task_graph.json").exists());
    let names: Vec<_> = std::fs::read_dir(&target).expect("files").flatten().map(|e| e.file_name()).collect();
    assert!(names.iter().all(|n| n.to_string_lossy().ends_with(".task_graph.json")), "{names:?}");
    assert!(!both.stderr.contains("did not write"), "{}", both.stderr);
    // A build for fewer ranks leaves the files of the others, and says so.
    let fewer = Job::alone().arg(model.path()).arg("--emit-graph").arg(&target).run().expect(0);
    assert!(fewer.stderr.contains("did not write") && fewer.stderr.contains("rank-1."), "{}", fewer.stderr);
}
