//! Proves that signals still end a process of several nodes whose rank has left. Each case runs this program again, because a signal affects
//! the whole process.

use super::*;
use crate::launcher::Place;
use crate::watch::WatchOptions;
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};

const CASE: &str = "MPK_TEST_ENDING";
const TEST: &str = "watch::ending::tests::signals_end_a_process_whose_rank_has_left";
/// A process that a signal ends is gone within this time, on a busy machine too.
const AT_ONCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(1);
/// Status of a process that ends by itself.
const OWN_STATUS: i32 = 3;

fn forever() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(60));
    }
}

/// What the process of a case does.
fn act(case: &str) -> ! {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the default action runs no code of this program. The tests' parent may have set these signals to be ignored.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    signals::install().expect("handlers of signals");
    // The launcher does not say that all ranks are on this node.
    let place = Place { rank: 0, size: 2, local_rank: None, local_size: None, job: "ending test".into() };
    let deadline = Duration::from_secs(60);
    let watch = Watch::begin(place, WatchOptions { deadline, tell: |_| {}, fault: None, carries_all: false });
    // Until its thread keeps signals.
    while watch.0.own.look().is_none_or(|own| own.beats == 0) {
        std::thread::sleep(PAUSE);
    }
    watch.has_left();
    std::io::stdout().write_all(b"ready\n").expect("a reader");
    if case == "ends" {
        while !signals::is_kept() {
            std::thread::sleep(PAUSE);
        }
        std::process::exit(OWN_STATUS);
    }
    forever()
}

/// Starts the process of a case and waits until it is ready.
fn start(case: &str) -> Child {
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", TEST, "--nocapture"])
        .env(CASE, case)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("this program starts");
    let stdout = child.stdout.as_mut().expect("a pipe");
    let mut text = Vec::new();
    while !text.ends_with(b"ready\n") {
        let mut byte = [0];
        stdout.read_exact(&mut byte).unwrap_or_else(|error| panic!("{case}: {error}"));
        text.push(byte[0]);
    }
    child
}

fn send(child: &Child, signal: i32) {
    // SAFETY: a signal to a child that was not waited for.
    unsafe { libc::kill(child.id() as i32, signal) };
}

/// Its end; `None` if it does not end.
fn end(mut child: Child) -> Option<ExitStatus> {
    let begin = Instant::now();
    while begin.elapsed() < AT_ONCE {
        if let Some(status) = child.try_wait().expect("its status") {
            return Some(status);
        }
        std::thread::sleep(PAUSE);
    }
    child.kill().expect("it can be killed");
    child.wait().expect("its status");
    None
}

#[test]
fn signals_end_a_process_whose_rank_has_left() {
    if let Ok(case) = std::env::var(CASE) {
        act(&case);
    }
    // One that is held up.
    let child = start("stays");
    send(&child, libc::SIGINT);
    let status = end(child).expect("a signal ends it");
    assert_eq!(status.signal(), Some(libc::SIGINT), "{status}");
    // A second signal does not wait.
    let child = start("stays");
    send(&child, libc::SIGTERM);
    std::thread::sleep(Duration::from_millis(200));
    send(&child, libc::SIGINT);
    let status = end(child).expect("the second signal ends it");
    assert_eq!(status.code(), Some(STATUS), "{status}");
    // One that ends by itself keeps its status.
    let child = start("ends");
    send(&child, libc::SIGTERM);
    let status = end(child).expect("it ends by itself");
    assert_eq!(status.code(), Some(OWN_STATUS), "{status}");
}
