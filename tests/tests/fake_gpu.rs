//! Proves the host's side of the CUDA target without a GPU. A fake driver (`tests/fake_gpu/libcuda.cpp`) checks what
//! it is given, runs the kernels that pack weights on the host, and ends, hangs or fails as asked. Also covers what
//! a machine may lack (exit status 3), and `mpk-run doctor`.

use mpk_tests::{Job, ModelFile};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::time::Duration;
use tempfile::TempDir;

/// The fake libraries, built once.
static FAKE: LazyLock<Fake> = LazyLock::new(Fake::build);

/// Begin of the folder's name. The process id follows.
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

/// The rows of all packed matrices, as the kernel would find them.
fn dumped(model: &ModelFile, name: &str, arguments: &[&str]) -> Vec<Vec<f32>> {
    let dump = FAKE.path(name);
    let found = job(model).args(arguments).env("FAKE_GPU_DUMP", &dump.display().to_string()).run_json();
    assert_eq!((&found.backend[..], found.requests[0].tokens.len()), ("cuda", 4));
    let text = fs::read_to_string(&dump).expect("the dump");
    let row = |line: &str| line.split_whitespace().map(|v| v.parse().expect("a number")).collect();
    text.lines().map(row).collect()
}

/// Whether `all` contains `rows`, one after the other.
fn holds(all: &[Vec<f32>], rows: &[Vec<f32>]) -> bool {
    all.windows(rows.len()).any(|window| window == rows)
}

/// An IEEE half-precision number.
fn half(bits: u16) -> f32 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f32::from(bits & 1023));
    let size = match exponent {
        0 => fraction * 2f32.powi(-24),
        _ => (1024.0 + fraction) * 2f32.powi(exponent - 25),
    };
    if bits >> 15 == 1 { -size } else { size }
}

/// All matrices of a safetensors file, by name, as rows of f32.
fn matrices(path: &Path) -> Vec<(String, Vec<Vec<f32>>)> {
    let bytes = fs::read(path).expect("the checkpoint");
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).expect("the header");
    let mut all = Vec::new();
    for (name, entry) in header.as_object().expect("an object") {
        let Some(shape) = entry["shape"].as_array().filter(|shape| shape.len() == 2) else { continue };
        let columns = shape[1].as_u64().expect("a number") as usize;
        let offset = |i: usize| 8 + length + entry["data_offsets"][i].as_u64().expect("a number") as usize;
        let data = &bytes[offset(0)..offset(1)];
        let values: Vec<f32> = match entry["dtype"].as_str() {
            Some("F32") => data.chunks(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            Some("BF16") => data
                .chunks(2)
                .map(|b| f32::from_bits(u32::from(b[1]) << 24 | u32::from(b[0]) << 16))
                .collect(),
            Some("F16") => data.chunks(2).map(|b| half(u16::from_le_bytes([b[0], b[1]]))).collect(),
            other => panic!("{name} has type {other:?}"),
        };
        all.push((name.clone(), values.chunks(columns).map(<[f32]>::to_vec).collect()));
    }
    all
}

/// Every matrix of the checkpoint is where the tasks' operands say, in the layout of the tensor cores.
#[test]
fn weights_lie_where_the_kernel_reads_them() {
    for fixture in ["qwen3", "qwen2", "mistral"] {
        let model = ModelFile::of_fixture(fixture);
        let all = dumped(&model, fixture, &[]);
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(fixture);
        let mut checked = 0;
        for entry in fs::read_dir(folder).expect("the fixture").flatten() {
            if entry.path().extension().is_some_and(|e| e == "safetensors") {
                for (name, rows) in matrices(&entry.path()) {
                    assert!(holds(&all, &rows), "{fixture}: {name}");
                    checked += 1;
                }
            }
        }
        assert!(checked > 5, "{fixture}: {checked} matrices");
    }
}

/// The formula of launch/src/model/random_weights.rs, written a second time.
fn random(seed: u64, name: &str, i: u64) -> f32 {
    let mix64 = |mut x: u64| {
        x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ x >> 31
    };
    let mut key = 0xCBF2_9CE4_8422_2325u64;
    for byte in name.bytes() {
        key = (key ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3);
    }
    key = mix64(key ^ mix64(seed.wrapping_add(0x9E37_79B9_7F4A_7C15)));
    let mut h = i as u32 ^ key as u32;
    h = (h ^ h >> 16).wrapping_mul(0x7FEB_352D);
    h = (h ^ h >> 15).wrapping_mul(0x846C_A68B);
    h = h ^ h >> 16 ^ (key >> 32) as u32 ^ (i >> 32) as u32;
    h = h.wrapping_mul(0x9E37_79B1);
    h ^= h >> 15;
    (0..4).map(|byte| (h >> (8 * byte) & 127) as i32).sum::<i32>().wrapping_sub(254) as f32 / 4096.0
}

#[test]
fn random_weights_are_filled_on_the_device() {
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 40, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 52,
        "vocab_size": 61, "tie_word_embeddings": false, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "max_position_embeddings": 512, "torch_dtype": "bfloat16", "hidden_act": "silu"
    });
    let model = ModelFile::random(config, 5);
    let all = dumped(&model, "random", &["--ignore-eos"]);
    for (name, rows, columns) in [
        ("lm_head.weight", 61, 40),
        ("model.layers.0.mlp.down_proj.weight", 40, 52),
        ("model.layers.0.self_attn.k_proj.weight", 32, 40),
    ] {
        let row = |r: u64| (0..columns).map(|c| random(5, name, r * columns + c)).collect();
        assert!(holds(&all, &(0..rows).map(row).collect::<Vec<Vec<f32>>>()), "{name}");
    }
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
    assert!(finished.stderr.contains("rank 1 did not go on in `NVSHMEM's start`"), "{}", finished.stderr);
    assert!(finished.stderr.contains("stopped"), "{}", finished.stderr);
}

/// With NVSHMEM_DEBUG NVSHMEM prints to standard output.
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

/// What the machine lacks gives status 3 and the fix; `auto` does not switch to the CPU silently.
#[test]
fn what_the_machine_lacks_is_named_with_its_fix() {
    let model = ModelFile::of_fixture("mistral");
    for (variable, value, words) in [
        ("FAKE_GPU_DRIVER", "11080", &["CUDA 11.8", "CUDA 12.0", "--backend cpu"][..]),
        ("FAKE_GPU_DRIVER", "12080", &["CUDA 12.8", "CUDA 13.0", "newer driver"]),
        ("FAKE_GPU_CAPABILITY", "70", &["compute capability 7.0", "CUDA_VISIBLE_DEVICES"]),
        (
            "FAKE_GPU_MEMORY",
            "1000000",
            &["needed", "weights", "key-value cache", "activations", "symmetric heap"],
        ),
        ("FAKE_GPU_REFUSES", "1", &["CUDA_ERROR_NO_BINARY_FOR_GPU", "doctor"]),
        ("FAKE_GPU_OCCUPANCY", "0", &["at the same time", "--workers"]),
        ("FAKE_GPU_SHARED", "49152", &["shared memory"]),
    ] {
        for backend in ["auto", "cuda"] {
            let finished = job(&model).args(["--backend", backend]).env(variable, value).run().expect(3);
            for word in words {
                assert!(finished.stderr.contains(word), "{variable}={value}: {}", finished.stderr);
            }
        }
    }
    // Found before NVSHMEM is started.
    let finished = two(&model, "nvshmem").env("FAKE_GPU_DRIVER", "12080").run().expect(3);
    assert!(finished.stderr.contains("CUDA 13.0 is needed"), "{}", finished.stderr);
    assert!(!finished.stderr.contains("symmetric heap of"), "{}", finished.stderr);
    // No GPU at all: it uses the CPU and says so, unless a GPU is asked for.
    let none = job(&model).env("FAKE_GPU_COUNT", "0");
    let finished = none.clone().run().expect(0);
    assert!(finished.stderr.contains("backend cpu (no GPU"), "{}", finished.stderr);
    none.args(["--backend", "cuda"]).run().expect(3);
    // Several ranks need NVSHMEM.
    let finished = two(&model, "none").run().expect(3);
    assert!(finished.stderr.contains("NVSHMEM") && finished.stderr.contains("scripts/setup.sh"));
    // More workers than SMs.
    let finished = job(&model).args(["--workers", "200"]).run().expect(2);
    assert!(finished.stderr.contains("multiprocessors"), "{}", finished.stderr);
}

/// A library with the driver's name but without its functions.
#[test]
fn a_driver_without_functions_does_not_panic() {
    let model = ModelFile::of_fixture("mistral");
    let hidden = FAKE.libraries("hidden");
    for run in [job(&model), two(&model, "nvshmem")] {
        let finished = run.env("LD_LIBRARY_PATH", &hidden).run().expect(3);
        assert!(finished.stderr.contains("cuDriverGetVersion"), "{}", finished.stderr);
    }
    let doctor = FAKE.around(Job::alone().arg("doctor")).env("LD_LIBRARY_PATH", &hidden);
    let finished = doctor.run().expect(0);
    assert!(finished.stdout.contains("cuDriverGetVersion"), "{}", finished.stdout);
    doctor.args(["--backend", "cuda"]).run().expect(3);
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

#[test]
fn the_doctor_names_what_is_there_and_what_is_missing() {
    let model = ModelFile::of_fixture("mistral");
    let doctor = || FAKE.around(Job::alone().arg("doctor"));
    let finished = doctor().arg(model.path()).run().expect(0);
    for word in
        ["serves CUDA up to 13.0", "NVIDIA H200", "nvcc 13.0", "rank 0 on GPU 0", "memory for the model"]
    {
        assert!(finished.stdout.contains(word), "{word}: {}", finished.stdout);
    }
    let lines = finished.stdout.lines().count();
    assert!(lines >= 10, "{}", finished.stdout);
    doctor().args(["--backend", "cuda"]).run().expect(0);
    let finished = doctor().args(["--ranks", "2", "--backend", "cuda"]).run().expect(0);
    assert!(finished.stdout.contains("share a GPU"), "{}", finished.stdout);
    // Without NVSHMEM, two ranks run on the CPU.
    let none = FAKE.path("none").display().to_string();
    let doctor_of_two = || doctor().args(["--ranks", "2"]).env("NVSHMEM_HOME", &none);
    doctor_of_two().run().expect(0);
    let finished = doctor_of_two().args(["--backend", "cuda"]).run().expect(3);
    assert!(finished.stdout.contains("MISSING") && finished.stdout.contains("scripts/setup.sh --nvshmem"));
    // The doctor is useful without a GPU, too.
    let finished = doctor().env("FAKE_GPU_COUNT", "0").run().expect(0);
    assert!(finished.stdout.contains("on the CPU") && finished.stdout.contains("finds no GPU"));
    doctor().env("FAKE_GPU_COUNT", "0").args(["--backend", "cuda"]).run().expect(3);
    doctor().arg("/no/such/model.json").run().expect(2);
    Job::alone().args(["doctor", "--no-such-option"]).run().expect(2);
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
