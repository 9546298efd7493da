//! What of a toolchain decides the code that it makes.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A version of NVSHMEM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NvshmemVersion {
    /// First number.
    pub major: u32,
    /// Second number.
    pub minor: u32,
    /// Third number.
    pub patch: u32,
}

impl fmt::Display for NvshmemVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// The toolchain that made a cubin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolchainIdentity {
    /// What `nvcc --version` says of its build.
    pub nvcc: String,
    /// NVSHMEM's headers and device library; `None` where the cubin needs none.
    pub nvshmem: Option<NvshmemVersion>,
    /// Length of `libnvshmem_device.a`; 0 where the cubin needs none.
    pub nvshmem_device_bytes: u64,
}
