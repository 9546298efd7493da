//! Libraries that change what the C library does in a job, by LD_PRELOAD.

use std::path::Path;
use std::process::Command;

/// Compiles `preload/NAME.cpp` into a library in `folder`. Returns its path.
///
/// # Panics
/// It could not be compiled.
pub fn preload(folder: &Path, name: &str) -> String {
    let library = folder.join(format!("{name}.so"));
    let built = Command::new("c++")
        .args(["-std=c++17", "-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("preload/{name}.cpp")))
        .status();
    assert!(
        built.is_ok_and(|status| status.success()),
        "{name}: the library to be preloaded could not be compiled"
    );
    library.display().to_string()
}
