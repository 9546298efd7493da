//! With the real nvcc: what is compiled where there is no GPU.
//!
//! Without a toolchain the tests say so and pass; with `MPK_REQUIRE_CUDA=1`, which `scripts/test.sh` sets after it
//! has installed one, they fail. Whole models are compiled by the tests of `mpk-run --compile-only`.

use kernels_cu::gpu::{Architecture, Cache, CompileOptions, Expression, Toolchain, collective_shim, compile};

/// Whether there is a toolchain.
fn toolchain() -> bool {
    match Toolchain::find(Architecture::Sm90a, true) {
        Ok(_) => true,
        Err(error) => {
            assert!(std::env::var_os("MPK_REQUIRE_CUDA").is_none(), "MPK_REQUIRE_CUDA is set, but {error}");
            eprintln!("skipped: {error}");
            false
        }
    }
}

#[test]
fn the_kernel_compiles_without_tasks_and_errors_come_with_the_compilers_words() {
    if !toolchain() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::new(folder.path());
    let options = CompileOptions::new(Architecture::Sm80, false);
    let made = compile(&[], &options, &cache).unwrap();
    assert!(made.bytes.starts_with(b"\x7fELF") && !made.from_cache);
    let name = kernels_cu::gpu::KERNEL.as_bytes();
    assert!(made.bytes.windows(name.len()).any(|window| window == name));
    println!("{:?}\n{}", made.took, made.log);
    let again = compile(&[], &options, &cache).unwrap();
    assert!(again.from_cache && again.bytes == made.bytes);
    println!("from the cache: {:?}", again.took);

    let unknown = Expression { task_type: "no_such_task".to_string(), code: "int".to_string() };
    let text = compile(&[unknown], &options, &cache).unwrap_err().to_string();
    assert!(text.contains("tasks/no_such_task/gpu.cuh") && text.contains("compute_80"), "{text}");
}

#[test]
fn the_collective_launch_is_built_and_loads_its_symbol() {
    if !toolchain() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::new(folder.path());
    let shim = collective_shim(Architecture::Sm90a, &cache).unwrap();
    let bytes = std::fs::read(&shim.path).unwrap();
    assert!(bytes.starts_with(b"\x7fELF"));
    let name = b"mpk_collective_launch";
    assert!(bytes.windows(name.len()).any(|window| window == name));
    assert_eq!(collective_shim(Architecture::Sm90a, &cache).unwrap().path, shim.path);
}

/// The GPU checks' programs that scripts/gpu_check.sh builds on a machine with a GPU.
#[test]
fn the_programs_of_the_gpu_check_compile() {
    if !toolchain() {
        return;
    }
    let nvcc = Toolchain::find(Architecture::Sm90a, false).unwrap().nvcc.path;
    let own = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    for program in ["litmus", "stream_read"] {
        let finished = std::process::Command::new(&nvcc)
            .args(["-cubin", "-std=c++17", "-arch=sm_90", "-Iinclude", "-Iprotocol", "-o"])
            .arg(folder.path().join(program))
            .arg(format!("../scripts/gpu/{program}.cu"))
            .current_dir(own)
            .output()
            .unwrap();
        assert!(finished.status.success(), "{program}: {}", String::from_utf8_lossy(&finished.stderr));
    }
}
