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
        Err(error) if is_gone(&error) => return Fate::Gone,
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
        match begun(pid) {
            Begun::At(begun) => Some(Launcher { pid, name, begun }),
            Begun::Ended | Begun::Unknown => None,
        }
    }

    /// A message if it has ended.
    pub(crate) fn gone(&self) -> Option<String> {
        match begun(self.pid) {
            Begun::At(begun) if begun == self.begun => return None,
            Begun::Unknown => return None,
            Begun::At(_) | Begun::Ended => {}
        }
        Some(format!("the launcher's process {} ({}) on node {} has ended", self.pid, self.name, node_name()))
    }
}

/// The name of this machine.
pub(crate) fn node_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_string()
}

/// When a process started.
#[derive(Debug, PartialEq, Eq)]
enum Begun {
    /// As the system counts it.
    At(String),
    /// The process has ended.
    Ended,
    /// Its files cannot be read, for example because this process has as many open as it may.
    Unknown,
}

fn begun(pid: u32) -> Begun {
    begun_in(std::fs::read_to_string(format!("/proc/{pid}/stat")))
}

/// `stat` is what reading the process's `stat` file returned.
fn begun_in(stat: std::io::Result<String>) -> Begun {
    let text = match stat {
        Ok(text) => text,
        Err(error) => return if is_gone(&error) { Begun::Ended } else { Begun::Unknown },
    };
    let fields = text.rsplit_once(") ").map(|(_, rest)| rest.split(' ').collect::<Vec<_>>());
    match fields.as_deref() {
        Some(["Z" | "X" | "x", ..]) => Begun::Ended,
        Some(fields) => fields.get(19).map_or(Begun::Unknown, |begun| Begun::At((*begun).to_string())),
        None => Begun::Unknown,
    }
}

/// True if a file of a process cannot be read because the process has ended. The second error occurs if it ends between the two system
/// calls.
fn is_gone(error: &std::io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
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
        let Begun::At(begun) = begun(child.id()) else { panic!("it runs") };
        let launcher = Launcher { pid: child.id(), name: "sleep".into(), begun };
        assert_eq!(launcher.gone(), None);
        child.kill().expect("it can be killed");
        child.wait().expect("its status");
        assert!(launcher.gone().is_some_and(|text| text.contains("(sleep)")));
    }

    /// A server may run out of file descriptors. That says nothing of its launcher.
    #[test]
    fn a_file_that_cannot_be_read_does_not_mean_that_the_launcher_has_ended() {
        let error = |code| Err(std::io::Error::from_raw_os_error(code));
        for code in [libc::EMFILE, libc::ENFILE, libc::EACCES, libc::ENOMEM] {
            assert_eq!(begun_in(error(code)), Begun::Unknown, "{code}");
        }
        for code in [libc::ENOENT, libc::ESRCH] {
            assert_eq!(begun_in(error(code)), Begun::Ended, "{code}");
        }
        let stat = |state: &str| Ok(format!("7 (a) b) {state} {}99 0", "0 ".repeat(18)));
        assert_eq!(begun_in(stat("S")), Begun::At("99".into()));
        assert_eq!(begun_in(stat("Z")), Begun::Ended);
        assert_eq!(begun_in(Ok("7 (a)".into())), Begun::Unknown);
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
