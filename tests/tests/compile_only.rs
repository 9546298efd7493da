//! Proves that a model's kernel compiles for every architecture of the hardware table without a GPU, and that
//! nothing is compiled the second time. Without CUDA's compiler the tests say so and pass. With
//! `MPK_REQUIRE_CUDA=1`, which `scripts/test.sh` sets after it has installed one, they fail. One test compiles as users do. The others
//! are about the sources' choices for an architecture or a transport, and leave most optimizations out.

use mpk_tests::fixtures::Fixture;
use mpk_tests::toolkit::{make_quick, nvcc};
use mpk_tests::{Job, ModelFile};
use std::path::{Path, PathBuf};
use std::time::Duration;

fn cubins(cache: &Path) -> Vec<PathBuf> {
    let folder = std::fs::read_dir(cache.join("kernels")).expect("the cache");
    let files = folder.map(|entry| entry.expect("an entry").path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "cubin")).collect()
}

/// Few graph classes, so few kernel variants.
fn small() -> ModelFile {
    Fixture::open("tiny").model().set("max_batch", 1)
}

fn compiles_quickly(architecture: &str, arguments: &[&str]) {
    compiles_with(architecture, arguments, true);
}

fn compiles(architecture: &str, arguments: &[&str]) {
    compiles_with(architecture, arguments, false);
}

fn compiles_with(architecture: &str, arguments: &[&str], quick: bool) {
    let Some(nvcc) = nvcc() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (cache, model) = (folder.path().join("cache"), small());
    let mut job = Job::alone()
        .arg(model.path())
        .args(arguments)
        .arg("--compile-only")
        .env("MPK_CACHE_DIR", &cache.to_string_lossy())
        .timeout(Duration::from_secs(280));
    if quick {
        make_quick(folder.path(), &nvcc);
        job = job.env("CUDA_HOME", &folder.path().to_string_lossy());
    }
    let first = job.run_beside_others().expect(0);
    assert!(first.stdout.contains(architecture), "{}", first.stdout);
    let [file] = &cubins(&cache)[..] else { panic!("{:?}", cubins(&cache)) };
    assert!(std::fs::read(file).expect("a cubin").starts_with(b"\x7fELF"));
    let modified = || file.metadata().and_then(|metadata| metadata.modified()).expect("a time");
    let before = modified();
    job.run_beside_others().expect(0);
    assert_eq!(modified(), before, "the second run compiled again");
}

#[test]
fn ampere_one_rank() {
    compiles_quickly("sm_80", &["--device", "a100", "--ranks", "1"]);
}

#[test]
fn hopper_two_ranks_one_shot() {
    compiles("sm_90a", &["--device", "h200", "--ranks", "2", "--allreduce", "one-shot"]);
}

/// Linked to NVSHMEM's device library.
#[test]
fn hopper_two_ranks_through_nvshmem() {
    compiles_quickly("sm_90a", &["--device", "h200", "--ranks", "2", "--transport", "nvshmem"]);
}

/// Puts through the hosts.
#[test]
fn hopper_two_ranks_by_their_hosts() {
    compiles_quickly("sm_90a", &["--device", "h200", "--ranks", "2", "--transport", "host"]);
}

#[test]
fn blackwell_two_ranks_dynamic_copies() {
    compiles_quickly(
        "sm_100a",
        &["--device", "b200", "--ranks", "2", "--allreduce", "copy-reduce", "--placement", "dynamic"],
    );
}
