//! With the real nvcc: what compiles without a GPU.
//!
//! Without a toolchain the tests say so and pass. With `MPK_REQUIRE_CUDA=1`, which `scripts/test.sh` sets after it
//! has installed one, they fail. Whole models are compiled by the tests of `mpk-run --compile-only`.

use kernels_cu::gpu::{Architecture, Cache, CompileOptions, Expression, Toolchain, collective_shim, compile};

/// Whether there is a toolchain.
fn toolchain() -> bool {
    match Toolchain::find(Architecture::Sm90a, true, &[]) {
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
    let made = compile(&[], &options, &[], &cache).unwrap();
    assert!(made.bytes.starts_with(b"\x7fELF") && !made.from_cache);
    let name = kernels_cu::gpu::KERNEL.as_bytes();
    assert!(made.bytes.windows(name.len()).any(|window| window == name));
    println!("{:?}\n{}", made.took, made.log);
    let again = compile(&[], &options, &[], &cache).unwrap();
    assert!(again.from_cache && again.bytes == made.bytes);
    println!("from the cache: {:?}", again.took);

    let unknown = Expression { task_type: "no_such_task".to_string(), code: "int".to_string() };
    let text = compile(&[unknown], &options, &[], &cache).unwrap_err().to_string();
    assert!(text.contains("tasks/no_such_task/gpu.cuh") && text.contains("compute_80"), "{text}");
}

/// Checks conditions for the tensor cores' speed that do not affect any result. The assembler says if it serialises
/// products or ignores the division of registers; the listing shows if the loop over k touches memory for its sums. The
/// assembler decides for the kernel as a whole. So the test compiles all kernel variants of a model: Qwen3-8B on one
/// rank, with graphs for batches of up to 128.
#[test]
fn wide_products_run_on_the_tensor_cores_without_pauses() {
    if !toolchain() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let linear = "mpk::gpu::Linear<MPK_BF16, mpk::gpu";
    let rows = "mpk::gpu::WideRows<mpk::gpu";
    let codes: Vec<Expression> = [
        ("add", "mpk::gpu::Add<MPK_F32>".to_string()),
        ("add", "mpk::gpu::Add<MPK_F32, 4>".to_string()),
        ("argmax_partial", "mpk::gpu::ArgmaxPartial<1>".to_string()),
        ("argmax_reduce", "mpk::gpu::ArgmaxReduce<1, 0>".to_string()),
        ("attention", "mpk::gpu::Attention<MPK_BF16, 128, 64, true, false, true, 2>".to_string()),
        ("attention", "mpk::gpu::Attention<MPK_BF16, 128, 64, true, false, true>".to_string()),
        ("attention", "mpk::gpu::Attention<MPK_BF16, 128, 64, true, true, true>".to_string()),
        ("attention_append", "mpk::gpu::AttentionAppend<MPK_BF16, 128, 64, true>".to_string()),
        ("attention_merge", "mpk::gpu::AttentionMerge<MPK_BF16, 128>".to_string()),
        ("attention_prefill", "mpk::gpu::AttentionPrefill<MPK_BF16, 128, 64>".to_string()),
        ("attention_prefill_merge", "mpk::gpu::AttentionPrefillMerge<MPK_BF16, 128>".to_string()),
        ("embedding", "mpk::gpu::Embedding<MPK_BF16, MPK_F32>".to_string()),
        ("linear_with_residual", format!("{linear}::kPlain, 0, 1, MPK_BF16, MPK_F32>")),
        ("reduce", "mpk::gpu::ReducePushedRows<2, true, MPK_BF16, MPK_BF16, 4, 16>".to_string()),
        ("reduce", "mpk::gpu::ReduceRows<2, true, MPK_F32, MPK_BF16, MPK_BF16, 4, 16>".to_string()),
        ("rmsnorm_linear", format!("{linear}::kRmsNorm, 4096, 1, MPK_F32, MPK_BF16>")),
        ("wide_linear", "mpk::gpu::WideBroad<MPK_BF16>".to_string()),
        ("wide_linear", "mpk::gpu::WideLinear<MPK_BF16, 1, 128>".to_string()),
        ("wide_linear", "mpk::gpu::WideLinear<MPK_BF16, 2, 128>".to_string()),
        ("wide_linear", "mpk::gpu::WideNarrow<MPK_BF16, 16>".to_string()),
        ("wide_linear", "mpk::gpu::WideNarrow<MPK_BF16, 32>".to_string()),
        ("wide_linear", "mpk::gpu::WideTall<MPK_BF16, 16>".to_string()),
        ("wide_linear", "mpk::gpu::WideTall<MPK_BF16, 32>".to_string()),
        ("wide_linear", "mpk::gpu::WideTall<MPK_BF16, 64>".to_string()),
        ("wide_rows", format!("{rows}::kPlain, MPK_BF16, MPK_F32, MPK_BF16, 2, 16, false>")),
        ("wide_rows", format!("{rows}::kPlain, MPK_BF16, MPK_F32, MPK_BF16, 2>")),
        ("wide_rows", format!("{rows}::kRmsNorm, MPK_F32, MPK_BF16, MPK_BF16, 4, 16, false>")),
        ("wide_rows", format!("{rows}::kRmsNorm, MPK_F32, MPK_BF16, MPK_BF16, 4, 16, true>")),
        ("wide_rows", format!("{rows}::kRmsNorm, MPK_F32, MPK_BF16, MPK_BF16, 4>")),
    ]
    .into_iter()
    .map(|(task_type, code)| Expression { task_type: task_type.to_string(), code })
    .collect();
    let made =
        compile(&codes, &CompileOptions::new(Architecture::Sm90a, false), &[], &Cache::new(folder.path()))
            .unwrap();
    println!("{:?}\n{}", made.took, made.log);
    assert!(!made.log.contains("(C75"), "{}", made.log);

    // From the toolkit, which the set-up installs, or one in the path.
    let nvcc = Toolchain::find(Architecture::Sm90a, false, &[]).unwrap().nvcc.path;
    let cubin = folder.path().join("wide.cubin");
    std::fs::write(&cubin, &made.bytes).unwrap();
    let listing = [nvcc.with_file_name("nvdisasm"), "nvdisasm".into()]
        .iter()
        .find_map(|program| std::process::Command::new(program).arg("-c").arg(&cubin).output().ok());
    let Some(listing) = listing.filter(|output| output.status.success()) else {
        eprintln!("no nvdisasm here: the listing is not looked at");
        return;
    };
    let text = String::from_utf8_lossy(&listing.stdout);
    let lines: Vec<&str> = text.lines().collect();
    // Of 128 tokens: four blocks of a step, for two tiles of tokens and for one; and attention's values. Of 64: the loops for one, two and
    // three chains (`gpu/wide_broad.cuh`), with eight blocks each, and others.
    for (tokens, least) in [(128, 12), (64, 48)] {
        let name = format!("HGMMA.64x{tokens}x16.F32.BF16");
        let products: Vec<usize> = (0..lines.len()).filter(|&i| lines[i].contains(&name)).collect();
        assert!(products.len() >= least, "{} products of {tokens} tokens", products.len());
        // Products close to each other belong to one loop.
        for pair in products.windows(2).filter(|pair| pair[1] - pair[0] < 100) {
            let local =
                lines[pair[0]..pair[1]].iter().find(|line| line.contains("LDL") || line.contains("STL"));
            assert!(local.is_none(), "{local:?}");
        }
        // At most every third product ends a group. If ptxas pauses after each of them, each does.
        let groups = products.iter().filter(|&&i| lines[i].contains("gsb0")).count();
        assert!(
            groups * 3 <= products.len(),
            "{groups} of {} products of {tokens} tokens end a group",
            products.len()
        );
    }
}

#[test]
fn the_collective_launch_is_built_and_loads_its_symbol() {
    if !toolchain() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::new(folder.path());
    let shim = collective_shim(Architecture::Sm90a, &[], &cache).unwrap();
    let bytes = std::fs::read(&shim.path).unwrap();
    assert!(bytes.starts_with(b"\x7fELF"));
    let name = b"mpk_collective_launch";
    assert!(bytes.windows(name.len()).any(|window| window == name));
    assert_eq!(collective_shim(Architecture::Sm90a, &[], &cache).unwrap().path, shim.path);
}

/// The programs of the GPU checks, which scripts/gpu_check.sh builds on a machine with a GPU.
#[test]
fn the_programs_of_the_gpu_check_compile() {
    if !toolchain() {
        return;
    }
    let nvcc = Toolchain::find(Architecture::Sm90a, false, &[]).unwrap().nvcc.path;
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
