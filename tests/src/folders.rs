//! Where the fixtures are.

use std::path::{Path, PathBuf};

/// `tests/fixtures`.
pub fn fixtures_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// Folder of a fixture's model.json.
pub fn model_folder(name: &str) -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    match name {
        "tiny" => tests.parent().unwrap_or(tests).join("examples/tiny"),
        _ => fixtures_folder().join(name),
    }
}
