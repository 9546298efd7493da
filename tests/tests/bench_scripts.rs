//! The benchmark scripts on the CPU target: `scripts/bench_tp.py` makes a table, a report and charts in which losses are marked;
//! `scripts/compare_builds.py` compares builds; `scripts/gpu_session.sh` runs its parts.

use mpk_tests::job::{Turn, binary};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts").join(name)
}

fn bench_tp(arguments: &[&str], output: &Path) -> Output {
    let mut command = Command::new("python3");
    command.arg(script("bench_tp.py")).args(arguments);
    command.args(["--backend", "cpu", "--bench"]).arg(binary().with_file_name("mpk-bench"));
    command.args([Path::new("--output"), output]).env("PYTHONDONTWRITEBYTECODE", "1");
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command.env("OMPI_MCA_rmaps_base_oversubscribe", "1");
    command.output().expect("python3")
}

fn model() -> String {
    script("../examples/tiny/model.json").display().to_string()
}

/// One peer is far faster, the other far slower.
#[test]
fn rows_are_compared_with_peers_and_floor_and_a_loss_is_marked() {
    let _turn = Turn::take();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let peers = folder.path().join("peers.json");
    let row = |tp: u32, ms: f64| json!({"peer": "torch", "what": "decode", "tp": tp, "batch": 1, "context": 16, "ms": ms});
    let wrong = json!({"peer": "torch", "what": "allreduce", "way": "gloo", "tp": 2, "bytes": 8192, "ms": 1e-9, "right": false});
    let report = json!({"measured": {"peers": [row(1, 1e-6), row(2, 1e6), wrong]}});
    std::fs::write(&peers, report.to_string()).expect("a file");
    let model = model();
    let peers = peers.display().to_string();
    let arguments = [
        "--model",
        &model,
        "--tp",
        "1,2",
        "--batch",
        "1",
        "--context",
        "16",
        "--steps",
        "4",
        "--repeats",
        "1",
        "--prompts",
        "1x8",
        "--bytes",
        "8192",
        "--peers",
        "none",
        "--peer-results",
        &peers,
    ];
    let done = bench_tp(&arguments, folder.path());
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(done.status.success(), "{text}{}", String::from_utf8_lossy(&done.stderr));
    let found = |ending: &str| {
        let files = folder.path().read_dir().expect("the folder").map(|file| file.expect("a file").path());
        let files: Vec<PathBuf> = files.filter(|path| path.display().to_string().ends_with(ending)).collect();
        assert_eq!(files.len(), 1, "{ending}: {files:?}");
        std::fs::read_to_string(&files[0]).expect("a file")
    };
    let report: Value = std::fs::read_to_string(
        folder
            .path()
            .read_dir()
            .expect("the folder")
            .map(|f| f.expect("a file").path())
            .find(|p| {
                p.extension().is_some_and(|e| e == "json")
                    && p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("tp-"))
            })
            .expect("a report"),
    )
    .map(|text| serde_json::from_str(&text).expect("JSON"))
    .expect("a file");
    assert_eq!(report["schema"], "mpk-bench-tp/1");
    let rows = report["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 5, "{text}");
    let verdict = |what: &str, tp: u32| {
        let row = rows.iter().find(|row| row["what"] == what && row["tp"] == tp);
        row.and_then(|row| row["verdict"].as_str()).unwrap_or_else(|| panic!("no {what} TP{tp}")).to_string()
    };
    assert!(verdict("decode", 1).starts_with("slower than torch"), "{text}");
    assert_eq!(verdict("decode", 2), "ok");
    assert_eq!(verdict("prefill", 1), "no peer");
    assert_eq!(verdict("allreduce", 2), "no peer", "a wrong sum has no figure");
    assert!(
        rows.iter().filter(|row| row["what"] == "decode").all(|row| row["share_of_floor"].as_f64().is_some()),
        "{text}"
    );
    assert!(text.contains("slower than torch") && found(".md").contains("slower than torch"));
    for chart in ["-latency.svg", "-floor.svg", "-allreduce.svg"] {
        assert!(found(chart).starts_with("<svg"));
    }
}

#[test]
fn bad_options_of_the_benchmark_are_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = model();
    for (arguments, status, words) in [
        (&["--model", &model, "--tp", "0"][..], 2, "--tp"),
        (&["--model", &model, "--peers", "abacus"], 2, "abacus"),
        (&["--model", &model, "--prompts", "512"], 2, "PROMPTSxTOKENS"),
        (&["--model", &model, "--peer-results", "/no/such/report"], 2, "/no/such/report"),
    ] {
        let done = bench_tp(arguments, folder.path());
        let text = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(status), "{text}");
        assert!(text.contains(words) && !text.contains("Traceback"), "{text}");
    }
}

/// A build compared with itself and a tuning value, on one and two ranks; with a folder that has no programs, and with a value
/// without a name. More ranks than GPUs.
#[test]
fn builds_take_turns_and_are_judged() {
    let _turn = Turn::take();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let report = folder.path().join("report.json");
    let programs = binary().parent().expect("a folder").display().to_string();
    let compare = |builds: [&str; 2], backend: &str, ranks: u32| {
        let mut command = Command::new("python3");
        command.arg(script("compare_builds.py")).env("PYTHONDONTWRITEBYTECODE", "1");
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        command.env("OMPI_MCA_rmaps_base_oversubscribe", "1");
        for (name, build) in ["before", "after"].iter().zip(builds) {
            command.args(["--build", &format!("{name}={build}")]);
        }
        let model = model();
        for (what, ranks, size) in [("decode", ranks, 2), ("prefill", 1, 20)] {
            command.args([format!("--{what}"), format!("{model}:{ranks}:{size}")]);
        }
        command.args([
            "--backend",
            backend,
            "--context",
            "16",
            "--steps",
            "4",
            "--repeats",
            "1",
            "--rounds",
            "2",
        ]);
        command.args([Path::new("--json"), &report]).output().expect("python3")
    };
    let tuned = format!("{programs},attention.kv_heads=1,linear.gating_workers=1");
    let done = compare([&programs, &tuned], "cpu", 2);
    let text = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{text}{}", String::from_utf8_lossy(&done.stderr));
    let found: Value = serde_json::from_slice(&std::fs::read(&report).expect("a report")).expect("JSON");
    for case in found["cases"].as_array().expect("cases") {
        for build in ["before", "after"] {
            let rounds = case["ms"][build].as_array().expect("rounds");
            assert!(rounds.len() == 2 && rounds.iter().all(|ms| ms.as_f64() > Some(0.0)), "{found}");
        }
    }
    assert!(
        text.contains("2 ranks, batch 2") && text.contains("prompt 20") && !text.contains("other tokens"),
        "{text}"
    );
    assert_eq!(
        found["tuned"],
        json!({"before": [], "after": ["attention.kv_heads=1", "linear.gating_workers=1"]})
    );
    for (builds, backend, ranks, status, words) in [
        ([&*programs, "/nonexistent"], "cpu", 2, 2, "contains mpk-bench"),
        ([&programs, &format!("{programs},1")], "cpu", 2, 2, "not '1'"),
        ([&programs, &programs], "cuda", 4096, 3, "4096 ranks, but "),
    ] {
        let done = compare(builds, backend, ranks);
        let text = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(status), "{text}");
        assert!(text.contains(words) && !text.contains("Traceback"), "{text}");
    }
}

/// Two batches of the tiny model; a shape and a folder that do not exist.
#[test]
fn the_cost_of_sampling_is_measured_and_judged() {
    let _turn = Turn::take();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let report = folder.path().join("report.json");
    let bench = |arguments: &[&str]| {
        let mut command = Command::new("python3");
        command.arg(script("bench_sampling.py")).env("PYTHONDONTWRITEBYTECODE", "1").args(arguments);
        command.output().expect("python3")
    };
    let build = format!("mpk={}", binary().parent().expect("a folder").display());
    let (model, file) = (model(), report.display().to_string());
    let sizes = ["--steps", "5", "--rounds", "1", "--batch", "1", "3", "--backend", "cpu"];
    let done = bench(&[&["--build", &build, "--model", &model, "--json", &file], &sizes[..]].concat());
    let text = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{text}{}", String::from_utf8_lossy(&done.stderr));
    assert!(text.contains("batch 3, us a step") && text.contains("right: the same tokens"), "{text}");
    let found: Value = serde_json::from_slice(&std::fs::read(&report).expect("a report")).expect("JSON");
    let rows = found["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 14);
    assert!(rows.iter().all(|row| row["us"]["mpk"][0].as_f64() > Some(0.0)), "{found}");
    assert_eq!(bench(&["--build", &build, "--model", "nosuch"]).status.code(), Some(2));
    assert_eq!(bench(&["--build", "mpk=/nonexistent"]).status.code(), Some(2));
}

#[test]
fn a_session_runs_its_parts_and_writes_what_they_measured() {
    let _turn = Turn::take();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut command = Command::new("bash");
    command.arg(script("gpu_session.sh")).args([
        "--backend",
        "cpu",
        "--gpus",
        "1",
        "--only",
        "sampled,sampling,nvshmem,tasks",
    ]);
    command
        .env("OUT", folder.path())
        .env("CARGO_TARGET_DIR", binary().ancestors().nth(2).expect("the target folder"));
    let done = command.output().expect("bash");
    let text = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{text}{}", String::from_utf8_lossy(&done.stderr));
    for line in ["ok sampled", "skipped nvshmem", "ok sampling", "ok tasks"] {
        assert!(text.contains(line), "{text}");
    }
    assert!(
        std::fs::read_to_string(folder.path().join("tasks.jsonl")).expect("a file").contains("\"chain\"")
    );
    let refused =
        Command::new("bash").arg(script("gpu_session.sh")).args(["--only", "teapot"]).output().expect("bash");
    assert_eq!(refused.status.code(), Some(2), "{}", String::from_utf8_lossy(&refused.stderr));
}
