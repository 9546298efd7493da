//! The GPU sources that are embedded in this binary, so that a model can be compiled without the repository.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

// `FILES`: path below `kernels-cu` and content, sorted by path (see `build.rs`).
include!(concat!(env!("OUT_DIR"), "/gpu_sources.rs"));

/// Folders that `#include` searches, relative to the one that [`write`] filled.
pub(super) const INCLUDE_FOLDERS: &[&str] = &["include", "protocol", "src"];

/// For development: the folder `kernels-cu` of a checkout, whose sources are used instead of the embedded ones. After a
/// change to a kernel, this crate need not be built again; only a new file needs a build.
const OVERRIDE: &str = "MPK_GPU_SOURCES";

/// The build generates this file, so no checkout has it. The embedded one is always used.
const GENERATED: &str = "include/mpk/abi_layout.h";

fn override_folder() -> Option<&'static PathBuf> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    FOLDER.get_or_init(|| std::env::var_os(OVERRIDE).filter(|v| !v.is_empty()).map(PathBuf::from)).as_ref()
}

/// Every source: its path and content. One that is missing from the override's folder is empty here, and an error in
/// [`write`].
pub(super) fn files() -> &'static [(&'static str, &'static [u8])] {
    static READ: OnceLock<Vec<(&'static str, &'static [u8])>> = OnceLock::new();
    let Some(folder) = override_folder() else { return FILES };
    READ.get_or_init(|| {
        let read = |path: &str| std::fs::read(folder.join(path)).unwrap_or_default();
        let content = |path: &str, embedded| if path == GENERATED { embedded } else { &*read(path).leak() };
        FILES.iter().map(|&(path, embedded)| (path, content(path, embedded))).collect()
    })
}

/// Writes all sources below `folder`.
pub(super) fn write(folder: &Path) -> io::Result<()> {
    for &(path, content) in files() {
        if let Some(from) = override_folder()
            && content.is_empty()
        {
            let problem = format!("{OVERRIDE} names {}, which has no {path}", from.display());
            return Err(io::Error::new(io::ErrorKind::NotFound, problem));
        }
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
        for path in [
            "include/mpk/abi.h",
            "include/mpk/abi_layout.h",
            "protocol/event.h",
            "protocol/platform/gpu.h",
            "src/gpu/task.cuh",
        ] {
            assert!(has(path), "{path}");
        }
        assert!(files().iter().all(|file| !file.0.ends_with(".cpp") && !file.0.ends_with(".rs")));
        assert!(files().is_sorted_by_key(|file| file.0));
    }
}
