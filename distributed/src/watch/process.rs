//! What the system says of another rank's process.

use super::table::Seen;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;

/// How a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It is there, and may run.
    Alive,
    /// It was stopped (SIGSTOP, Ctrl-Z, a debugger).
    Stopped,
    /// It has ended.
    Gone,
    /// The system does not tell: it lives in another container, or nothing can be opened.
    Unknown,
}

/// The namespace of this process's number.
pub(crate) fn own_namespace() -> u64 {
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |about| about.ino())
}

/// How the process of a rank is.
pub(crate) fn fate(of: &Seen, own_namespace: u64) -> Fate {
    if own_namespace == 0 || of.pid_namespace != own_namespace {
        return Fate::Unknown;
    }
    let text = match std::fs::read_to_string(format!("/proc/{}/stat", of.pid)) {
        Ok(text) => text,
        // The second where it ends between the two system calls.
        Err(error) if error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH) => {
            return Fate::Gone;
        }
        Err(_) => return Fate::Unknown,
    };
    // The name before the state stands in brackets and may hold anything.
    match text.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()) {
        Some('Z' | 'X' | 'x') => Fate::Gone,
        Some('T' | 't') => Fate::Stopped,
        _ => Fate::Alive,
    }
}

#[cfg(test)]
mod tests {
    use super::super::table::Slot;
    use super::*;
    use std::process::Command;
    use std::time::{Duration, Instant};

    #[test]
    fn processes_that_run_stop_and_end_are_told_apart() {
        let namespace = own_namespace();
        let mut child = Command::new("sleep").arg("60").spawn().expect("a process");
        let slot = Slot::default();
        slot.take(1, child.id(), namespace);
        let seen = slot.look().expect("it has come");
        let becomes = |wanted| {
            let begin = Instant::now();
            while fate(&seen, namespace) != wanted {
                assert!(begin.elapsed() < Duration::from_secs(10), "never {wanted:?}");
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        becomes(Fate::Alive);
        // SAFETY: signals to a child that was not waited for.
        unsafe { libc::kill(child.id() as i32, libc::SIGSTOP) };
        becomes(Fate::Stopped);
        child.kill().expect("it can be killed");
        // Before and after it is waited for.
        becomes(Fate::Gone);
        child.wait().expect("its status");
        becomes(Fate::Gone);
        let elsewhere = Slot::default();
        elsewhere.take(1, child.id(), namespace + 1);
        assert_eq!(fate(&elsewhere.look().expect("it has come"), namespace), Fate::Unknown);
    }
}
