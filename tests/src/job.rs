//! One run of `mpk-run`, alone or under `mpirun`, with a time limit and a look at what it leaves behind.

use crate::capture::{Capture, pipe};
use crate::launcher;
use crate::processes::{self, MARK, Process};
use crate::run_json::RunJson;
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Time that a job may take unless the test says otherwise; generous, since machines of all speeds run it.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Time that what a job leaves behind has to vanish, launcher included.
const SETTLE: Duration = Duration::from_secs(5);
/// How often a job is looked at.
const TICK: Duration = Duration::from_millis(5);

/// What to run.
#[derive(Clone, Debug)]
pub struct Job {
    program: &'static str,
    ranks: Option<u32>,
    arguments: Vec<OsString>,
    others: Vec<Vec<OsString>>,
    variables: Vec<(String, String)>,
    timeout: Duration,
    shared_memory: Option<u64>,
    stdout_unread: bool,
    stderr_unread: bool,
    stdout_file: Option<PathBuf>,
    stdin_open: bool,
    limits: Vec<(u32, u64)>,
}

impl Job {
    /// `mpirun -n ranks mpk-run`; one rank runs without `mpirun`.
    pub fn new(ranks: u32) -> Self {
        let job = Job::alone();
        if ranks == 1 { job } else { Job { ranks: Some(ranks), ..job } }
    }

    /// `mpk-run` without `mpirun`.
    pub fn alone() -> Self {
        Job {
            program: "mpk-run",
            ranks: None,
            arguments: Vec::new(),
            others: Vec::new(),
            variables: Vec::new(),
            timeout: TIMEOUT,
            shared_memory: None,
            stdout_unread: false,
            stderr_unread: false,
            stdout_file: None,
            stdin_open: false,
            limits: Vec::new(),
        }
    }

    /// `mpirun -n ranks mpk-run`, also for one rank.
    pub fn under_mpirun(ranks: u32) -> Self {
        Job { ranks: Some(ranks), ..Job::alone() }
    }

    /// Its standard input is written to by [`Running::say`].
    pub fn with_stdin(self) -> Self {
        Job { stdin_open: true, ..self }
    }

    /// Of another program of ours.
    pub fn of(self, program: &'static str) -> Self {
        Job { program, ..self }
    }

    /// Adds an argument.
    pub fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.arguments.push(argument.as_ref().into());
        self
    }

    /// Adds arguments.
    pub fn args<I: IntoIterator<Item: AsRef<OsStr>>>(mut self, arguments: I) -> Self {
        self.arguments.extend(arguments.into_iter().map(|a| a.as_ref().into()));
        self
    }

    /// One more rank, with a command line of its own: `: -n 1 mpk-run ...`.
    pub fn other_rank<I: IntoIterator<Item: AsRef<OsStr>>>(mut self, arguments: I) -> Self {
        self.others.push(arguments.into_iter().map(|a| a.as_ref().into()).collect());
        self
    }

    /// With a /dev/shm of its own of this many bytes; `None` where that can't be had (it takes a mount namespace).
    pub fn with_shared_memory(self, bytes: u64) -> Option<Self> {
        let possible =
            Command::new("unshare").args(["-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]).output();
        possible.is_ok_and(|o| o.status.success()).then_some(Job { shared_memory: Some(bytes), ..self })
    }

    /// Sets an environment variable.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.variables.push((name.into(), value.into()));
        self
    }

    /// Sets the time limit.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Its standard output is a pipe that nobody reads.
    pub fn stdout_unread(self) -> Self {
        Job { stdout_unread: true, ..self }
    }

    /// Its standard output goes to what is at this path, such as a device.
    pub fn stdout_to(self, path: &str) -> Self {
        Job { stdout_file: Some(path.into()), ..self }
    }

    /// Sets a limit of the process (`libc::RLIMIT_...`): of the launcher too, if there is one.
    pub fn limit(mut self, resource: u32, value: u64) -> Self {
        self.limits.push((resource, value));
        self
    }

    /// Its standard error is a pipe that nobody reads.
    pub fn stderr_unread(self) -> Self {
        Job { stderr_unread: true, ..self }
    }

    /// The command line, for messages.
    pub fn describe(&self) -> String {
        let mut words = self.ranks.map(|n| vec![format!("mpirun -n {n}")]).unwrap_or_default();
        words.push(self.program.into());
        words.extend(self.arguments.iter().map(|a| {
            let a = a.to_string_lossy();
            if a.len() > 200 {
                format!("{}...", a.chars().take(200).collect::<String>())
            } else {
                a.into_owned()
            }
        }));
        words.extend(
            self.others
                .iter()
                .map(|others| format!(": -n 1 {} {}", self.program, others.join(OsStr::new(" ")).display())),
        );
        words.join(" ")
    }

    /// Runs it to its end.
    ///
    /// # Panics
    /// It could not be started, or took longer than its time limit (all of its processes are killed then).
    pub fn run(&self) -> Finished {
        self.start().wait()
    }

    /// Runs it with `--json` and reads the object.
    ///
    /// # Panics
    /// As [`Job::run`]; it did not end with status 0, or its output is not one object of the contract.
    pub fn run_json(&self) -> RunJson {
        self.clone().arg("--json").run().json()
    }

    /// Starts it. One job runs at a time on this machine, so this may wait for another test.
    ///
    /// # Panics
    /// There is no binary, or it could not be started.
    pub fn start(&self) -> Running {
        let turn = Turn::take();
        let shared_memory = shared_memory();
        let mut running = self.spawn();
        running.shared_memory = Some(shared_memory);
        running.turn = Some(turn);
        running
    }

    /// Starts it beside other jobs of the same turn. What it leaves in /dev/shm is not told from theirs.
    ///
    /// # Panics
    /// As [`Job::start`].
    pub fn start_in(&self, _turn: &Turn) -> Running {
        self.spawn()
    }

    fn spawn(&self) -> Running {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let binary = binary_of(self.program);
        // Short, since Open MPI puts sockets below it.
        let temporary = tempfile::Builder::new().prefix("mpk").tempdir().expect("a temporary folder");
        let mark = format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let mut command = match self.ranks {
            None => Command::new(&binary),
            Some(ranks) => {
                let mut command = Command::new("mpirun");
                command.arg("-n").arg(ranks.to_string()).arg(&binary);
                command
            }
        };
        if let Some(bytes) = self.shared_memory {
            let mounted = format!("mount -t tmpfs -o size={bytes} tmpfs /dev/shm && exec \"$@\"");
            let mut inside = Command::new("unshare");
            inside
                .args(["-m", "sh", "-c", &mounted, "sh"])
                .arg(command.get_program())
                .args(command.get_args());
            command = inside;
        }
        command.args(&self.arguments);
        for arguments in &self.others {
            command.args([":", "-n", "1"]).arg(&binary).args(arguments);
        }
        command.env(MARK, &mark).env("TMPDIR", temporary.path());
        command.envs([
            ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
            ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
            ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
            ("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"),
            ("OMPI_MCA_btl_vader_single_copy_mechanism", "none"),
        ]);
        command.envs(self.variables.iter().map(|(n, v)| (n, v)));
        command.stdin(if self.stdin_open { Stdio::piped() } else { Stdio::null() });
        command.stdout(pipe(self.stdout_unread)).stderr(pipe(self.stderr_unread));
        if let Some(path) = &self.stdout_file {
            let file = File::options().write(true).open(path);
            command.stdout(file.unwrap_or_else(|e| panic!("{}: {e}", path.display())));
        }
        let limits = self.limits.clone();
        // SAFETY: setrlimit may be called between fork and exec, and the closure allocates nothing.
        unsafe {
            command.pre_exec(move || {
                for &(resource, value) in &limits {
                    let limit = libc::rlimit { rlim_cur: value, rlim_max: value };
                    if libc::setrlimit(resource, &raw const limit) != 0 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        command.process_group(0);
        let begin = Instant::now();
        let mut child = command.spawn().unwrap_or_else(|e| {
            let program = command.get_program().to_string_lossy();
            panic!("{program} could not be started: {e}; scripts/setup.sh installs what is missing")
        });
        let stdout = Capture::new(child.stdout.take());
        let stderr = Capture::new(child.stderr.take());
        let description = self.describe();
        let (timeout, ended) = (self.timeout, None);
        Running {
            program: self.program,
            child,
            ended,
            mark,
            description,
            begin,
            timeout,
            stdout,
            stderr,
            temporary,
            shared_memory: None,
            turn: None,
        }
    }
}

/// A job that has been started; killed with all of its processes if dropped.
pub struct Running {
    program: &'static str,
    child: Child,
    ended: Option<Result<i32, i32>>,
    mark: String,
    description: String,
    begin: Instant,
    timeout: Duration,
    stdout: Capture,
    stderr: Capture,
    temporary: TempDir,
    /// What was there before, where that tells what this job leaves.
    shared_memory: Option<BTreeSet<String>>,
    #[allow(dead_code, reason = "held until the job is looked at no more")]
    turn: Option<Turn>,
}

impl Running {
    /// All living processes of the job, its launcher included.
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

    /// True while it runs.
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
    /// The job was not started [`Job::with_stdin`], or reads no more.
    pub fn say(&mut self, line: &str) {
        let stdin = self.child.stdin.as_mut().expect("a job with standard input");
        stdin.write_all(format!("{line}\n").as_bytes()).expect("a job that reads");
    }

    /// Ends its standard input.
    pub fn say_no_more(&mut self) {
        self.child.stdin = None;
    }

    /// Waits until `stdout` holds something that `seen` accepts.
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

    /// Reads no more of its output once there is some, and closes the pipe.
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
        // What was started by it may need a moment to end, and files to vanish; in a good run there is none.
        let settled = Instant::now();
        let (mut orphans, mut in_shared_memory, mut in_temporary);
        let mut foreign = BTreeSet::new();
        loop {
            orphans = self.processes();
            let before = self.shared_memory.as_ref();
            in_shared_memory =
                before.map_or(Vec::new(), |before| shared_memory().difference(before).cloned().collect());
            // What another program has made meanwhile is no leak of this one.
            in_shared_memory.retain(|name| {
                let other =
                    foreign.contains(name) || processes::mapped_by_others(&format!("/dev/shm/{name}"));
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
        // The launcher's end lets the pipes close.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

/// What a job left.
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
    /// From start to end.
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

    /// Error messages of ours (not the launcher's): the lines that begin one.
    pub fn error_lines(&self) -> Vec<&str> {
        self.stderr.lines().filter(|l| l.starts_with("mpk-run: error:") || l.starts_with("error:")).collect()
    }
}

/// One job at a time, over all test binaries that were built to the same folder.
pub struct Turn {
    // Closing it ends the turn.
    _lock: File,
}

impl Turn {
    /// Waits for it.
    ///
    /// # Panics
    /// The file that is locked can't be made.
    pub fn take() -> Self {
        let path = profile_folder().join("mpk-tests.lock");
        let lock = File::create(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        // SAFETY: the descriptor is open for as long as `lock` lives.
        let result = unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX) };
        assert_eq!(result, 0, "{}: {}", path.display(), std::io::Error::last_os_error());
        Turn { _lock: lock }
    }
}

/// The folder of the build that this test belongs to: target/debug or target/release.
fn profile_folder() -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    let folder = test.parent().expect("a test lies in a folder");
    // Tests lie in `deps`.
    if folder.ends_with("deps") { folder.parent().unwrap_or(folder).into() } else { folder.into() }
}

/// `mpk-run`: `MPK_RUN`, or the release build, or that of this test's own profile.
///
/// # Panics
/// There is none; the message says how to build it.
pub fn binary() -> PathBuf {
    binary_of("mpk-run")
}

/// As [`binary`], of another program; the others lie beside `MPK_RUN`.
fn binary_of(program: &str) -> PathBuf {
    if let Some(path) = std::env::var_os("MPK_RUN") {
        return if program == "mpk-run" { path.into() } else { Path::new(&path).with_file_name(program) };
    }
    let own = profile_folder();
    let release = own.parent().unwrap_or(&own).join("release");
    [&release, &own].into_iter().map(|f| f.join(program)).find(|p| p.exists()).unwrap_or_else(|| {
        panic!(
            "{} is missing: build it with `cargo build --release -p launch --bins`",
            release.join(program).display()
        )
    })
}

/// Names in /dev/shm.
pub fn shared_memory() -> BTreeSet<String> {
    let Ok(entries) = fs::read_dir("/dev/shm") else { return BTreeSet::new() };
    entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect()
}

/// All files below `folder`, folders left out: a launcher's empty session folder is no leak of ours.
fn files_below(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries
        .flatten()
        .flat_map(|entry| match entry.file_type() {
            Ok(kind) if kind.is_dir() => files_below(&entry.path()),
            _ => vec![entry.path()],
        })
        .collect()
}
