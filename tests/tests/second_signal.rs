//! Proves that Ctrl-C ends a job in whatever phase a rank is stuck: the first one asks, the second one ends it at once, and nothing is
//! left.
//!
//! The signals go to mpirun, as on a terminal, or to the ranks, as from a batch system.

use mpk_tests::http::Answer;
use mpk_tests::preload::preload;
use mpk_tests::server::{Server, example};
use mpk_tests::{Finished, Job, ModelFile, Running, Turn, job::shared_memory};
use serde_json::json;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Concurrent jobs, which mostly wait.
const AT_A_TIME: usize = 4;
/// The ranks are gone within this time after the second signal, on a busy machine too.
const AT_ONCE: Duration = Duration::from_secs(4);
/// Time between the signals.
const BETWEEN: Duration = Duration::from_millis(300);
/// Time for a rank to get stuck after the others wait for it.
const STUCK: Duration = Duration::from_millis(500);
/// mpirun waits for processes that it has told to end.
const LAUNCHER: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, PartialEq)]
enum To {
    Mpirun,
    Ranks,
}

fn interrupt(running: &Running, to: To) {
    match to {
        To::Mpirun => running.signal(libc::SIGINT),
        To::Ranks => running.ranks().iter().for_each(|rank| running.signal_process(rank, libc::SIGINT)),
    }
}

/// Waits until no rank is left.
fn await_end_of_ranks(running: &Running, what: &str) {
    let begin = Instant::now();
    while !running.ranks().is_empty() {
        assert!(
            begin.elapsed() < AT_ONCE,
            "{what}: {:?} is still running: {}",
            running.ranks(),
            running.log()
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Interrupts a job twice. `goes_on`: the first signal only asks, and the ranks go on.
fn interrupt_twice(running: Running, to: To, goes_on: bool, what: &str) -> Finished {
    interrupt(&running, to);
    std::thread::sleep(BETWEEN);
    if goes_on {
        assert_eq!(running.ranks().len(), 2, "{what}: {}", running.log());
    }
    interrupt(&running, to);
    let second = Instant::now();
    await_end_of_ranks(&running, what);
    let finished = running.wait();
    assert!(second.elapsed() < LAUNCHER, "{what}: mpirun took {:?}", second.elapsed());
    assert_ne!(finished.status, Some(0), "{what}: {}", finished.stderr);
    assert!(!finished.stderr.contains("panicked"), "{what}: {}", finished.stderr);
    assert!(finished.orphans.is_empty(), "{what}: {:?}", finished.orphans);
    finished
}

/// The first step of each phase, in order, from a log.
fn phases(log: &str) -> Vec<(u64, String)> {
    let mut found: Vec<(u64, String)> = Vec::new();
    for line in log.lines() {
        let Some((step, phase)) = line.split_once("step ").and_then(|(_, rest)| rest.split_once(": ")) else {
            continue;
        };
        if let Ok(step) = step.parse()
            && !found.iter().any(|(_, known)| known == phase)
        {
            found.push((step, phase.to_string()));
        }
    }
    found
}

fn stuck_at(job: Job, step: u64) -> Job {
    job.args(["--debug-fault", &format!("1:{step}:pause=60000")]).env("MPK_LOG", "debug")
}

/// Runs all cases, several at a time. What remains in /dev/shm is checked at the end: Open MPI's own segments stay if mpirun is ended.
fn all(count: usize, case: impl Fn(&Turn, usize) + Sync) {
    let turn = Turn::take();
    let before = shared_memory();
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(0));
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    if at >= count {
                        break;
                    }
                    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| case(&turn, at)));
                    *failed.lock().unwrap() += usize::from(result.is_err());
                }
            });
        }
    });
    let left: BTreeSet<String> = shared_memory().difference(&before).cloned().collect();
    let (of_mpi, own): (Vec<_>, Vec<_>) =
        left.into_iter().partition(|name| name.starts_with("vader_segment.") || name.starts_with("osc_"));
    assert!(own.is_empty(), "left in /dev/shm: {own:?}");
    for name in of_mpi {
        let _ = std::fs::remove_file(std::path::Path::new("/dev/shm").join(name));
    }
    assert_eq!(*failed.lock().unwrap(), 0, "of {count} cases");
}

/// Outside the kernel the first signal ends the ranks, and mpirun the job; the second one must not wait for that.
#[test]
fn a_rank_that_is_stuck_in_any_phase_of_a_run_ends() {
    let model = ModelFile::of_fixture("tiny");
    let job = || Job::new(2).arg(model.path()).args(["--prompt-tokens", "1,2,3", "--max-new-tokens", "4"]);
    let phases = phases(&job().env("MPK_LOG", "debug").run().expect(0).stderr);
    assert!(phases.len() > 8, "{phases:?}");
    all(2 * phases.len(), |turn, at| {
        let (step, phase) = &phases[at / 2];
        let to = [To::Mpirun, To::Ranks][at % 2];
        let what = format!("{phase}, {to:?}");
        let mut running = stuck_at(job(), *step).start_in(turn);
        running.wait_for_log(&format!("step {step}:"));
        std::thread::sleep(STUCK);
        let finished = interrupt_twice(running, to, false, &what);
        if to == To::Ranks {
            assert_eq!(finished.status, Some(128 + libc::SIGINT), "{what}: {}", finished.stderr);
        }
    });
}

/// What a job needs to get stuck in a task of `rank`'s kernel. The abort of the run does not end the task.
fn stuck_in_the_kernel(job: Job, rank: u32, folder: &Path) -> Job {
    let library = preload(folder, "stuck_task");
    job.args(["--debug-stall", &format!("{rank}:4:60000"), "--deadline", "50"]).env("LD_PRELOAD", &library)
}

/// The kernel is asked to end at the first signal, but a task does not.
#[test]
fn a_rank_that_is_stuck_in_the_kernel_ends() {
    let model = ModelFile::of_fixture("tiny");
    all(2, |turn, at| {
        let to = [To::Mpirun, To::Ranks][at];
        let job = Job::new(2).arg(model.path()).args(["--prompt-tokens", "1,2,3"]);
        let mut running = stuck_in_the_kernel(job, 1, model.folder()).start_in(turn);
        running.wait_for_log("weights:");
        std::thread::sleep(2 * STUCK);
        // mpirun does not pass the signal on: it ends the ranks.
        let finished = interrupt_twice(running, to, to == To::Ranks, &format!("{to:?}"));
        if to == To::Ranks {
            // If rank 0 has left the kernel by then, the second signal has its default effect there.
            assert!(matches!(finished.status, Some(4 | 130)), "{:?}: {}", finished.status, finished.stderr);
            assert!(
                finished.stderr.contains("a second signal has ended this process"),
                "{}",
                finished.stderr
            );
        }
    });
}

/// The same without mpirun, also with SIGTERM.
#[test]
fn one_rank_that_is_stuck_in_the_kernel_ends() {
    let model = ModelFile::of_fixture("tiny");
    for signal in [libc::SIGINT, libc::SIGTERM] {
        let mut running = stuck_in_the_kernel(Job::alone().arg(model.path()), 0, model.folder()).start();
        running.wait_for_log("weights:");
        std::thread::sleep(STUCK);
        running.signal(signal);
        std::thread::sleep(BETWEEN);
        assert!(running.is_running(), "{}", running.log());
        running.signal(signal);
        await_end_of_ranks(&running, "alone");
        let finished = running.wait().expect(4).expect_nothing_left();
        assert!(finished.stderr.contains("a second signal has ended this process"), "{}", finished.stderr);
    }
}

/// The same for a server, whose end begins with a first signal to rank 0.
#[test]
fn a_server_that_is_stuck_in_any_phase_ends() {
    let options = ["--port", "0", "--backend", "cpu"];
    let server = || Job::new(2).of("mpk-serve").arg(example()).args(options);
    let mut whole = server().env("MPK_LOG", "debug").start();
    whole.wait_for_log("listening on http://");
    let loading = phases(&whole.log()).len();
    whole.signal_process(&whole.ranks()[0], libc::SIGTERM);
    let phases = phases(&whole.wait().expect(0).stderr);
    assert!(loading > 6 && phases.len() > loading, "{phases:?}");
    all(2 * phases.len(), |turn, at| {
        let (step, phase) = &phases[at / 2];
        let to = [To::Mpirun, To::Ranks][at % 2];
        let ends = at / 2 >= loading;
        let mut running = stuck_at(server(), *step).start_in(turn);
        if ends {
            running.wait_for_log("listening on http://");
            running.signal_process(&running.ranks()[0], libc::SIGINT);
        }
        running.wait_for_log(&format!("step {step}:"));
        std::thread::sleep(STUCK);
        interrupt_twice(running, to, false, &format!("{phase}, {to:?}"));
    });
}

/// A request that does not end keeps the server from draining.
#[test]
fn a_server_that_does_not_drain_ends() {
    let stalled = ["--debug-stall", "0:4:60000", "--deadline", "50"];
    for ranks in [1, 2] {
        let Server { running, address } = Server::start(ranks, &example(), &stalled);
        let asking = std::thread::spawn(move || {
            let body = json!({"prompt": "x", "max_tokens": 4, "stream": true});
            // The connection is cut while it waits for a token.
            std::panic::catch_unwind(|| Answer::post(&address, "/v1/completions", &body).last_event())
                .is_err()
        });
        std::thread::sleep(2 * STUCK);
        let to_first = || running.signal_process(&running.ranks()[0], libc::SIGINT);
        to_first();
        std::thread::sleep(BETWEEN);
        assert_eq!(running.ranks().len(), ranks as usize, "{}", running.log());
        to_first();
        await_end_of_ranks(&running, &format!("{ranks} ranks"));
        let finished = running.wait().expect(4).expect_nothing_left();
        for words in ["a second signal ends the process at once", "a second signal has ended this process"] {
            assert!(finished.stderr.contains(words), "no {words:?}: {}", finished.stderr);
        }
        let _ = asking.join();
    }
}
