//! Proves that a second signal ends a process whose threads are stuck, and that signals that arrive together count as one. Each case runs this program again, because a signal affects the
//! whole process.

use kernels_cu::signals::{self, Held, Next, Watched};
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const CASE: &str = "MPK_TEST_SIGNALS";
/// A process that a signal ends is gone within this time, on a busy machine too.
const AT_ONCE: Duration = Duration::from_secs(5);
/// A process that goes on is looked at after this time.
const A_WHILE: Duration = Duration::from_millis(300);

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
    signals::install().unwrap();
    let ready = || std::io::stdout().write_all(b"ready\n").unwrap();
    match case {
        "nothing" => ready(),
        "running" => {
            let _running = signals::note();
            ready();
            forever();
        }
        "kept" => {
            let _held = Held::new();
            ready();
            forever();
        }
        // The thread of the signals waits for a reader of standard error.
        "stuck" => {
            Watched::begin().unwrap().watch(|| {
                while std::io::stderr().write(&[b'x'; 1 << 12]).is_ok() {}
                true
            });
            ready();
        }
        "drains" => {
            Watched::begin().unwrap().watch(|| true);
            ready();
        }
        "talks" => {
            Watched::begin().unwrap().watch_each(|| Next::Handled);
            ready();
        }
        // The first signal is acted on at once, and the sender sees that.
        "acts" => {
            let mut signals_so_far = 0;
            Watched::begin().unwrap().watch_each(move || {
                signals_so_far += 1;
                if signals_so_far > 1 {
                    return Next::Exit;
                }
                signals::acted();
                ready();
                Next::Handled
            });
            ready();
        }
        _ => panic!("{case}"),
    }
    forever()
}

/// Starts the process of a case and waits until it is ready.
fn start(case: &str) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_second_signal_ends_the_process", "--nocapture"])
        .env(CASE, case)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    await_ready(&mut child, case);
    child
}

fn await_ready(child: &mut Child, case: &str) {
    let stdout = child.stdout.as_mut().unwrap();
    let mut text = Vec::new();
    while !text.ends_with(b"ready\n") {
        let mut byte = [0];
        stdout.read_exact(&mut byte).unwrap_or_else(|e| panic!("{case}: {e}"));
        text.push(byte[0]);
    }
}

fn send(child: &Child, signal: i32) {
    // SAFETY: kill has no memory effects here, and the child has not been waited for.
    unsafe { libc::kill(child.id() as i32, signal) };
}

/// Its end, within `limit`: the status or the signal, and what it printed.
fn end(mut child: Child, limit: Duration) -> Option<(Option<i32>, Option<i32>, String)> {
    let begin = Instant::now();
    while begin.elapsed() < limit {
        if let Some(status) = child.try_wait().unwrap() {
            let mut text = String::new();
            child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
            return Some((status.code(), status.signal(), text));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    None
}

#[test]
fn a_second_signal_ends_the_process() {
    if let Ok(case) = std::env::var(CASE) {
        act(&case);
    }
    for signal in [libc::SIGINT, libc::SIGTERM] {
        for case in ["running", "kept", "stuck", "drains"] {
            let mut child = start(case);
            // Signals of different kinds, since the system itself merges those of one kind.
            for together in [signal, libc::SIGINT, libc::SIGTERM] {
                send(&child, together);
            }
            std::thread::sleep(A_WHILE);
            assert!(child.try_wait().unwrap().is_none(), "{case}: ended at the first signals");
            send(&child, signal);
            let (status, _, text) = end(child, AT_ONCE).unwrap_or_else(|| panic!("{case}: still running"));
            assert_eq!(status, Some(4), "{case}");
            // Nothing reads the other one's standard error.
            assert_eq!(text.contains("a second signal"), case != "stuck", "{case}: {}", text.len());
        }
        let child = start("nothing");
        send(&child, signal);
        assert_eq!(end(child, AT_ONCE).map(|(_, by, _)| by), Some(Some(signal)));
        let mut child = start("acts");
        send(&child, signal);
        await_ready(&mut child, "acts");
        send(&child, signal);
        assert_eq!(end(child, AT_ONCE).map(|(status, ..)| status), Some(Some(4)), "the second one counts");
        // Signals that have been acted on do not add up.
        let child = start("talks");
        for _ in 0..3 {
            send(&child, signal);
            std::thread::sleep(A_WHILE);
        }
        assert_eq!(end(child, A_WHILE), None);
    }
}
