//! One measurement of `tune`, in its own process or mpirun job. A candidate may fail, hang or need another kernel, and MPI can start
//! only once per process.

use super::case::Case;
use crate::model::app_error::AppError;
use serde::Serialize;
use serde_json::Value;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use taskgraph::Tuning;

/// How often a running job is checked.
const LOOK: Duration = Duration::from_millis(20);
/// How long a job has to end after it was asked to.
const GRACE: Duration = Duration::from_secs(5);

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Workload {
    /// A decode step of a batch.
    Decode(u32),
    /// A prompt with this many tokens.
    Prefill(u32),
}

impl Workload {
    /// The name in tables.
    pub fn name(self) -> String {
        match self {
            Workload::Decode(batch) => format!("decode-{batch}"),
            Workload::Prefill(tokens) => format!("prefill-{tokens}"),
        }
    }

    /// The command line of the measurement.
    pub fn arguments(self, case: &Case) -> Vec<String> {
        let (what, options) = match self {
            Workload::Decode(batch) => {
                ("decode", vec![("--context", case.context), ("--batch", batch), ("--steps", case.steps)])
            }
            Workload::Prefill(tokens) => ("prefill", vec![("--prompt", tokens)]),
        };
        let mut arguments = vec![what.to_string(), "--model".into(), case.model_name()];
        for (name, value) in options.into_iter().chain([("--repeats", case.repeats)]) {
            arguments.extend([name.to_string(), value.to_string()]);
        }
        // The floor is not needed, and measuring the memory would take longer than everything else.
        if what == "decode" {
            arguments.extend(["--read-rate".to_string(), "1e12".into()]);
        }
        arguments
    }
}

/// The output of a measurement.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Median in milliseconds.
    pub ms: f64,
    /// The whole JSON object.
    pub object: Value,
}

/// Runs `workload` with these values, without a saved tuning table.
///
/// # Errors
/// There is no figure: the run failed, took too long, or could not be started.
pub fn run(case: &Case, workload: Workload, values: &Tuning, until: Instant) -> Result<Measured, AppError> {
    let until = until.min(Instant::now() + Duration::from_secs(u64::from(case.run_limit)));
    let own = std::env::current_exe().map_err(|error| AppError::failed(format!("this program: {error}")))?;
    let mut command = match case.tp {
        1 => Command::new(&own),
        ranks => {
            let ranks = ranks.to_string();
            let mut words = case.launcher.split_whitespace().map(|word| word.replace("{N}", &ranks));
            let program = words.next().ok_or_else(|| AppError::input("--launcher is empty"))?;
            let mut command = Command::new(program);
            command.args(words).arg(&own);
            command
        }
    };
    command.args(workload.arguments(case)).args(["--tuning", "off"]);
    for (name, value) in values.iter() {
        command.args(["--tune", &format!("{name}={value}")]);
    }
    command.args(&case.options);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().map_err(|error| {
        AppError::environment(format!("{}: {error}", command.get_program().display()))
            .with_help("install MPI, or name its launcher with --launcher \"mpirun -n {N}\"")
    })?;
    let (status, output, log) = wait(child, until)?;
    match status {
        Some(0) => {}
        Some(status) => return Err(AppError { status, ..AppError::failed(reason(&log)) }),
        None => return Err(AppError::failed("it did not end within the time limit")),
    }
    let object: Value = serde_json::from_str(output.trim())
        .map_err(|error| AppError::failed(format!("its output is not a JSON object: {error}")))?;
    let ms = object["ms"]["median"].as_f64().filter(|ms| *ms > 0.0);
    let ms = ms.ok_or_else(|| AppError::failed("its output has no figure"))?;
    Ok(Measured { ms, object })
}

/// Why a run failed, according to its log: the last error of mpk-bench, which mpirun's own messages follow. Otherwise the last line.
fn reason(log: &str) -> String {
    let error = log.lines().rev().find_map(|line| Some(line.split_once("mpk-bench: error: ")?.1));
    let last = || log.lines().rev().find(|line| !line.trim().is_empty());
    error.or_else(last).unwrap_or("it printed nothing").to_string()
}

/// The exit status (`None` if the job was ended at `until`), its output and its log.
fn wait(mut child: Child, until: Instant) -> Result<(Option<i32>, String, String), AppError> {
    let failed = |error: std::io::Error| AppError::failed(format!("a run of mpk-bench: {error}"));
    let (mut stdout, mut stderr) = (child.stdout.take(), child.stderr.take());
    std::thread::scope(|scope| {
        let output = scope.spawn(move || read(stdout.as_mut()));
        let log = scope.spawn(move || read(stderr.as_mut()));
        let status = loop {
            match child.try_wait().map_err(failed)? {
                Some(status) => break Some(status.code().unwrap_or(4)),
                None if Instant::now() >= until => {
                    end(&mut child);
                    break None;
                }
                None => std::thread::sleep(LOOK),
            }
        };
        Ok((status, output.join().unwrap_or_default(), log.join().unwrap_or_default()))
    })
}

fn read(from: Option<&mut impl Read>) -> String {
    let mut bytes = Vec::new();
    // Output that was read before an error is kept.
    let _ = from.map(|from| from.read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Asks the job to end, so that mpirun ends its ranks. Kills it if it does not.
fn end(child: &mut Child) {
    use rustix::process::{Pid, Signal, kill_process};
    if let Some(pid) = Pid::from_raw(child.id() as i32) {
        let _ = kill_process(pid, Signal::TERM);
    }
    let until = Instant::now() + GRACE;
    while Instant::now() < until {
        if matches!(child.try_wait(), Ok(Some(_)) | Err(_)) {
            return;
        }
        std::thread::sleep(LOOK);
    }
    let _ = child.kill();
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use super::reason;

    #[test]
    fn a_failed_run_gives_its_own_reason_and_not_mpiruns() {
        let log = "2026 WARN something\nmpk-bench: error: 3 ranks do not divide\n------\nPrimary job terminated\n------\n";
        assert_eq!(reason(log), "3 ranks do not divide");
        assert_eq!(reason("mpirun: not enough slots\n\n"), "mpirun: not enough slots");
        assert_eq!(reason("\n"), "it printed nothing");
    }
}
