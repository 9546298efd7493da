//! Proves that `scripts/gpu_check.sh` says in one line why it cannot start, and leaves no file.

use mpk_tests::job::binary;
use std::path::Path;
use std::process::Command;

/// Runs it with a Python in which `import numpy` does what `numpy` says.
fn refused(numpy: &str, arguments: &[&str], words: &[&str]) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let temporary = tempfile::tempdir().expect("a temporary folder");
    std::fs::write(folder.path().join("numpy.py"), numpy).expect("a module");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/gpu_check.sh");
    let mut command = Command::new(script);
    command.args(["--backend", "cpu", "--only", "doctor", "--binary"]).arg(binary()).args(arguments);
    command.current_dir(folder.path()).env("PYTHONPATH", folder.path()).env("TMPDIR", temporary.path());
    let output = command.output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && !text.contains("Traceback"), "{arguments:?}: {text}");
    for word in words {
        assert!(text.contains(word), "{arguments:?}: {text}");
    }
    let left: Vec<_> = temporary.path().read_dir().expect("the folder").collect();
    assert!(left.is_empty(), "{arguments:?}: {left:?}");
}

#[test]
fn the_reason_why_it_cannot_start_is_named() {
    refused("raise ImportError('No module named numpy')", &[], &["numpy", "MPK_PYTHON"]);
    refused("", &["--gpus", "-1"], &["--gpus", "at least 1"]);
    refused("", &["--out", "/dev/null/reports"], &["/dev/null/reports", "--out"]);
}
