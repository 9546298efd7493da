//! The GPU sources that are part of this binary: a model is compiled where no repository is.

use std::io;
use std::path::Path;

// `FILES`: path below `kernels-cu` and content, sorted by path (see `build.rs`).
include!(concat!(env!("OUT_DIR"), "/gpu_sources.rs"));

/// Folders that `#include` searches, below the one that [`write`] filled.
pub(super) const INCLUDE_FOLDERS: &[&str] = &["include", "protocol", "src"];

/// Every source: its path and its content.
pub(super) fn files() -> &'static [(&'static str, &'static [u8])] {
    FILES
}

/// Writes all sources below `folder`.
pub(super) fn write(folder: &Path) -> io::Result<()> {
    for (path, content) in FILES {
        let path = folder.join(path);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)?;
        }
        std::fs::write(path, content)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sources_that_a_model_includes_are_there() {
        let has = |path: &str| files().iter().any(|file| file.0 == path && !file.1.is_empty());
        for path in ["include/mpk/abi.h", "protocol/event.h", "protocol/platform/gpu.h", "src/gpu/task.cuh"] {
            assert!(has(path), "{path}");
        }
        assert!(files().iter().all(|file| !file.0.ends_with(".cpp") && !file.0.ends_with(".rs")));
        assert!(files().is_sorted_by_key(|file| file.0));
    }
}
