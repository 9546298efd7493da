//! The processes of a job, found by a mark in their environment, also those that lost their parent.

use std::fs;
use std::time::Duration;

/// Environment variable that marks the processes of one job.
pub(crate) const MARK: &str = "MPK_TEST_JOB";

/// A process of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its id.
    pub pid: i32,
    /// Name of its program, cut to 15 bytes by the kernel.
    pub name: String,
    /// Its rank, if a launcher gave it one.
    pub rank: Option<u32>,
}

impl Process {
    /// CPU time that it has used; `None` if it is gone.
    pub fn cpu_time(&self) -> Option<Duration> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid)).ok()?;
        // The name, in parentheses, may contain spaces. User and system time are the 14th and 15th fields.
        let fields: Vec<&str> = stat.rsplit(')').next()?.split_whitespace().collect();
        let ticks = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
        // SAFETY: sysconf has no memory effects.
        let each = unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as u64;
        Some(Duration::from_millis(1000 * ticks / each.max(1)))
    }
}

/// All living processes with `mark`. Zombies are left out.
pub(crate) fn with_mark(mark: &str) -> Vec<Process> {
    let wanted = format!("{MARK}={mark}");
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
    pids.filter_map(|pid| {
        // Processes come and go: one that cannot be read is gone.
        let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
        let mut variables = environment.split(|&b| b == 0);
        if !variables.any(|v| v == wanted.as_bytes()) {
            return None;
        }
        let rank = environment
            .split(|&b| b == 0)
            .filter_map(|v| std::str::from_utf8(v).ok()?.strip_prefix("OMPI_COMM_WORLD_RANK=")?.parse().ok())
            .next();
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?.trim().to_string();
        Some(Process { pid, name, rank })
    })
    .collect()
}

/// Sends `signal` to `pid`; it is no error if the process is gone.
pub(crate) fn send(pid: i32, signal: i32) {
    // SAFETY: kill has no memory effects here; `pid` is that of a process of our own job.
    unsafe { libc::kill(pid, signal) };
}

/// Value in bytes of a field of /proc/PID/status that is given in kB, such as `VmHWM`.
pub(crate) fn status_bytes(pid: i32, field: &str) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix(field)?.strip_prefix(':'))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

/// Whether a process without this mark has mapped the file `path`, so that the file belongs to another job or program.
pub(crate) fn mapped_by_others(mark: &str, path: &str) -> bool {
    let own = format!("{MARK}={mark}");
    let Ok(entries) = fs::read_dir("/proc") else { return false };
    entries.flatten().any(|entry| {
        // In this order: a process of this job that ends in between has no maps. One whose environment cannot be read is no other's.
        let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
        let maps = fs::read_to_string(entry.path().join("maps")).unwrap_or_default();
        let is_other =
            !environment.is_empty() && !environment.split(|&b| b == 0).any(|v| v == own.as_bytes());
        is_other && maps.lines().any(|line| line.ends_with(path))
    })
}
