//! `mpk-bench`: each figure comes with a verdict, on one rank and on two; wrong results have no figures.

use mpk_tests::Job;
use mpk_tests::fixtures::Fixture;
use serde_json::{Value, json};
use std::path::Path;

fn bench(ranks: u32, options: &[&str]) -> Job {
    Job::new(ranks).of("mpk-bench").args(options).args(["--backend", "cpu"])
}

/// The single object that a run prints.
fn object(job: Job) -> Value {
    let finished = job.run().expect(0).expect_nothing_left();
    let mut lines = finished.stdout.lines();
    let object = serde_json::from_str(lines.next().expect("a line")).expect("an object");
    assert_eq!(lines.next(), None, "{}", finished.stdout);
    object
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("no number: {value}"))
}

fn tiny() -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/tiny/model.json").display().to_string()
}

/// The printed model.json is one that mpk-run accepts.
#[test]
fn models_have_the_limits_of_mpk_run() {
    let model =
        |options: &[&str]| Job::alone().of("mpk-bench").args(["model", "qwen3-0.6b"]).args(options).run();
    let printed = model(&["--max-batch", "4"]).expect(0).stdout;
    // Otherwise a run would not take the chunk that suits its device.
    assert!(printed.contains("\"max_batch\": 4") && !printed.contains("prefill_chunk"), "{printed}");
    for (option, value, place) in [
        ("--max-batch", "0", "max_batch"),
        ("--max-batch", "5000", "max_batch"),
        ("--max-seq-len", "0", "max_seq_len"),
        ("--prefill-chunk", "0", "runtime.prefill_chunk"),
    ] {
        let finished = model(&[option, value]).expect(2);
        assert!(finished.stdout.is_empty() && finished.stderr.contains(place), "{}", finished.stderr);
    }
}

#[test]
fn decode_has_figures_a_floor_a_budget_and_tokens() {
    let model = tiny();
    let options =
        ["decode", "--model", &model, "--context", "20", "--batch", "2", "--steps", "12", "--repeats", "2"];
    let found = object(bench(1, &options).args(["--tokens", "--budget", "--workers", "2"]));
    assert_eq!(found["verdict"]["right"], true, "{found}");
    assert_eq!(found["verdict"]["repetitions_with_the_same_tokens"], 2);
    let requests = found["requests"].as_array().expect("requests");
    assert!(requests.iter().all(|r| r["tokens"].as_array().is_some_and(|t| t.len() == 13)), "{found}");
    assert!(number(&found["ms_per_step"]) > 0.0);
    assert_eq!(found["floor"]["source"], "measured");
    let patterns = found["floor"]["patterns"].as_array().expect("patterns");
    assert_eq!(
        patterns[0]["bytes_per_second"], found["floor"]["bytes_per_second"],
        "the best of them counts"
    );

    // The items of the budget add up to the whole iteration.
    let budget = &found["budget"];
    let operators = budget["operators"].as_array().expect("operators");
    assert!(operators.iter().any(|o| o["op"] == "lm_head"), "{budget}");
    assert_eq!(budget["graph"], "decode-2");
    let listed: f64 = operators.iter().map(|o| number(&o["total_us"])).sum();
    let between = number(&budget["mean_us"]) - listed;
    assert!(between > 0.0 && number(&budget["batch_step_us"]) > 0.0, "{budget}");

    // mpk-run gives the same tokens for the same requests on two ranks.
    let prompt = |request: usize| {
        let ids: Vec<String> = (0..20).map(|i| ((i * 7 + request) % 31).to_string()).collect();
        ids.join(",")
    };
    let job = Job::new(2).arg(&model).args(["--max-new-tokens", "13", "--ignore-eos"]);
    let run = job.args(["--prompt-tokens", &prompt(0), "--prompt-tokens", &prompt(1)]).run_json();
    for (request, found) in run.requests.iter().zip(requests) {
        assert_eq!(json!(request.tokens), found["tokens"]);
    }
}

/// Requests that arrive while the kernel runs, against a fixed batch: the same tokens, and every step of a full batch is counted.
#[test]
fn requests_that_arrive_are_compared_with_a_fixed_batch() {
    let model = tiny();
    let options = ["online", "--model", &model, "--batch", "4", "--context", "96", "--new-tokens", "64"];
    for ranks in [1, 2] {
        let found = object(bench(ranks, &options).args(["--repeats", "3", "--gap", "6", "--workers", "1"]));
        assert_eq!(found["verdict"]["right"], true, "{found}");
        assert_eq!(found["prompt"], 65, "a page and a token");
        let list = |kind: &str, name: &str| found[kind][name].as_array().expect("a list").clone();
        for kind in ["fixed", "arriving", "changing"] {
            assert!(number(&found[kind]["ms"]["median"]) > 0.0, "{found}");
            assert_eq!(found[kind]["ms"]["samples"].as_array().map(Vec::len), Some(3), "{found}");
        }
        // On the CPU, graphs of fewer rows give the same bits.
        assert_eq!(list("arriving", "departs"), vec![Value::from(vec![Value::Null; 4]); 3], "{found}");
        // All four generate from their first tokens to their last.
        assert_eq!(list("fixed", "steps"), [63, 63, 63]);
        // The last arrives when the first has 18 tokens or more.
        let steps = list("arriving", "steps");
        assert!(steps.iter().all(|steps| number(steps) <= 64.0 - 18.0), "{found}");
        // Every prompt enters as one row; with the others there are three times as many.
        assert_eq!(list("fixed", "prompt_tokens_computed"), [4, 4, 4]);
        assert_eq!(list("changing", "prompt_tokens_computed"), [12, 12, 12]);
    }
    let late = bench(1, &options).args(["--gap", "20"]).run().expect(2);
    assert!(late.stderr.contains("--gap 20: the last of 4 requests"), "{}", late.stderr);
}

/// Prompts of 20 tokens enter eight rows at a time, over many iterations. Only steps in which all four requests decode
/// are timed.
#[test]
fn steps_of_a_full_batch_are_timed_and_no_others() {
    let fixture = Fixture::open("qwen3");
    let some: Vec<_> = fixture.expected.requests.iter().take(1).cloned().collect();
    let model = fixture.model_of(&some).set("runtime.prefill_chunk", 8);
    let path = model.path().display().to_string();
    let options =
        ["decode", "--model", &path, "--context", "20", "--batch", "4", "--steps", "6", "--repeats", "1"];
    let found = object(bench(1, &options).args(["--tokens", "--budget", "--workers", "2"]));
    assert_eq!(found["budget"]["graph"], "decode-4", "the last iterations are of a full batch: {found}");
    assert_eq!(found["steps"], 6, "{found}");
    let lengths: Vec<usize> = found["requests"]
        .as_array()
        .expect("requests")
        .iter()
        .map(|r| r["tokens"].as_array().map_or(0, Vec::len))
        .collect();
    assert_eq!(lengths[3], 7, "{found}");
    assert!(lengths.is_sorted_by(|a, b| a > b), "who comes early generates for longer: {lengths:?}");

    // The first requests would exceed this number of new tokens before the last prompt has entered.
    let options = [
        "decode",
        "--model",
        &path,
        "--context",
        "3",
        "--batch",
        "4",
        "--steps",
        "6",
        "--prefill-share",
        "0.1",
    ];
    let refused = bench(1, &options).run().expect(2).expect_nothing_left();
    assert!(refused.stdout.is_empty() && refused.stderr.contains("--context"), "{}", refused.stderr);
}

#[test]
fn wrong_tokens_have_no_figures() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("other.json").display().to_string();
    std::fs::write(&path, json!({"requests": [{"tokens": [1, 2]}]}).to_string()).expect("a file");
    let model = tiny();
    let options = [
        "decode",
        "--model",
        &model,
        "--context",
        "8",
        "--steps",
        "4",
        "--repeats",
        "1",
        "--reference",
        &path,
    ];
    for ranks in [1, 2] {
        let finished = bench(ranks, &options).run().expect(4).expect_nothing_left();
        assert!(finished.stdout.is_empty(), "{}", finished.stdout);
        assert!(finished.stderr.contains("no figures"), "{}", finished.stderr);
    }
}

#[test]
fn a_step_is_compared_with_a_plain_read_of_its_weights() {
    let model = tiny();
    let options = ["stream", "--model", &model, "--context", "8", "--steps", "4", "--repeats", "2"];
    for ranks in [1, 2] {
        let found = object(bench(ranks, &options));
        assert_eq!((&found["what"], &found["tp"]), (&json!("stream"), &json!(ranks)), "{found}");
        assert_eq!((&found["verdict"]["right"], &found["variants"]), (&json!(true), &json!([])), "{found}");
        assert_eq!(found["read"]["bytes"]["weights"], found["step_bytes"], "{found}");
        assert!(
            number(&found["ordinary"]["ms"]["median"]) > 0.0 && number(&found["read"]["ms"]) > 0.0,
            "{found}"
        );
    }
}

#[test]
fn a_read_rate_has_a_verdict() {
    let found = object(Job::alone().of("mpk-bench").args(["memory", "--mebibytes", "8", "--threads", "2"]));
    assert_eq!((&found["what"], &found["verdict"]["right"]), (&json!("memory"), &json!(true)), "{found}");
    assert_eq!(found["verdict"]["passes"], 5 * 2 * 4, "{found}");
    assert!(number(&found["read_bytes_per_second"]) > 0.0, "{found}");
}

#[test]
fn prefill_of_two_ranks() {
    let model = tiny();
    let found =
        object(bench(2, &["prefill", "--model", &model, "--prompt", "40", "--batch", "2", "--repeats", "2"]));
    assert_eq!((&found["tp"], &found["verdict"]["right"]), (&json!(2), &json!(true)), "{found}");
    assert!(number(&found["ms_median"]) > 0.0 && number(&found["tokens_per_s"]) > 0.0);
}

#[test]
fn an_allreduce_of_each_lowering_and_size() {
    for (lowering, bytes) in [("one-shot", "8192"), ("copy-reduce", "1024"), ("two-shot", "32768")] {
        let found =
            object(bench(2, &["allreduce", "--bytes", bytes, "--allreduce", lowering, "--repeats", "1"]));
        assert_eq!(
            (&found["allreduce"], &found["verdict"]["right"]),
            (&json!(lowering), &json!(true)),
            "{found}"
        );
        assert!(number(&found["us"]["median"]) > 0.0, "{found}");
    }
    let rounded =
        ["allreduce", "--repeats", "1", "--allreduce", "two-shot", "--allreduce-dtype", "activation"];
    let found = object(bench(2, &rounded));
    assert_eq!(
        (&found["allreduce_dtype"], &found["verdict"]["right"]),
        (&json!("activation"), &json!(true)),
        "{found}"
    );
}

#[test]
fn tasks_in_both_shapes_and_placements() {
    let finished = bench(1, &["tasks", "--repeats", "1", "--workers", "2"]).run().expect(0);
    let found: Vec<Value> =
        finished.stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let kinds: Vec<_> = found.iter().map(|f| (f["shape"].clone(), f["placement"].clone())).collect();
    let expected = [("chain", "static"), ("chain", "dynamic"), ("fan", "static"), ("fan", "dynamic")];
    assert_eq!(kinds, expected.map(|(shape, placement)| (json!(shape), json!(placement))));
    assert!(found.iter().all(|f| f["verdict"]["right"] == true), "{found:?}");
}

#[test]
fn a_timeline_of_mpk_run_is_summarised() {
    let fixture = Fixture::open("qwen3");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("trace.json");
    let some: Vec<_> = fixture.expected.requests.iter().take(1).cloned().collect();
    let model = fixture.model_of(&some).set("generate.max_new_tokens", 6);
    Job::new(2).arg(model.path()).arg("--trace").arg(&path).run_json();
    let finished = Job::alone().of("mpk-bench").arg("budget").arg(&path).run().expect(0);
    let budget: Value = serde_json::from_str(&finished.stdout).expect("an object");
    assert_eq!(budget["workers"].as_array().map(Vec::len), Some(2), "{budget}");
    for shares in budget["workers"].as_array().expect("ranks") {
        let all: f64 = shares.as_object().expect("shares").values().map(number).sum();
        assert!((all - 1.0).abs() < 0.02, "{shares}");
    }
    assert!(finished.stderr.contains("lm_head"), "{}", finished.stderr);
}

#[test]
fn wrong_input_is_status_2() {
    let model = tiny();
    for (options, words) in [
        (&["decode", "--model", &model, "--read-rate=-1"][..], "--read-rate"),
        (&["decode", "--model", "no-such-model"], "no-such-model"),
        (&["decode", "--model", &model, "--reference", "/no/such/file"], "/no/such/file"),
        (&["decode", "--model", &model, "--context", "0"], "--context"),
        (&["prefill", "--model", &model, "--repeats", "0"], "--repeats"),
        (&["stream", "--model", &model, "--without", "waits"], "CPU target"),
        (&["stream", "--model", &model, "--without", "waits+norms"], "norms"),
        (&["stream", "--model", &model, "--batch", "17"], "--batch 17"),
        (&["stream", "--model", &model, "--placement", "dynamic"], "--placement"),
        (&["allreduce"], "mpirun -n 2"),
        (&["allreduce", "--bytes", "100"], "--bytes 100"),
    ] {
        let finished = bench(1, options).run().expect(2);
        assert!(finished.stderr.contains(words), "{options:?}: {}", finished.stderr);
        assert!(finished.stdout.is_empty(), "{options:?}: {}", finished.stdout);
    }
    let nothing = Job::alone().of("mpk-bench").args(["budget", "/no/such/trace.json"]).run().expect(2);
    assert!(nothing.stderr.contains("/no/such/trace.json"), "{}", nothing.stderr);
}
