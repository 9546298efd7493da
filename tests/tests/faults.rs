//! Proves that no fault hangs a job. If a rank stalls, stops, dies or is interrupted, all ranks end within seconds and
//! say what waited for what. No process and no shared memory is left.

use mpk_tests::{Finished, Job, ModelFile, Running, launcher};
use std::time::Duration;

/// A fault must end the job within this time: the deadline of one second, and the launcher's clean-up.
const SOON: Duration = Duration::from_secs(15);

/// Two slow ranks of the trained model: 3 ms before each task of one operator make a token slow enough for a
/// fault to hit in the middle.
fn slow(model: &ModelFile, ranks: u32) -> Job {
    Job::new(ranks)
        .arg(model.path())
        .args(["--ignore-eos", "--max-new-tokens", "400", "--debug-stall", "0:4:20"])
        .timeout(Duration::from_secs(60))
}

fn ends_soon(finished: &Finished, begin: Duration) {
    let took = finished.elapsed.saturating_sub(begin);
    assert!(took < SOON, "{}: took {took:?}\nstderr: {}", finished.description, finished.stderr);
    assert!(!finished.stderr.contains("panicked"), "{}", finished.stderr);
}

/// Starts a job and waits until it streams text: then the kernel runs on all ranks.
fn streaming(job: &Job) -> (Running, Duration) {
    let begin = std::time::Instant::now();
    let mut running = job.start();
    running.wait_for_output(|text| text.len() > 4);
    (running, begin.elapsed())
}

/// A rank that makes no progress: all ranks end with status 4, and the report says what waits for what.
#[test]
fn a_stalled_rank_ends_the_run_with_a_report() {
    let model = ModelFile::of_fixture("tiny");
    for (placement, lowering) in [
        ("static", "copy-reduce"),
        ("static", "one-shot"),
        ("dynamic", "copy-reduce"),
        ("dynamic", "one-shot"),
    ] {
        for ranks in [2, 4] {
            let job = Job::new(ranks)
                .arg(model.path())
                .args(["--placement", placement, "--allreduce", lowering])
                .args(["--deadline", "1", "--debug-stall", "1:6:120000"]);
            let finished = job.run().expect_nothing_left();
            let what = format!("{}\nstderr: {}", finished.description, finished.stderr);
            assert_eq!(finished.status, Some(4), "{what}");
            ends_soon(&finished, Duration::ZERO);
            let report = &finished.stderr;
            for word in ["--deadline", "rank 0", "worker 0", "task ", "iteration "] {
                assert!(report.contains(word), "the report does not say {word:?}: {what}");
            }
            // With dynamic placement, the thread that waits is a scheduler, which has no task.
            let waits = report.lines().any(|line| {
                ["rank ", "event ", "count wanted ", "count seen "].iter().all(|word| line.contains(word))
            });
            // Flagged words have no counter: in that case the report names the task that polls them.
            let flagged = lowering == "one-shot" && report.contains("flagged words");
            assert!(waits || flagged, "no line says what was waited for: {what}");
        }
    }
}

/// A single rank also hits its own deadline.
#[test]
fn a_stalled_worker_of_one_rank_ends_the_run() {
    let model = ModelFile::of_fixture("tiny");
    for placement in ["static", "dynamic"] {
        let job = Job::new(1).arg(model.path()).args(["--placement", placement, "--workers", "2"]).args([
            "--deadline",
            "1",
            "--debug-stall",
            "0:6:120000",
        ]);
        let finished = job.run().expect(4).expect_nothing_left();
        ends_soon(&finished, Duration::ZERO);
        assert!(finished.stderr.contains("rank 0"), "{}", finished.stderr);
    }
}

/// Other ranks wait for a rank that is slower but not stuck.
#[test]
fn a_slow_rank_within_the_deadline_is_no_fault() {
    let model = ModelFile::of_fixture("tiny");
    let job = Job::new(2)
        .arg(model.path())
        .args(["--max-new-tokens", "2", "--deadline", "2", "--debug-stall", "1:4:600"])
        .timeout(Duration::from_secs(120));
    job.run().expect(0).expect_nothing_left();
}

/// SIGKILL of one rank ends the others.
#[test]
fn a_killed_rank_ends_the_job() {
    let model = ModelFile::of_fixture("tiny");
    for victim in [0, 1] {
        let (running, begin) = streaming(&slow(&model, 2));
        let ranks = running.ranks();
        assert_eq!(ranks.len(), 2, "{ranks:?}");
        running.signal_process(&ranks[victim], libc::SIGKILL);
        let finished = running.wait();
        ends_soon(&finished, begin);
        assert_ne!(finished.status, Some(0), "{}", finished.stderr);
        finished.expect_nothing_left();
    }
}

/// Other ranks wait for a rank that stops answering, for the deadline at most.
#[test]
fn a_stopped_rank_ends_the_job() {
    let model = ModelFile::of_fixture("tiny");
    for victim in [0, 1] {
        let (running, begin) = streaming(&slow(&model, 2).args(["--deadline", "1"]));
        let ranks = running.ranks();
        running.signal_process(&ranks[victim], libc::SIGSTOP);
        let finished = running.wait();
        ends_soon(&finished, begin);
        assert_ne!(finished.status, Some(0), "{}", finished.stderr);
        assert!(finished.stderr.contains("--deadline"), "{}", finished.stderr);
        finished.expect_nothing_left();
    }
}

/// Ctrl-C, and the signal with which a batch system ends a job.
#[test]
fn signals_to_mpirun_end_the_job() {
    let model = ModelFile::of_fixture("tiny");
    for signal in [libc::SIGINT, libc::SIGTERM] {
        let (running, begin) = streaming(&slow(&model, 2));
        running.signal(signal);
        let finished = running.wait();
        ends_soon(&finished, begin);
        assert_ne!(finished.status, Some(0), "{}", finished.stderr);
        finished.expect_nothing_left();
    }
}

/// The same without `mpirun`.
#[test]
fn signals_to_one_rank_end_it() {
    let model = ModelFile::of_fixture("tiny");
    for signal in [libc::SIGINT, libc::SIGTERM] {
        let (running, begin) = streaming(&slow(&model, 1));
        running.signal(signal);
        let finished = running.wait();
        ends_soon(&finished, begin);
        assert_ne!(finished.status, Some(0), "{}", finished.stderr);
        finished.expect_nothing_left();
    }
}

/// A reader that goes away (`mpk-run ... | head -1`) causes no hang and no panic.
#[test]
fn a_closed_pipe_does_not_hang() {
    let model = ModelFile::of_fixture("tiny");
    let mut running = Job::new(2).arg(model.path()).args(["--ignore-eos", "--max-new-tokens", "300"]).start();
    running.close_stdout_after_first_bytes();
    let mut finished = running.wait();
    assert!(!finished.stderr.contains("panicked"), "{}", finished.stderr);
    // If its stdout is closed, mpirun itself (Open MPI 4.1) sometimes ends badly and leaves its own files.
    finished.in_temporary.retain(|path| !launcher::is_its_own(path));
    finished.expect_nothing_left();
}
