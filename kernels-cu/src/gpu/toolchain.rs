//! Where nvcc and NVSHMEM's files for it are.

use super::{GpuError, NvshmemVersion, ToolchainIdentity};
use std::path::PathBuf;

/// A CUDA compiler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nvcc {
    /// The program.
    pub path: PathBuf,
    /// Its release, e.g. (13, 0).
    pub release: (u32, u32),
    /// What it says of its build.
    pub build: String,
}

/// NVSHMEM's headers and device library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvshmemFiles {
    /// Folder of the headers.
    pub include: PathBuf,
    /// Folder of `libnvshmem_device.a`.
    pub lib: PathBuf,
    /// Of the headers.
    pub version: NvshmemVersion,
    /// Length of `libnvshmem_device.a`.
    pub device_bytes: u64,
}

/// What compiles a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Toolchain {
    /// The compiler.
    pub nvcc: Nvcc,
    /// NVSHMEM, where it is wanted.
    pub nvshmem: Option<NvshmemFiles>,
}

impl Toolchain {
    /// Looks for nvcc, and for NVSHMEM if it is wanted.
    ///
    /// # Errors
    /// What is missing or too old, where it was looked for, and the command that installs it.
    pub fn find(nvshmem: bool) -> Result<Self, GpuError> {
        let _ = nvshmem;
        Err(GpuError::NotFound { what: "nvcc", probes: String::new() })
    }

    /// What of it decides the code that it makes.
    pub fn identity(&self) -> ToolchainIdentity {
        ToolchainIdentity {
            nvcc: self.nvcc.build.clone(),
            nvshmem: self.nvshmem.as_ref().map(|files| files.version),
            nvshmem_device_bytes: self.nvshmem.as_ref().map_or(0, |files| files.device_bytes),
        }
    }
}
