//! Proves that runs and `mpk-run doctor` find what a machine has, and name what it lacks (exit status 3).

use super::{FAKE, job, two};
use mpk_tests::{Job, ModelFile};

/// If the machine lacks something, the run ends with status 3 and names the fix; `auto` does not switch to the CPU silently.
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

#[test]
fn the_doctor_names_what_is_there_and_what_is_missing() {
    let model = ModelFile::of_fixture("mistral");
    let doctor = || FAKE.around(Job::alone().arg("doctor"));
    let finished = doctor().arg(model.path()).run().expect(0);
    for word in
        ["supports CUDA up to 13.0", "NVIDIA H200", "nvcc 13.0", "rank 0 on GPU 0", "memory for the model"]
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

/// A program that was copied from where it was built finds NVSHMEM in a virtual environment.
#[test]
fn nvshmem_that_pip_installed_is_found() {
    let copy = FAKE.path("mpk-run");
    std::fs::copy(mpk_tests::job::binary(), &copy).expect("a copy of mpk-run");
    let copy: &str = copy.display().to_string().leak();
    let doctor = |environment: &str| {
        let environment = FAKE.path(environment).display().to_string();
        let job = FAKE.around(Job::alone().of(copy).args(["doctor", "--ranks", "2"]));
        job.env("NVSHMEM_HOME", "").env("VIRTUAL_ENV", &environment).run().expect(0)
    };
    let packages = FAKE.path("environment/lib/python3.12/site-packages/nvidia");
    std::fs::create_dir_all(&packages).expect("a folder");
    std::os::unix::fs::symlink(FAKE.path("nvshmem"), packages.join("nvshmem")).expect("a link");
    let lines = |text: &str| -> Vec<String> {
        let lines = text.lines().filter(|line| line.starts_with("NVSHMEM h"));
        lines.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
    };
    if lines(&doctor("none").stdout).iter().any(|line| line.contains(" ok ")) {
        eprintln!("skipped: this machine has an NVSHMEM in another place that is searched");
        return;
    }
    let finished = doctor("environment");
    let place = packages.join("nvshmem");
    assert_eq!(
        lines(&finished.stdout),
        [
            format!("NVSHMEM headers, device library ok 3.4.5 ({})", place.join("include").display()),
            format!("NVSHMEM host library ok 3.4.5 ({})", place.join("lib/libnvshmem_host.so.3").display()),
        ],
        "{}",
        finished.stdout
    );
}
