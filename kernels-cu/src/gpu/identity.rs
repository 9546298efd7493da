//! The identity of a cubin: the sources and options, and the toolchain's description of itself.

use super::{CompileOptions, embedded};
use serde::{Deserialize, Serialize};
use std::fmt;
use xxhash_rust::xxh3::Xxh3;

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
    /// The build description in `nvcc --version`.
    pub nvcc: String,
    /// Version of NVSHMEM's headers and device library; `None` if the cubin needs none.
    pub nvshmem: Option<NvshmemVersion>,
    /// Length of `libnvshmem_device.a`; 0 if the cubin needs none.
    pub nvshmem_device_bytes: u64,
}

impl ToolchainIdentity {
    /// 16 hexadecimal digits.
    pub(super) fn key(&self) -> String {
        let mut hash = Fields::default();
        hash.field(self.nvcc.as_bytes());
        hash.field(format!("{:?}", self.nvshmem).as_bytes());
        hash.field(&self.nvshmem_device_bytes.to_le_bytes());
        hash.digest()[..16].to_string()
    }
}

/// Hash of a compilation without the toolchain: 32 hexadecimal digits.
pub(super) fn key(kind: &str, source: &str, flags: &[String], options: Option<&CompileOptions>) -> String {
    let mut hash = Fields::default();
    hash.field(kind.as_bytes());
    hash.field(source.as_bytes());
    for flag in flags {
        hash.field(flag.as_bytes());
    }
    if let Some(options) = options {
        hash.field(format!("{options:?}").as_bytes());
        for (path, content) in embedded::files() {
            hash.field(path.as_bytes());
            hash.field(content);
        }
    }
    hash.digest()
}

/// A hash of fields, each with its length.
#[derive(Default)]
struct Fields(Xxh3);

impl Fields {
    fn field(&mut self, bytes: &[u8]) {
        self.0.update(&(bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    fn digest(&self) -> String {
        format!("{:032x}", self.0.digest128())
    }
}
