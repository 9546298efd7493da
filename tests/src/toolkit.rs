//! CUDA's compiler, for tests that need no GPU.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The repository's folder.
///
/// # Panics
/// The sources are not where they were compiled.
#[must_use]
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().expect("the repository")
}

/// The real nvcc. Without one, it says so.
///
/// # Panics
/// There is none, and `MPK_REQUIRE_CUDA` is set.
#[must_use]
pub fn nvcc() -> Option<PathBuf> {
    let variables = ["CUDA_HOME", "CUDA_PATH"].map(std::env::var_os);
    let mut folders: Vec<PathBuf> =
        variables.into_iter().flatten().map(|home| PathBuf::from(home).join("bin")).collect();
    folders.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
    folders.push("/usr/local/cuda/bin".into());
    folders.push(repository().join(".setup/nvidia/cu13/bin"));
    let found = folders.into_iter().map(|folder| folder.join("nvcc")).find(|path| path.is_file());
    let required = std::env::var_os("MPK_REQUIRE_CUDA").is_some();
    assert!(
        found.is_some() || !required,
        "MPK_REQUIRE_CUDA is set, but there is no nvcc (scripts/setup.sh --cuda)"
    );
    if found.is_none() {
        eprintln!("skipped: there is no CUDA compiler (scripts/setup.sh --cuda installs one)");
    }
    found
}

/// Writes a script that can be executed, and its folder.
///
/// # Panics
/// It cannot be written.
pub fn executable(path: &Path, script: &str) {
    fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
    fs::write(path, script).expect("a script");
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("its mode");
}

/// Makes `folder` a toolkit whose nvcc is the real one with hardly any optimization, and a seventh of the time. An nvcc of CUDA 12 that
/// has no such option compiles as always.
///
/// # Panics
/// It cannot be written.
pub fn make_quick(folder: &Path, nvcc: &Path) {
    let nvcc = nvcc.display();
    let script = format!(
        "#!/bin/sh\ncase \"$1 $({nvcc} --help)\" in\n--version*) ;;\n*Ofast-compile*) set -- \"$@\" --Ofast-compile=max ;;\nesac\n\
         exec {nvcc} \"$@\"\n"
    );
    executable(&folder.join("bin/nvcc"), &script);
}
