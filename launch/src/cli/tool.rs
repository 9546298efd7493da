//! Asks other programs for their version, without ever waiting for long.

use rustix::process::{Pid, Signal, kill_process_group};
use std::io::{ErrorKind, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How often to check whether the program has ended.
const TICK: Duration = Duration::from_millis(2);

/// The standard output of `program --version`.
///
/// # Errors
/// What is wrong, to follow the program's name: it cannot be run, fails, or does not end within `limit`.
pub fn version(program: &Path, limit: Duration) -> Result<String, String> {
    let until = Instant::now() + limit;
    let cannot = |error: std::io::Error| match error.kind() {
        ErrorKind::NotFound => "was not found".to_string(),
        _ => format!("cannot be run: {error}"),
    };
    let slow = || format!("--version does not end within {} s", limit.as_secs_f32());
    // In a separate process group, so that everything that it starts can be killed.
    let mut child = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .map_err(cannot)?;
    let status = output(&mut child, until);
    // Nothing that it has started should stay. An error if everything has already ended is ignored.
    let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
    let _ = child.wait();
    match status.map_err(cannot)? {
        None => Err(slow()),
        Some((status, _)) if !status.success() => Err(format!("--version fails: {status}")),
        Some((_, text)) => Ok(text),
    }
}

/// The exit status and the output, or `None` if they are not there at `until`.
fn output(child: &mut Child, until: Instant) -> std::io::Result<Option<(ExitStatus, String)>> {
    let (done, text) = mpsc::channel();
    let mut stdout = child.stdout.take();
    // Not joined: a process that has left the group may keep the pipe open.
    std::thread::Builder::new().spawn(move || {
        let mut bytes = Vec::new();
        // Output that was read before an error is kept.
        let _ = stdout.as_mut().map(|stdout| stdout.read_to_end(&mut bytes));
        let _ = done.send(bytes);
    })?;
    let status = loop {
        match child.try_wait()? {
            Some(status) => break status,
            None if Instant::now() >= until => return Ok(None),
            None => std::thread::sleep(TICK),
        }
    };
    let left = until.saturating_duration_since(Instant::now());
    let text = text.recv_timeout(left).ok();
    Ok(text.map(|bytes| (status, String::from_utf8_lossy(&bytes).into_owned())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_program_that_hangs_or_fails_is_no_good() {
        let folder = tempfile::tempdir().unwrap();
        let version_of = |name: &str, script: &str, limit: u64| {
            let path = folder.path().join(name);
            std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
            // A process that another test starts at this moment may still hold the file open for writing.
            let begin = Instant::now();
            loop {
                let found = version(&path, Duration::from_millis(limit));
                let busy = found.as_ref().is_err_and(|problem| problem.contains("Text file busy"));
                if !busy || begin.elapsed() > Duration::from_secs(10) {
                    return found;
                }
                std::thread::sleep(TICK);
            }
        };
        assert_eq!(version_of("good", "echo 1.2", 60_000), Ok("1.2\n".to_string()));
        assert!(version_of("bad", "exit 3", 60_000).unwrap_err().contains("--version fails"));
        let begin = Instant::now();
        for (name, script) in [("slow", "sleep 60"), ("leaves", "sleep 60 & echo 1.2")] {
            assert!(version_of(name, script, 300).unwrap_err().contains("0.3 s"), "{name}");
        }
        assert!(begin.elapsed() < Duration::from_secs(50));
        assert!(version(&folder.path().join("none"), TICK).unwrap_err().contains("was not found"));
    }
}
