//! Running nvcc.

use super::GpuError;
use crate::signals;
use rustix::process::{Pid, Signal, kill_process_group};
use std::ffi::{OsStr, OsString};
use std::io::{self, PipeWriter, Read as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Number of lines of nvcc's output in an error.
const SHOWN_LINES: usize = 40;
/// How often to check whether nvcc has ended, or the user wants it to end.
const TICK: Duration = Duration::from_millis(2);

/// They change the compiled code, and the cache does not know them.
const HIDDEN_VARIABLES: [&str; 5] =
    ["NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"];

const NO_START: &str = "set CUDA_HOME to a CUDA toolkit whose bin/nvcc works, or run scripts/setup.sh --cuda";
const NO_HOST_COMPILER: &str = "nvcc needs a C++ compiler: sudo apt-get install g++; if NVCC_CCBIN is set, unset it or set it to another compiler";
const NO_ROOM: &str = "set MPK_CACHE_DIR to a writable folder with enough free space";

/// `option` with its value attached, e.g. `-I/folder`.
pub(super) fn joined(option: &str, value: &Path) -> OsString {
    let mut joined = OsString::from(option);
    joined.push(value);
    joined
}

/// Runs `program` in `folder` and returns its output.
pub(super) fn run(program: &Path, arguments: &[OsString], folder: &Path) -> Result<String, GpuError> {
    let line = arguments.join(OsStr::new(" "));
    let command = format!("cd {} && {} {}", folder.display(), program.display(), line.display());
    tracing::debug!("{command}");
    let failed = |status: String, output: &str, fix| {
        let lines: Vec<&str> = output.lines().collect();
        let first = lines.len().saturating_sub(SHOWN_LINES);
        GpuError::Compile {
            command: command.clone(),
            status,
            output: lines[first..].iter().map(|line| format!("  {line}\n")).collect(),
            fix,
        }
    };
    let (status, text) = finish(prepare(program, arguments, folder), None)
        .map_err(|e| failed(e.to_string(), "", Some(NO_START)))?;
    match status {
        None => Err(failed("interrupted".to_string(), &text, None)),
        Some(status) if status.success() => Ok(text),
        Some(status) => Err(failed(status.to_string(), &text, fix(&text))),
    }
}

/// The output of `program --version`, if it ends within `limit`.
pub(super) fn version_text(program: &Path, limit: Duration) -> Result<String, String> {
    let mut command = Command::new(program);
    command.arg("--version").stdin(Stdio::null()).process_group(0);
    match finish(command, Some(limit)).map_err(|e| e.to_string())? {
        (Some(_), text) => Ok(text),
        (None, _) => Err(format!("--version does not end within {} s", limit.as_secs_f32())),
    }
}

/// In a separate process group, so that everything that nvcc starts ends with it. Its temporary files are removed with
/// the folder.
fn prepare(program: &Path, arguments: &[OsString], folder: &Path) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).current_dir(folder).stdin(Stdio::null()).process_group(0).env("TMPDIR", ".");
    for variable in HIDDEN_VARIABLES {
        command.env_remove(variable);
    }
    command
}

/// Runs the command to its end. Returns how it ended (`None` if it was interrupted or took longer than `limit`), and
/// its output. It must be in a separate process group.
fn finish(mut command: Command, limit: Option<Duration>) -> io::Result<(Option<ExitStatus>, String)> {
    let begin = Instant::now();
    let (mut output, input) = io::pipe()?;
    let mut child = command.stdout(input.try_clone()?).stderr(input).spawn()?;
    // Also holds the other end of the pipe.
    drop(command);
    let _guard = match Guard::new(&child) {
        Ok(guard) => guard,
        Err(error) => {
            kill_group(&mut child)?;
            return Err(error);
        }
    };
    let reader = std::thread::Builder::new().spawn(move || {
        let mut text = Vec::new();
        output.read_to_end(&mut text).map(|_| text)
    });
    let reader = match reader {
        Ok(reader) => reader,
        Err(error) => {
            kill_group(&mut child)?;
            return Err(error);
        }
    };
    let status = loop {
        match child.try_wait()? {
            Some(status) => break Some(status),
            None if signals::is_ending() || limit.is_some_and(|limit| begin.elapsed() >= limit) => {
                kill_group(&mut child)?;
                break None;
            }
            None => std::thread::sleep(TICK),
        }
    };
    let text = reader.join().unwrap_or_else(|_| Err(io::Error::other("its output could not be read")))?;
    Ok((status, String::from_utf8_lossy(&text).into_owned()))
}

/// A process that kills everything in `child`'s process group if this process ends without doing so, as after SIGKILL. nvcc might otherwise
/// run for minutes.
struct Guard {
    process: Child,
    // Closed by the system at this process's end, and inherited by no other.
    _open: PipeWriter,
}

impl Guard {
    fn new(child: &Child) -> io::Result<Guard> {
        let (end, open) = io::pipe()?;
        let process = Command::new("/bin/sh")
            .args(["-c", "read -r nothing; kill -KILL 0"])
            .stdin(end)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(Pid::from_child(child).as_raw_nonzero().get())
            .spawn()?;
        Ok(Guard { process, _open: open })
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // An error if it has already ended is ignored.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Kills the process and everything that it has started.
fn kill_group(child: &mut Child) -> io::Result<()> {
    // It leads its group. An error if it has already ended is ignored.
    let _ = kill_process_group(Pid::from_child(child), Signal::KILL);
    child.wait().map(|_| ())
}

/// The fix for this output, if the machine lacks something.
fn fix(output: &str) -> Option<&'static str> {
    let has = |words: &[&str]| words.iter().any(|word| output.contains(word));
    if has(&["host compiler", "Host compiler", "cc1plus"]) {
        Some(NO_HOST_COMPILER)
    } else if has(&["No space left", "Could not open output file"]) {
        Some(NO_ROOM)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_that_would_change_the_code_are_kept_from_nvcc_and_its_files_in_the_folder() {
        let command = prepare(Path::new("nvcc"), &[], Path::new("/"));
        assert!(command.get_envs().any(|(name, value)| name == "TMPDIR" && value.is_some_and(|v| v == ".")));
        for variable in HIDDEN_VARIABLES {
            assert!(
                command.get_envs().any(|(name, value)| name == variable && value.is_none()),
                "{variable}"
            );
        }
    }

    #[test]
    fn missing_tools_are_distinguished_from_errors_in_the_source() {
        for (output, word) in [
            ("gcc: No such file\nnvcc fatal   : Failed to preprocess host compiler properties.", "g++"),
            ("nvcc fatal   : Could not open output file './tmpxft_1'", "MPK_CACHE_DIR"),
            ("model.ptx: No space left on device", "MPK_CACHE_DIR"),
        ] {
            assert!(fix(output).is_some_and(|fix| fix.contains(word)), "{output}");
        }
        assert_eq!(fix("model.cu(7): error: this is what is wrong"), None);
    }
}
