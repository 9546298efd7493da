//! Where programs are, and what is in folders that jobs use.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The folder of the build that this test belongs to: target/debug or target/release.
pub(crate) fn profile_folder() -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    let folder = test.parent().expect("a test lies in a folder");
    // Tests are in `deps`.
    if folder.ends_with("deps") { folder.parent().unwrap_or(folder).into() } else { folder.into() }
}

/// `mpk-run`: `MPK_RUN`, or the release build, or the build of this test's own profile.
///
/// # Panics
/// There is no binary; the message says how to build it.
pub fn binary() -> PathBuf {
    binary_of("mpk-run")
}

/// As [`binary`], for another program; with `MPK_RUN`, the others are in the same folder.
pub(crate) fn binary_of(program: &str) -> PathBuf {
    if let Some(path) = std::env::var_os("MPK_RUN") {
        return if program == "mpk-run" { path.into() } else { Path::new(&path).with_file_name(program) };
    }
    let own = profile_folder();
    let release = own.parent().unwrap_or(&own).join("release");
    [&release, &own].into_iter().map(|f| f.join(program)).find(|p| p.exists()).unwrap_or_else(|| {
        panic!(
            "{} is missing: build it with `cargo build --release -p mpk-launch --bins`",
            release.join(program).display()
        )
    })
}

/// Names in /dev/shm.
pub fn shared_memory() -> BTreeSet<String> {
    let Ok(entries) = fs::read_dir("/dev/shm") else { return BTreeSet::new() };
    entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect()
}

/// All files below `folder`, without folders: a launcher's empty session folder is not our leak.
pub(crate) fn files_below(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries
        .flatten()
        .flat_map(|entry| match entry.file_type() {
            Ok(kind) if kind.is_dir() => files_below(&entry.path()),
            _ => vec![entry.path()],
        })
        .collect()
}
