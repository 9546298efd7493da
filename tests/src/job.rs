//! One run of `mpk-run`, alone or under `mpirun`, with a time limit and a check that no process, file or shared memory
//! is left.

use crate::capture::{Capture, pipe};
use crate::finished::Finished;
use crate::fixtures::is_sanitized;
use crate::places::binary_of;
pub use crate::places::{binary, shared_memory};
use crate::processes::MARK;
use crate::run_json::RunJson;
use crate::running::Running;
pub use crate::turn::Turn;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Time limit of a job unless the test sets another; generous, because slow machines run the tests too.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The same under the region sanitizer, whose kernels are compiled by the first job.
const SANITIZED_TIMEOUT: Duration = Duration::from_secs(240);
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
            timeout: if is_sanitized() { SANITIZED_TIMEOUT } else { TIMEOUT },
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

    /// Keeps standard input open for [`Running::say`].
    pub fn with_stdin(self) -> Self {
        Job { stdin_open: true, ..self }
    }

    /// Runs another of our programs.
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

    /// Adds a rank with its own command line: `: -n 1 mpk-run ...`.
    pub fn other_rank<I: IntoIterator<Item: AsRef<OsStr>>>(mut self, arguments: I) -> Self {
        self.others.push(arguments.into_iter().map(|a| a.as_ref().into()).collect());
        self
    }

    /// With its own /dev/shm of this many bytes; `None` if that is not possible (it needs a mount namespace).
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

    /// Makes standard output a pipe without a reader.
    pub fn stdout_unread(self) -> Self {
        Job { stdout_unread: true, ..self }
    }

    /// Sends standard output to this path, such as a device.
    pub fn stdout_to(self, path: &str) -> Self {
        Job { stdout_file: Some(path.into()), ..self }
    }

    /// Sets a limit of the process (`libc::RLIMIT_...`), and of the launcher if there is one.
    pub fn limit(mut self, resource: u32, value: u64) -> Self {
        self.limits.push((resource, value));
        self
    }

    /// Makes standard error a pipe without a reader.
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
    /// It could not be started, or exceeded its time limit (then all of its processes are killed).
    pub fn run(&self) -> Finished {
        self.start().wait()
    }

    /// Runs it to its end while other jobs run. For a job that does not watch the clock. What it leaves in /dev/shm is not checked.
    ///
    /// # Panics
    /// As [`Job::run`].
    pub fn run_beside_others(&self) -> Finished {
        self.spawn().wait()
    }

    /// Runs it with `--json` and reads the object.
    ///
    /// # Panics
    /// As [`Job::run`]; it did not end with status 0, or its output is not one object of the contract.
    pub fn run_json(&self) -> RunJson {
        self.clone().arg("--json").run().json()
    }

    /// Starts it, after the jobs of other tests if cargo test runs them (see [`Turn`]).
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

    /// Starts it together with other jobs of the same turn. Files that it leaves in /dev/shm cannot be distinguished
    /// from theirs.
    ///
    /// # Panics
    /// As [`Job::start`].
    pub fn start_in(&self, _turn: &Turn) -> Running {
        self.spawn()
    }

    fn spawn(&self) -> Running {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let binary = binary_of(self.program);
        // A short name, because Open MPI puts sockets below it.
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
        // SAFETY: setrlimit and close_range may be called between fork and exec, and the closure allocates nothing.
        unsafe {
            command.pre_exec(move || {
                // A limit counts files that the tests' launcher left open, such as the file of a lock.
                if !limits.is_empty()
                    && libc::close_range(3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC as libc::c_int) != 0
                {
                    return Err(std::io::Error::last_os_error());
                }
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
