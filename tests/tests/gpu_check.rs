//! `scripts/gpu_check.sh` says in one line why it cannot start, and leaves no file. On the CPU target its operators are right.

use mpk_tests::job::{Turn, binary};
use std::path::{Path, PathBuf};
use std::process::Command;

fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/gpu_check.sh")
}

/// Runs it with a Python in which `import numpy` does what `numpy` says.
fn refused(numpy: &str, arguments: &[&str], words: &[&str]) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let temporary = tempfile::tempdir().expect("a temporary folder");
    std::fs::write(folder.path().join("numpy.py"), numpy).expect("a module");
    let mut command = Command::new(script());
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

/// Some of its cases. It passes options to mpk-run, which may have come to refuse one of them.
#[test]
fn operators_are_right_on_the_cpu_target() {
    let _turn = Turn::take();
    let packages = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.setup/clients");
    let packages = std::env::var_os("MPK_CLIENTS").map_or(packages, PathBuf::from);
    if !packages.join("numpy").is_dir() {
        let required = std::env::var_os("MPK_REQUIRE_CLIENTS").is_some_and(|value| value == "1");
        assert!(!required, "numpy is not installed, and MPK_REQUIRE_CLIENTS=1; scripts/setup.sh --clients");
        return eprintln!("skipped: numpy is not installed; scripts/setup.sh --clients installs it");
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut command = Command::new(script());
    command.args(["--backend", "cpu", "--gpus", "1", "--only", "operators", "--seed", "7", "--binary"]);
    command.arg(binary()).arg("--out").arg(folder.path()).env("MPK_CHECK_CASES", "allreduce|argmax");
    command.env("PYTHONPATH", packages).env("PYTHONDONTWRITEBYTECODE", "1").env_remove("MPK_PYTHON");
    for name in
        ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe"]
    {
        command.env(name, "1");
    }
    let output = command.output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    // Sums of 2 and 4 ranks, and the largest of 1, 2 and 4.
    assert_eq!(text.matches("ok operator.").count(), 5, "{text}");
}
