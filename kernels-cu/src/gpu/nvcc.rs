//! Running nvcc.

use super::GpuError;
use std::path::Path;
use std::process::Command;

/// Lines of nvcc's output that an error shows.
const SHOWN_LINES: usize = 40;

/// Runs `program` in `folder` and gives what it printed.
pub(super) fn run(program: &Path, arguments: &[String], folder: &Path) -> Result<String, GpuError> {
    let command = format!("cd {} && {} {}", folder.display(), program.display(), arguments.join(" "));
    tracing::debug!("{command}");
    let failed = |status: String, output: &str| {
        let lines: Vec<&str> = output.lines().collect();
        let first = lines.len().saturating_sub(SHOWN_LINES);
        GpuError::Compile {
            command: command.clone(),
            status,
            output: lines[first..].iter().map(|line| format!("  {line}\n")).collect(),
        }
    };
    let output = Command::new(program)
        .args(arguments)
        .current_dir(folder)
        .stdin(std::process::Stdio::null())
        .output()
        .map_err(|e| failed(e.to_string(), ""))?;
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text += &String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(text) } else { Err(failed(output.status.to_string(), &text)) }
}
