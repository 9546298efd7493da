//! The results of a job: status, output, files, processes.

use crate::processes::Process;
use crate::run_json::RunJson;
use std::path::PathBuf;
use std::time::Duration;

/// How a job ended, what it printed, and which processes and files it left.
#[derive(Debug)]
pub struct Finished {
    /// The command line.
    pub description: String,
    /// Exit status, if it was not ended by a signal.
    pub status: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// All of its standard output.
    pub stdout: String,
    /// All of its standard error.
    pub stderr: String,
    /// Time from start to end.
    pub elapsed: Duration,
    /// Processes of the job that outlived it.
    pub orphans: Vec<Process>,
    /// Names in /dev/shm that were not there before.
    pub in_shared_memory: Vec<String>,
    /// Files left in its TMPDIR.
    pub in_temporary: Vec<PathBuf>,
}

impl Finished {
    /// Asserts that it ended with `status`; returns itself.
    pub fn expect(self, status: i32) -> Self {
        assert_eq!(
            (self.status, self.signal),
            (Some(status), None),
            "{}\nstdout: {}\nstderr: {}",
            self.description,
            self.stdout,
            self.stderr
        );
        self
    }

    /// Asserts that no process, shared memory or temporary file is left; returns itself.
    pub fn expect_nothing_left(self) -> Self {
        assert!(self.orphans.is_empty(), "{}: left processes {:?}", self.description, self.orphans);
        let shared = &self.in_shared_memory;
        assert!(shared.is_empty(), "{}: left in /dev/shm: {shared:?}", self.description);
        assert!(
            self.in_temporary.is_empty(),
            "{}: left in TMPDIR: {:?}",
            self.description,
            self.in_temporary
        );
        self
    }

    /// The object of `--json`.
    ///
    /// # Panics
    /// It did not end with status 0, or its output is not one object of the contract.
    pub fn json(self) -> RunJson {
        let finished = self.expect(0);
        let Finished { description, stdout, stderr, .. } = &finished;
        serde_json::from_str(stdout).unwrap_or_else(|e| {
            panic!("{description}: stdout is not the object: {e}\n{stdout}\nstderr: {stderr}")
        })
    }

    /// Our own error messages, not the launcher's: the first line of each.
    pub fn error_lines(&self) -> Vec<&str> {
        let begins = |line: &str| {
            let after_name = line.strip_prefix("mpk-").and_then(|rest| rest.split_once(": "));
            after_name.map_or(line, |(_, message)| message).starts_with("error:")
        };
        self.stderr.lines().filter(|line| begins(line)).collect()
    }
}
