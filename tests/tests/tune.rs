//! `mpk-bench tune`: candidates are timed, the winner is kept, and later runs use it and say so.

use mpk_tests::Job;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

fn tiny() -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/tiny/model.json").display().to_string()
}

fn tune(cache: &Path, options: &[&str]) -> Job {
    let short = ["--batch", "2", "--context", "20", "--steps", "4", "--repeats", "2"];
    let job = Job::alone().of("mpk-bench").args(["tune", &tiny()]).args(short).args(options);
    // Starts mpirun inside a job: as root it needs permission.
    job.env("MPK_CACHE_DIR", &cache.display().to_string())
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
}

fn object(text: &str) -> Value {
    serde_json::from_str(text.trim()).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn run(cache: &Path, options: &[&str]) -> Job {
    let workers: &[&str] = if options.contains(&"--workers") { &[] } else { &["--workers", "1"] };
    let job =
        Job::alone().args([&tiny(), "--max-new-tokens", "4", "--backend", "cpu"]).args(workers).args(options);
    job.env("MPK_CACHE_DIR", &cache.display().to_string())
}

/// As the help of `--tune` says.
#[test]
fn the_list_of_knobs_needs_no_model() {
    let finished = Job::alone().of("mpk-bench").args(["tune", "--list"]).run().expect(0);
    assert!(
        finished.stdout.lines().any(|line| object(line)["name"] == "attention.kv_heads"),
        "{}",
        finished.stdout
    );
}

#[test]
fn every_candidate_is_timed_and_a_dry_run_keeps_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let only =
        ["--tp", "2", "--only", "linear,placement", "--dry-run", "--", "--backend", "cpu", "--workers", "1"];
    let finished = tune(folder.path(), &only).run().expect(0).expect_nothing_left();
    let found = object(&finished.stdout);
    let trials: Vec<(String, u64)> = found["trials"]
        .as_array()
        .expect("trials")
        .iter()
        .map(|trial| (trial["knob"].as_str().unwrap_or("").to_string(), trial["value"].as_u64().unwrap_or(9)))
        .collect();
    let of_parts = |(name, _): &(String, u64)| name.starts_with("linear.") && name.contains("part");
    let expected = [("linear.gating_workers", 1), ("linear.gating_workers", 65536), ("placement.dynamic", 1)];
    let others: Vec<_> = trials.iter().filter(|trial| !of_parts(trial)).cloned().collect();
    assert_eq!(others, expected.map(|(name, value)| (name.to_string(), value)));
    assert!(trials.iter().any(of_parts), "{trials:?}");
    // Later candidates are compared with a candidate that won. One of two equally fast candidates may win by chance.
    let first_is_faster = found["trials"][0]["kept"] == true;
    for trial in found["trials"].as_array().expect("trials") {
        assert_eq!(trial["failed"], Value::Null, "{trial}");
        assert_eq!(trial["same_tokens"], true, "{trial}");
        assert!(trial["ms"]["decode-2"].as_f64().is_some_and(|ms| ms > 0.0), "{trial}");
        // Products of two ranks have no parts. A single worker gates its own outputs only if the knob says so. Another placement gives
        // other graphs.
        if !trial["knob"].as_str().is_some_and(|name| name.contains("part")) {
            assert_eq!(trial["same_graphs"], trial["value"] == 65536 && !first_is_faster, "{trial}");
        }
    }
    assert_eq!((&found["table"], &found["place"]["ranks"]), (&Value::Null, &json!(2)));
    assert!(!folder.path().join("tuning").exists());
}

#[test]
fn a_run_uses_the_tuning_kept_for_it_and_says_so() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let told = |job: Job| {
        job.run().expect(0).stderr.lines().find(|line| line.contains("tuned for")).map(String::from)
    };
    assert_eq!(told(run(folder.path(), &[])), None);
    let only = ["--only", "linear", "--", "--backend", "cpu", "--workers", "1"];
    let kept = object(&tune(folder.path(), &only).run().expect(0).stdout);
    let path = Path::new(kept["table"].as_str().expect("a path"));
    // Replaces the winner.
    let mut table = object(&fs::read_to_string(path).expect("the table"));
    table["values"] = json!({"attention.split_positions": 64});
    fs::write(path, table.to_string()).expect("the table");
    let line = told(run(folder.path(), &[])).expect("a line");
    assert!(line.contains("attention.split_positions 64"), "{line}");
    let line = told(run(folder.path(), &["--tune", "attention.split_positions=256"])).expect("a line");
    assert!(line.contains("attention.split_positions 256"), "{line}");
    assert_eq!(told(run(folder.path(), &["--tuning", "off"])), None);
    // Another number of workers counts as another machine.
    assert_eq!(told(run(folder.path(), &["--workers", "2"])), None);

    table["ranks"] = json!(7);
    fs::write(path, table.to_string()).expect("the table");
    let finished = run(folder.path(), &[]).run().expect(2);
    assert!(finished.stderr.contains("run `mpk-bench tune` again"), "{}", finished.stderr);
}

#[test]
fn unknown_names_are_refused_with_a_list_of_known_ones() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (job, words) in [
        (run(folder.path(), &["--tune", "attention.splits=4"]), "attention.split_positions"),
        (run(folder.path(), &["--tune", "attention.split_positions=3"]), "64, 128"),
        (run(folder.path(), &["--tune", "attention.split_positions"]), "NAME=VALUE"),
        (tune(folder.path(), &["--only", "nothing", "--", "--backend", "cpu"]), "linear.gating_workers"),
        (
            tune(
                folder.path(),
                &["--tp", "2", "--launcher", "no-such-mpirun -n {N}", "--", "--backend", "cpu"],
            ),
            "--launcher",
        ),
        (tune(folder.path(), &["--gain=-1"]), "--gain"),
    ] {
        let finished = job.run();
        assert!(matches!(finished.status, Some(2 | 3)), "{words}: {:?}", finished.status);
        assert!(finished.stderr.contains(words), "{words}: {}", finished.stderr);
        assert!(finished.stdout.is_empty(), "{}", finished.stdout);
    }
}
