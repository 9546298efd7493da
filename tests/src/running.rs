//! A running job: its output, its processes, its end.

use crate::capture::Capture;
use crate::finished::Finished;
use crate::launcher;
use crate::places::{files_below, shared_memory};
use crate::processes::{self, Process};
use crate::turn::Turn;
use std::collections::BTreeSet;
use std::io::Write;
use std::process::Child;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Time for leftovers of a job, and its launcher, to vanish.
const SETTLE: Duration = Duration::from_secs(5);
/// Polling interval of a job.
const TICK: Duration = Duration::from_millis(5);

/// A started job. It is killed with all of its processes if dropped.
pub struct Running {
    pub(crate) program: &'static str,
    pub(crate) child: Child,
    pub(crate) ended: Option<Result<i32, i32>>,
    pub(crate) mark: String,
    pub(crate) description: String,
    pub(crate) begin: Instant,
    pub(crate) timeout: Duration,
    pub(crate) stdout: Capture,
    pub(crate) stderr: Capture,
    pub(crate) temporary: TempDir,
    /// Names that existed before; `None` if the difference would not show what this job leaves.
    pub(crate) shared_memory: Option<BTreeSet<String>>,
    #[allow(dead_code, reason = "held until the job is looked at no more")]
    pub(crate) turn: Option<Turn>,
}

impl Running {
    /// All living processes of the job, including its launcher.
    pub fn processes(&self) -> Vec<Process> {
        processes::with_mark(&self.mark)
    }

    /// The living ranks, by rank.
    pub fn ranks(&self) -> Vec<Process> {
        let mut ranks: Vec<Process> =
            self.processes().into_iter().filter(|p| p.name == self.program).collect();
        ranks.sort_by_key(|p| p.rank);
        ranks
    }

    /// Sends `signal` to the process that was started: `mpirun`, or `mpk-run` itself.
    pub fn signal(&self, signal: i32) {
        processes::send(self.child.id() as i32, signal);
    }

    /// Sends `signal` to one process of the job.
    pub fn signal_process(&self, process: &Process, signal: i32) {
        processes::send(process.pid, signal);
    }

    /// Largest resident memory so far of each living rank, in bytes, by rank.
    pub fn peak_memory(&self) -> Vec<(u32, u64)> {
        let ranks = self.ranks();
        ranks.iter().filter_map(|p| Some((p.rank?, processes::status_bytes(p.pid, "VmHWM")?))).collect()
    }

    /// Whether it is running.
    ///
    /// # Panics
    /// It has been running for longer than its time limit.
    pub fn is_running(&mut self) -> bool {
        use std::os::unix::process::ExitStatusExt;
        if self.ended.is_none()
            && let Some(status) = self.child.try_wait().expect("the status of a child")
        {
            self.ended = Some(status.code().ok_or_else(|| status.signal().unwrap_or(0)));
        }
        if self.ended.is_none() && self.begin.elapsed() > self.timeout {
            let living = self.processes();
            self.kill();
            panic!(
                "{}: still running after {:?}: {living:?}\nstdout: {}\nstderr: {}",
                self.description,
                self.timeout,
                self.stdout.text(),
                self.stderr.text()
            );
        }
        self.ended.is_none()
    }

    /// Writes a line to its standard input.
    ///
    /// # Panics
    /// The job was not started [`crate::Job::with_stdin`], or no longer reads.
    pub fn say(&mut self, line: &str) {
        let stdin = self.child.stdin.as_mut().expect("a job with standard input");
        stdin.write_all(format!("{line}\n").as_bytes()).expect("a job that reads");
    }

    /// Ends its standard input.
    pub fn say_no_more(&mut self) {
        self.child.stdin = None;
    }

    /// Waits until `seen` accepts what `stdout` holds.
    ///
    /// # Panics
    /// The job ended before, or its time limit has passed.
    pub fn wait_for_output(&mut self, seen: impl Fn(&str) -> bool) {
        self.wait_for(|job| seen(&job.stdout.text()));
    }

    /// Waits until the log holds `text`.
    ///
    /// # Panics
    /// As [`Running::wait_for_output`].
    pub fn wait_for_log(&mut self, text: &str) {
        self.wait_for(|job| job.stderr.text().contains(text));
    }

    /// What `stdout` holds so far.
    pub fn output(&self) -> String {
        self.stdout.text()
    }

    /// What the log holds so far.
    pub fn log(&self) -> String {
        self.stderr.text()
    }

    fn wait_for(&mut self, seen: impl Fn(&Running) -> bool) {
        while !seen(self) {
            assert!(self.is_running(), "{}: ended early\nstderr: {}", self.description, self.stderr.text());
            std::thread::sleep(TICK);
        }
    }

    /// Stops reading its output once there is some, and closes the pipe.
    pub fn close_stdout_after_first_bytes(&mut self) {
        self.stdout.stop_after_first_bytes();
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// Its time limit passes.
    pub fn wait(self) -> Finished {
        self.wait_and_look(|_| {})
    }

    /// Waits for its end and calls `look` every few milliseconds.
    ///
    /// # Panics
    /// Its time limit passes.
    pub fn wait_and_look(mut self, mut look: impl FnMut(&Running)) -> Finished {
        while self.is_running() {
            look(&self);
            std::thread::sleep(TICK);
        }
        let elapsed = self.begin.elapsed();
        let (status, signal) = match self.ended {
            Some(Ok(status)) => (Some(status), None),
            Some(Err(signal)) => (None, Some(signal)),
            None => (None, None),
        };
        // Its processes may need a moment to end, and files to vanish; a good run leaves none.
        let settled = Instant::now();
        let (mut orphans, mut in_shared_memory, mut in_temporary);
        let mut foreign = BTreeSet::new();
        loop {
            orphans = self.processes();
            let before = self.shared_memory.as_ref();
            in_shared_memory =
                before.map_or(Vec::new(), |before| shared_memory().difference(before).cloned().collect());
            // A file that another program has created meanwhile is not a leak of this job.
            in_shared_memory.retain(|name| {
                let other = foreign.contains(name)
                    || processes::mapped_by_others(&self.mark, &format!("/dev/shm/{name}"));
                if other {
                    foreign.insert(name.clone());
                }
                !other
            });
            in_temporary = files_below(self.temporary.path());
            let clean = orphans.is_empty() && in_shared_memory.is_empty() && in_temporary.is_empty();
            if clean || settled.elapsed() > SETTLE {
                break;
            }
            std::thread::sleep(TICK);
        }
        self.kill();
        let stderr = self.stderr.finish();
        let (status, signal) = match launcher::status_before_crash(signal, &stderr) {
            None => (status, signal),
            Some(status) => {
                in_temporary.retain(|path| !launcher::is_its_own(path));
                (Some(status), None)
            }
        };
        Finished {
            description: self.description.clone(),
            status,
            signal,
            stdout: self.stdout.finish(),
            stderr,
            elapsed,
            orphans,
            in_shared_memory,
            in_temporary,
        }
    }

    fn kill(&mut self) {
        for process in self.processes() {
            processes::send(process.pid, libc::SIGKILL);
        }
        // The pipes close when the launcher ends.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}
