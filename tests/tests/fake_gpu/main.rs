//! Proves the host's side of the CUDA target without a GPU. A fake driver (`tests/fake_gpu/libcuda.cpp`) checks what
//! it is given, runs the kernels that pack weights on the host, and ends, hangs or fails as asked.

mod machine;
mod weights;

use mpk_tests::{Job, ModelFile};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::time::Duration;
use tempfile::TempDir;

/// The fake libraries, built once.
static FAKE: LazyLock<Fake> = LazyLock::new(Fake::build);

/// Start of the folder's name. The process id follows.
const PREFIX: &str = "mpk-gpu-";

struct Fake {
    folder: TempDir,
}

/// Removes the folders of tests that have ended: Rust does not drop what is static, and a killed test cannot.
fn remove_leftovers() {
    for entry in fs::read_dir(std::env::temp_dir()).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let process = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
        if process.is_some_and(|process| !Path::new(&format!("/proc/{process}")).exists()) {
            // Another test may do the same at the same time.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

impl Fake {
    fn build() -> Self {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("fake_gpu");
        remove_leftovers();
        let prefix = format!("{PREFIX}{}-", std::process::id());
        let folder = tempfile::Builder::new().prefix(&prefix).tempdir().expect("a temporary folder");
        let path = |name: &str| folder.path().join(name);
        let headers = ["nvshmem/include/non_abi", "exporting/include/non_abi"];
        for name in
            ["lib", "hidden", "cuda/bin", "none", "nvshmem/lib", "exporting/lib"].iter().chain(&headers)
        {
            fs::create_dir_all(path(name)).expect("a folder");
        }
        fs::copy(sources.join("nvcc"), path("cuda/bin/nvcc")).expect("a copy of nvcc's stand-in");
        let compile = |source: &str, target: &str, more: &[&str]| {
            let status = Command::new("c++")
                .args(["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o"])
                .arg(path(target))
                .arg("-I")
                .arg(&sources)
                .arg("-I")
                .arg(sources.join("../../kernels-cu/include"))
                .arg(sources.join(source))
                .args(more)
                .status();
            assert!(status.is_ok_and(|s| s.success()), "{source} could not be compiled");
        };
        compile("libcuda.cpp", "lib/libcuda.so", &[]);
        compile("libcuda.cpp", "hidden/libcuda.so", &["-fvisibility=hidden"]);
        compile("libnvshmem_host.cpp", "nvshmem/lib/libnvshmem_host.so.3", &["-ldl"]);
        compile("libnvshmem_host.cpp", "exporting/lib/libnvshmem_host.so.3", &["-DEXPORT_LAUNCH", "-ldl"]);
        let numbers = [("MAJOR", 3), ("MINOR", 4), ("PATCH", 5)];
        let header: String =
            numbers.iter().map(|(name, n)| format!("#define NVSHMEM_VENDOR_{name}_VERSION {n}\n")).collect();
        for folder in ["nvshmem", "exporting"] {
            fs::write(path(folder).join("include/non_abi/nvshmem_version.h"), &header).expect("a header");
            fs::write(path(folder).join("lib/libnvshmem_device.a"), "").expect("a library");
        }
        Fake { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// LD_LIBRARY_PATH with this folder first.
    fn libraries(&self, folder: &str) -> String {
        let folder = self.path(folder).display().to_string();
        std::env::var("LD_LIBRARY_PATH").map_or(folder.clone(), |others| format!("{folder}:{others}"))
    }

    /// The job with the fakes in place of driver, toolkit and NVSHMEM.
    fn around(&self, job: Job) -> Job {
        let text = |name: &str| self.path(name).display().to_string();
        job.env("LD_LIBRARY_PATH", &self.libraries("lib"))
            .env("CUDA_HOME", &text("cuda"))
            .env("NVSHMEM_HOME", &text("nvshmem"))
            .env("MPK_CACHE_DIR", &text("cache"))
    }
}

fn job(model: &ModelFile) -> Job {
    let job = Job::new(1).arg(model.path()).args(["--prompt-tokens", "1,2,3", "--max-new-tokens", "4"]);
    FAKE.around(job)
}

#[test]
fn both_placements_and_traces_run() {
    let model = ModelFile::of_fixture("mistral");
    for placement in ["static", "dynamic"] {
        let trace = FAKE.path(placement);
        let run = job(&model).args(["--backend", "cuda", "--placement", placement, "--logprobs", "3"]);
        let found = run.arg("--trace").arg(&trace).run_json();
        assert_eq!((&found.backend[..], &found.requests[0].tokens[..]), ("cuda", &[1, 2, 3, 4][..]));
        assert!(trace.is_file());
        let timing = &found.timing;
        assert!(timing.compile_s.is_some() && timing.weights_s.is_some(), "{timing:?}");
        assert!(timing.weights_bytes.is_some_and(|bytes| bytes > 10_000), "{timing:?}");
    }
    // If asked for, the CPU is used although there is a GPU.
    assert_eq!(job(&model).args(["--backend", "cpu"]).run_json().backend, "cpu");
}

/// Two ranks on the fakes, with NVSHMEM in this folder.
fn two(model: &ModelFile, nvshmem: &str) -> Job {
    let job = Job::new(2).arg(model.path()).args(["--prompt-tokens", "1,2,3", "--max-new-tokens", "4"]);
    let home = FAKE.path(nvshmem).display().to_string();
    FAKE.around(job).env("NVSHMEM_HOME", &home).env("FAKE_NVSHMEM_PEERS", "1")
}

/// Several ranks: heap and launch through NVSHMEM, with either bootstrap, with and without peers within reach.
#[test]
fn several_ranks_come_up_through_nvshmem() {
    let model = ModelFile::of_fixture("mistral");
    for (nvshmem, arguments, peers, launch) in [
        (
            "nvshmem",
            &["--placement", "static", "--transport", "nvshmem"][..],
            "0",
            "cuLaunchCooperativeKernel",
        ),
        ("nvshmem", &["--bootstrap", "mpi", "--placement", "dynamic"], "1", "cuLaunchCooperativeKernel"),
        ("exporting", &["--transport", "p2p", "--allreduce", "copy-reduce"], "1", "NVSHMEM's host library"),
        ("exporting", &["--transport", "nvshmem", "--allreduce", "two-shot"], "1", "NVSHMEM's host library"),
        ("exporting", &["--launch", "cooperative"], "1", "cuLaunchCooperativeKernel"),
    ] {
        let job =
            two(&model, nvshmem).args(arguments).env("FAKE_NVSHMEM_PEERS", peers).env("FAKE_GPU_COUNT", "2");
        let finished = job.arg("--json").run().expect(0).expect_nothing_left();
        let said =
            finished.stderr.lines().find(|line| line.contains("launch by")).expect("how it is launched");
        assert!(said.contains(launch), "{said}");
        let found = finished.json();
        assert_eq!(
            (&found.backend[..], found.tp, &found.requests[0].tokens[..]),
            ("cuda", 2, &[1, 2, 3, 4][..])
        );
    }
    // If the collective launch fails on all ranks, another launch replaces it.
    let job = two(&model, "exporting").env("FAKE_GPU_COUNT", "2").env("FAKE_NVSHMEM_LAUNCH_FAILS", "1");
    let finished = job.run().expect(0);
    assert!(finished.stderr.contains("launching by cuLaunchCooperativeKernel"), "{}", finished.stderr);
    // Ranks that see different GPUs agree on one kernel: the one that needs no access to the others' memory.
    let job = two(&model, "exporting").env("FAKE_GPU_COUNT", "2").env("FAKE_GPU_RANK_1_SEES_ONE", "1");
    job.run().expect(0);
    // On one GPU it works too, with a warning.
    let finished = two(&model, "exporting").run().expect(0);
    assert!(finished.stderr.contains("2 ranks share GPU 0"), "{}", finished.stderr);
    assert!(finished.stderr.contains("cuLaunchCooperativeKernel"), "{}", finished.stderr);
}

/// NVSHMEM waits forever if one GPU has more ranks than another, so such ranks are refused before it starts.
#[test]
fn ranks_that_do_not_fill_their_gpus_evenly_are_refused() {
    let model = ModelFile::of_fixture("mistral");
    for (ranks, gpus, words) in [
        (4, "3", "4 ranks share 3 GPUs unevenly (2, 1, 1 ranks on them)"),
        (8, "6", "use 1, 2, 3, 4, 5, 6, or 12, 18, 24 ... ranks"),
    ] {
        let job = Job::new(ranks).arg(model.path()).args(["--prompt-tokens", "1,2", "--max-new-tokens", "2"]);
        let home = FAKE.path("nvshmem").display().to_string();
        let job = FAKE.around(job).env("NVSHMEM_HOME", &home).env("FAKE_GPU_COUNT", gpus);
        let finished = job.run().expect(3).expect_nothing_left();
        assert!(finished.stderr.contains(words), "{}", finished.stderr);
    }
}

/// A start of NVSHMEM that one rank does not reach, or that never ends.
#[test]
fn a_start_of_nvshmem_that_does_not_end_is_ended() {
    let model = ModelFile::of_fixture("mistral");
    let job = two(&model, "nvshmem").env("FAKE_NVSHMEM_STOPS", "1").args(["--deadline", "1"]);
    let finished = job.run().expect(4).expect_nothing_left();
    assert!(finished.stderr.contains("rank 1 did not continue in `NVSHMEM's start`"), "{}", finished.stderr);
    assert!(finished.stderr.contains("stopped"), "{}", finished.stderr);
}

/// With NVSHMEM_DEBUG set, NVSHMEM prints to standard output.
#[test]
fn stdout_has_only_the_results() {
    let model = ModelFile::of_fixture("mistral");
    let finished = two(&model, "nvshmem").env("NVSHMEM_DEBUG", "INFO").arg("--json").run().expect(0);
    for rank in 0..2 {
        assert!(finished.stderr.contains(&format!("NVSHMEM INFO of PE {rank}")), "{}", finished.stderr);
    }
    assert_eq!(finished.json().tp, 2);
    let finished = two(&model, "nvshmem").env("NVSHMEM_DEBUG", "INFO").run().expect(0);
    assert_eq!(finished.stdout, "1 2 3 4 \n");
    // A run that fails prints nothing.
    let finished = two(&model, "nvshmem").env("NVSHMEM_DEBUG", "INFO").env("FAKE_GPU_OCCUPANCY", "0").run();
    assert_eq!(finished.expect(3).stdout, "");
}

/// If the node's first rank fails to build it, the others do not try.
#[test]
fn a_shim_that_cant_be_built_is_tried_once() {
    let model = ModelFile::of_fixture("mistral");
    let log = FAKE.path("shared libraries");
    let job = two(&model, "nvshmem")
        .env("FAKE_GPU_COUNT", "2")
        .env("MPK_CACHE_DIR", &FAKE.path("no-shim").display().to_string())
        .env("FAKE_NVCC_LOG", &log.display().to_string());
    let finished = job.run().expect(0);
    assert!(finished.stderr.contains("launch by cuLaunchCooperativeKernel"), "{}", finished.stderr);
    assert_eq!(fs::read_to_string(&log).expect("a log").lines().count(), 1);
}

/// Errors of NVSHMEM end all ranks with status 3, even if only one rank has found them.
#[test]
fn errors_of_nvshmem_are_named() {
    let model = ModelFile::of_fixture("mistral");
    for (variable, value, arguments, words) in [
        ("FAKE_NVSHMEM_VERSION", "3.6.1", &[][..], &["3.6.1", "3.4.5", "NVSHMEM_HOME"][..]),
        ("FAKE_NVSHMEM_VERSION", "3.3.9", &[], &["3.3.9", "3.4.0"]),
        ("NVSHMEM_SYMMETRIC_SIZE", "1K", &[], &["NVSHMEM_SYMMETRIC_SIZE=1K", "unset"]),
        ("NVSHMEM_SYMMETRIC_SIZE", "-5", &[], &["NVSHMEM_SYMMETRIC_SIZE=-5", "unset"]),
        ("FAKE_NVSHMEM_FAILS", "1", &[], &["rank 1", "failed with status 7"]),
        ("FAKE_NVSHMEM_VERSION", "3.6.1", &["--transport", "nvshmem"], &["3.6.1", "3.4.5", "NVSHMEM_HOME"]),
        ("FAKE_NVSHMEM_PEERS", "0", &[], &["by stores", "--transport nvshmem"]),
        ("FAKE_NVSHMEM_PEERS", "0", &["--transport", "p2p"], &["by stores", "--transport nvshmem"]),
        ("FAKE_GPU_MEMORY", "600000000", &[], &["by each of 2 ranks", "symmetric heap"]),
    ] {
        let finished = two(&model, "nvshmem").args(arguments).env(variable, value).run().expect(3);
        for word in words {
            assert!(finished.stderr.contains(word), "{variable}={value}: {}", finished.stderr);
        }
        let errors = finished.stderr.matches("mpk-run: error").count();
        assert_eq!(errors, 1, "one rank tells: {}", finished.stderr);
    }
}

/// A kernel that hangs, never ends or fails gives an error with a report, soon after the deadline.
#[test]
fn kernels_that_do_not_end_well_are_reported() {
    let model = ModelFile::of_fixture("mistral");
    for (mode, words) in [
        ("hang", &["no progress within the deadline", "worker 0 waited for event 1 of rank 0"][..]),
        ("stuck", &["did not end within", "no progress within the deadline"]),
        ("fault", &["CUDA_ERROR_ILLEGAL_ADDRESS", "compute-sanitizer"]),
    ] {
        let run = job(&model).args(["--deadline", "0.5"]).env("FAKE_GPU", mode);
        let finished = run.timeout(Duration::from_secs(30)).run().expect(4).expect_nothing_left();
        for word in words {
            assert!(finished.stderr.contains(word), "{mode}: {}", finished.stderr);
        }
    }
}

#[test]
fn ctrl_c_ends_the_kernel() {
    let model = ModelFile::of_fixture("mistral");
    let mut running = job(&model).env("FAKE_GPU", "hang").timeout(Duration::from_secs(30)).start();
    std::thread::sleep(Duration::from_secs(2));
    assert!(running.is_running());
    running.signal(libc::SIGINT);
    let finished = running.wait().expect(4);
    assert!(finished.stderr.contains("interrupted"), "{}", finished.stderr);
}

/// A build for a device refuses what a run on it would refuse.
#[test]
fn builds_refuse_what_runs_refuse() {
    let model = ModelFile::of_fixture("mistral");
    let few = ["--placement", "dynamic", "--workers", "1"];
    let refused = |job: Job| {
        let finished = job.args(few).run().expect(2);
        assert!(finished.stderr.contains("2 workers at least"), "{}", finished.stderr);
    };
    refused(two(&model, "nvshmem"));
    for only in ["--check", "--compile-only"] {
        let build = Job::alone().arg(model.path()).args([only, "--device", "h200", "--ranks", "2"]);
        refused(FAKE.around(build));
    }
}

/// Without a GPU, the kernel variants of all ranks' graphs go into the cache once.
#[test]
fn compile_only_fills_the_cache() {
    let model = ModelFile::of_fixture("mistral").set("name", "compile only");
    let cache = FAKE.path("compile-only").display().to_string();
    let compile = FAKE
        .around(Job::alone().arg(model.path()).args(["--compile-only", "--device", "a100"]))
        .env("MPK_CACHE_DIR", &cache);
    let first = compile.run().expect(0);
    assert!(first.stdout.contains("compiled") && first.stdout.contains("sm_80"), "{}", first.stdout);
    let path = first.stdout.split(".cubin").next().expect("a path");
    assert!(Path::new(&format!("{path}.cubin")).is_file(), "{}", first.stdout);
    let again = compile.run().expect(0);
    assert!(again.stdout.contains("it was cached"), "{}", again.stdout);
}
