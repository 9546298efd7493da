//! What the operating system knows about another rank's process.

use super::table::Seen;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;

/// The state of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It exists and can run.
    Alive,
    /// It was stopped (SIGSTOP, Ctrl-Z, a debugger).
    Stopped,
    /// It has ended.
    Gone,
    /// Unknown: it is in another container, or its files cannot be opened.
    Unknown,
}

/// The namespace of this process's number.
pub(crate) fn own_namespace() -> u64 {
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |about| about.ino())
}

/// The state of a rank's process.
pub(crate) fn fate(of: &Seen, own_namespace: u64) -> Fate {
    if own_namespace == 0 || of.pid_namespace != own_namespace {
        return Fate::Unknown;
    }
    let text = match std::fs::read_to_string(format!("/proc/{}/stat", of.pid)) {
        Ok(text) => text,
        // The second error occurs if it ends between the two system calls.
        Err(error) if error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH) => {
            return Fate::Gone;
        }
        Err(_) => return Fate::Unknown,
    };
    // The name before the state is in brackets and may contain anything.
    match text.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()) {
        Some('Z' | 'X' | 'x') => Fate::Gone,
        Some('T' | 't') => Fate::Stopped,
        _ => Fate::Alive,
    }
}

/// The process of the job's launcher that started the ranks of this node, such as Open MPI's daemon.
#[derive(Debug)]
pub(crate) struct Launcher {
    pub pid: u32,
    name: String,
    /// When it started. Distinguishes it from a later process with the same number.
    begun: String,
}

impl Launcher {
    /// The nearest launcher among the ancestors of this process.
    pub(crate) fn find() -> Option<Launcher> {
        let (pid, name) = crate::launcher::process()?;
        Some(Launcher { pid, name, begun: begun(pid)? })
    }

    /// A message if it has ended.
    pub(crate) fn gone(&self) -> Option<String> {
        if begun(self.pid).as_ref() == Some(&self.begun) {
            return None;
        }
        Some(format!("the launcher's process {} ({}) on node {} has ended", self.pid, self.name, node_name()))
    }
}

/// The name of this machine.
pub(crate) fn node_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_string()
}

/// When a process started, as the system counts it; `None` if it has ended.
fn begun(pid: u32) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = text.rsplit_once(") ")?.1.split(' ').collect();
    if matches!(*fields.first()?, "Z" | "X") {
        return None;
    }
    fields.get(19).map(|begun| (*begun).to_string())
}

#[cfg(test)]
mod tests {
    use super::super::table::Slot;
    use super::*;
    use std::process::Command;
    use std::time::{Duration, Instant};

    #[test]
    fn a_launcher_counts_as_running_until_it_has_ended() {
        let mut child = Command::new("sleep").arg("60").spawn().expect("a process");
        let launcher =
            Launcher { pid: child.id(), name: "sleep".into(), begun: begun(child.id()).expect("it runs") };
        assert_eq!(launcher.gone(), None);
        child.kill().expect("it can be killed");
        child.wait().expect("its status");
        assert!(launcher.gone().is_some_and(|text| text.contains("(sleep)")));
    }

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
