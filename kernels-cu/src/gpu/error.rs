//! Errors on the way from a task graph to its cubin.

use std::path::PathBuf;
use thiserror::Error;

/// Why there is no cubin.
#[derive(Debug, Error)]
pub enum GpuError {
    /// A task type cannot run on the GPU, or not with this shape.
    #[error("graph {graph}, operator {op}: task type {task_type} cannot run on the GPU: {reason}")]
    Unsupported {
        /// Name of the graph.
        graph: String,
        /// Name of the operator.
        op: String,
        /// Name of the task type.
        task_type: String,
        /// The reason.
        reason: String,
    },
    /// The toolchain, or a part of it, is missing or too old.
    #[error("{what} was not found in these places:\n{probes}")]
    NotFound {
        /// What was looked for.
        what: String,
        /// One line per place.
        probes: String,
        /// The variable that excludes all other places, if it is set.
        variable: Option<&'static str>,
    },
    /// nvcc refused the source, or could not run.
    #[error("nvcc failed ({status})\n  {command}\n{output}")]
    Compile {
        /// The command, to type again.
        command: String,
        /// Its exit status.
        status: String,
        /// The last lines that it printed.
        output: String,
        /// The fix, if the machine lacks something.
        fix: Option<&'static str>,
    },
    /// The cache folder cannot be used.
    #[error("the folder of compiled kernels, {}: {problem}", path.display())]
    Cache {
        /// The folder or file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
}

impl GpuError {
    /// How to fix it, if that is known.
    pub fn help(&self) -> Option<String> {
        match self {
            GpuError::Unsupported { .. } => None,
            GpuError::NotFound { variable: Some(name), .. } => {
                Some(format!("unset {name}, which excludes all other places, or run scripts/setup.sh --cuda"))
            }
            GpuError::NotFound { variable: None, .. } => Some("run scripts/setup.sh --cuda".into()),
            GpuError::Compile { fix, .. } => fix.map(Into::into),
            GpuError::Cache { .. } => Some("set MPK_CACHE_DIR to a folder of your own".into()),
        }
    }

    /// The exit status that it means: 2 bad input, 3 the environment lacks something, 4 failed.
    pub fn exit_status(&self) -> u8 {
        match self {
            GpuError::Unsupported { .. } => 2,
            GpuError::Compile { fix: None, .. } => 4,
            _ => 3,
        }
    }
}
