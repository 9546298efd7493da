//! Proves that no rank waits for another without a bound, in any phase, and that ranks with different jobs do not
//! start.

use mpk_tests::preload::preload;
use mpk_tests::{Finished, Job, ModelFile};
use std::time::Duration;

/// A fault ends the job within this time: the deadline of one second, 10 s, and a start on a busy machine.
const SOON: Duration = Duration::from_secs(13);
const DEADLINE: [&str; 2] = ["--deadline", "1"];

fn job(model: &ModelFile, ranks: u32) -> Job {
    patient(model, ranks).args(DEADLINE)
}

/// With mpk-run's default deadline, which no test here waits for.
fn patient(model: &ModelFile, ranks: u32) -> Job {
    Job::new(ranks).arg(model.path()).args(["--prompt-tokens", "1,2,3", "--max-new-tokens", "4"])
}

fn ended(finished: Finished, status: i32, words: &[&str]) {
    let what = format!("{}\nstdout: {}\nstderr: {}", finished.description, finished.stdout, finished.stderr);
    assert_eq!((finished.status, finished.signal), (Some(status), None), "{what}");
    assert!(finished.elapsed < SOON, "took {:?}: {what}", finished.elapsed);
    assert!(finished.stdout.is_empty(), "{what}");
    for word in words {
        assert!(finished.stderr.contains(word), "no {word:?}: {what}");
    }
    finished.expect_nothing_left();
}

/// If a rank is stopped at any line of the log, the others name it.
#[test]
fn a_rank_that_stops_at_any_line_of_the_log_is_named() {
    let model = ModelFile::of_fixture("tiny");
    for (line, victim) in [("backend cpu", 1), ("graphs built", 0), ("ready for weights", 1), ("weights:", 0)]
    {
        let mut running = job(&model, 2).timeout(Duration::from_secs(40)).start();
        running.wait_for_log(line);
        let ranks = running.ranks();
        running.signal_process(&ranks[victim], libc::SIGSTOP);
        let finished = running.wait();
        // The ranks may have finished the run before the signal came.
        if finished.stderr.contains("loaded in") {
            assert!(finished.elapsed < SOON);
            continue;
        }
        let what = format!("{line}: {}", finished.stderr);
        assert_eq!(finished.status, Some(4), "{what}");
        assert!(finished.elapsed < SOON, "{what}");
        // A rank that waits for it names it; if all ranks are idle, the watchdog does.
        let named = [format!("rank {victim} did not"), format!("rank {victim} is lost")];
        assert!(named.iter().any(|words| finished.stderr.contains(words)), "none of {named:?}: {what}");
        for word in ["stopped", "--deadline"] {
            assert!(finished.stderr.contains(word), "no {word:?}: {what}");
        }
        finished.expect_nothing_left();
    }
}

/// A rank that stops before each point where the ranks meet, including the first and the last.
#[test]
fn a_rank_that_stops_before_any_step_is_named() {
    let model = ModelFile::of_fixture("tiny");
    let steps = steps(&job(&model, 2));
    for step in [1, 2, steps / 2, steps - 2, steps - 1, steps] {
        for victim in [0, 1] {
            let fault = format!("{victim}:{step}:stop");
            let finished =
                job(&model, 2).args(["--debug-fault", &fault]).timeout(Duration::from_secs(40)).run();
            let what = format!("{fault}: {}", finished.stderr);
            assert_eq!(finished.status, Some(4), "{what}");
            assert!(finished.elapsed < SOON, "{what}");
            assert!(finished.stderr.contains(&format!("rank {victim} ")), "{what}");
            finished.expect_nothing_left();
        }
    }
}

/// A rank that stops while MPI creates the shared window. The window's file has a name just then, and must not stay.
#[test]
fn a_window_that_is_half_made_leaves_no_file() {
    let model = ModelFile::of_fixture("tiny");
    let finished = job(&model, 2)
        .env("LD_PRELOAD", &preload(model.folder(), "stop_at_window"))
        .timeout(Duration::from_secs(40))
        .run();
    ended(finished, 4, &["rank 1 ", "the shared window", "stopped"]);
}

/// MPI's own handling of an error would end the rank with the error's number.
#[test]
fn a_failed_call_of_mpi_ends_the_job_with_a_message() {
    let model = ModelFile::of_fixture("tiny");
    let finished = patient(&model, 2)
        .env("LD_PRELOAD", &preload(model.folder(), "fail_send"))
        .timeout(Duration::from_secs(40))
        .run();
    ended(finished, 4, &["an MPI call in `", "(MPI's error 17)"]);
}

/// Number of times that the ranks of this job meet.
fn steps(job: &Job) -> u64 {
    let finished = job.clone().env("MPK_LOG", "debug").run().expect(0);
    let numbers = finished
        .stderr
        .lines()
        .filter_map(|line| line.split_once("step ")?.1.split_once(':')?.0.parse().ok());
    let steps = numbers.max().unwrap_or(0);
    assert!(steps > 10, "{}", finished.stderr);
    steps
}

/// A rank that ends too early ends the others at once.
#[test]
fn a_rank_that_ends_alone_ends_the_job() {
    let model = ModelFile::of_fixture("tiny");
    let steps = steps(&job(&model, 2));
    for (step, kind) in
        [(2, "exit"), (steps / 2, "exit=0"), (steps / 3, "exit=7"), (steps - 1, "kill"), (5, "panic")]
    {
        for victim in [0, 1] {
            let fault = format!("{victim}:{step}:{kind}");
            let finished = patient(&model, 2).args(["--debug-fault", &fault]).run();
            let what = format!("{fault}: {}", finished.stderr);
            assert!(!finished.stderr.contains("Usage"), "{what}");
            assert_ne!(finished.status, Some(0), "{what}");
            assert!(finished.elapsed < SOON, "{what}");
            finished.expect_nothing_left();
        }
    }
}

/// A rank that fails just before it starts its kernel, while the others are about to start theirs. All ranks learn of it where they meet.
#[test]
fn a_rank_that_cannot_launch_ends_the_job_with_its_error() {
    let model = ModelFile::of_fixture("tiny");
    for victim in [0, 1] {
        let fault = format!("{victim}:2:fail");
        let finished =
            patient(&model, 2).args(["--debug-fault", &fault]).timeout(Duration::from_secs(40)).run();
        // They are not out of step, and none waits for another one.
        for words in ["out of step", "did not", "is lost", "run aborted"] {
            assert!(!finished.stderr.contains(words), "{words:?}: {}", finished.stderr);
        }
        ended(finished, 4, &["this rank cannot launch its kernel"]);
    }
}

/// A killed rank counts as lost; the run was not interrupted.
#[test]
fn a_killed_rank_is_reported_as_lost() {
    let model = ModelFile::of_fixture("tiny");
    for victim in [0, 1] {
        let mut running = Job::new(2)
            .arg(model.path())
            .args(["--ignore-eos", "--max-new-tokens", "400", "--debug-stall", "0:4:20"])
            .start();
        running.wait_for_output(|text| text.len() > 4);
        let ranks = running.ranks();
        running.signal_process(&ranks[victim], libc::SIGKILL);
        let finished = running.wait();
        assert!(finished.stderr.contains(&format!("rank {victim} is lost")), "{}", finished.stderr);
        assert!(!finished.stderr.contains("interrupted"), "{}", finished.stderr);
        assert_ne!(finished.status, Some(0));
        finished.expect_nothing_left();
    }
}

/// Ranks with different command lines, models or requests: status 2, before any rank waits.
#[test]
fn ranks_with_different_jobs_do_not_start() {
    let model = ModelFile::of_fixture("tiny");
    let path = model.path().display().to_string();
    let trace = model.folder().join("t.json").display().to_string();
    let same = ["--prompt-tokens", "1,2,3"];
    for (first, second, words) in [
        (&same[..], &["--prompt-tokens", "4,5"][..], &["--prompt-tokens", "1,2,3", "4,5"][..]),
        (&same, &["--prompt-tokens", "1,2,3", "--trace", &trace], &["--trace", "not given"]),
        (&["--prompt-tokens", "1,2,3", "--trace", &trace], &same, &["--trace", "not given"]),
        (&same, &["--prompt-tokens", "1,2,3", "--placement", "dynamic"], &["--placement", "dynamic"]),
        (&same, &["--prompt-tokens", "1,2,3", "--max-new-tokens", "3"], &["--max-new-tokens"]),
        (
            &["--prompt", "a", "--prompt-tokens", "1"],
            &["--prompt-tokens", "1", "--prompt", "a"],
            &["the order of prompts"],
        ),
    ] {
        let second: Vec<&str> = std::iter::once(path.as_str()).chain(second.iter().copied()).collect();
        let job =
            Job::under_mpirun(1).arg(&path).args(first).other_rank(second).timeout(Duration::from_secs(30));
        ended(job.run(), 2, words);
    }
    // Other weights of the same shape.
    let other = ModelFile::copy_of_fixture("tiny").edit_bytes("model.safetensors", |bytes| {
        let begin = bytes.len() / 3;
        bytes[begin..].chunks_exact_mut(2).for_each(|value| value[0] ^= 1);
    });
    let arguments = [other.path().display().to_string(), "--prompt-tokens".into(), "1,2,3".into()];
    let job =
        Job::under_mpirun(1).arg(&path).args(same).other_rank(arguments).timeout(Duration::from_secs(30));
    ended(job.run(), 2, &["rank 1 has another model", "weights"]);
}

/// A /dev/shm that is too small, by much or by little.
#[test]
fn a_small_shared_memory_is_an_error_that_says_so() {
    let model = ModelFile::of_fixture("tiny");
    let right = job(&model, 2).run().expect(0).stdout;
    let mut found = [false; 2];
    // In one of the last steps two heaps fit, but not the additional memory of MPI.
    for kibibytes in [16, 1 << 10, 12 << 10, 24688, 24704, 25 << 10, 26 << 10, 64 << 10] {
        let Some(job) = job(&model, 2).with_shared_memory(kibibytes << 10) else {
            eprintln!("skipped: this machine allows no private mount namespace");
            return;
        };
        let finished = job.run().expect_nothing_left();
        let what = format!("{kibibytes} KiB: {}", finished.stderr);
        assert!(finished.elapsed < SOON, "{what}");
        found[usize::from(finished.status == Some(0))] = true;
        match finished.status {
            Some(0) => assert_eq!(finished.stdout, right, "{what}"),
            status => {
                assert_eq!(status, Some(3), "{what}");
                assert!(finished.stderr.contains("/dev/shm has"), "{what}");
                assert!(finished.stderr.contains("--shm-size"), "{what}");
            }
        }
    }
    assert_eq!(found, [true; 2]);
}

/// A read error: a part of a mapped checkpoint is gone when it is read.
#[test]
fn a_checkpoint_that_becomes_unreadable_ends_the_job() {
    let model = ModelFile::copy_of_fixture("tiny");
    let weights = model.checkpoint().join("model.safetensors");
    // Rank 1 stops before it creates its memory, so no rank reads weights yet.
    let mut running = patient(&model, 2).args(["--debug-fault", "1:20:stop"]).start();
    running.wait_for_log("graphs built");
    std::thread::sleep(Duration::from_millis(500));
    let file = std::fs::OpenOptions::new().write(true).open(&weights).expect("the checkpoint's copy");
    file.set_len(file.metadata().expect("its length").len() / 4).expect("a shorter file");
    running.signal_process(&running.ranks()[1], libc::SIGCONT);
    let finished = running.wait();
    let what = format!("{}\nstderr: {}", finished.description, finished.stderr);
    // The other rank may be the first to end.
    assert!(matches!(finished.status, Some(2 | 4)), "{what}");
    assert!(finished.elapsed < SOON && finished.stdout.is_empty(), "{what}");
    assert!(
        finished.stderr.contains("cannot read") && finished.stderr.contains("has become shorter"),
        "{what}"
    );
    finished.expect_nothing_left();
}
