//! Makes `bindings.rs`: from NVSHMEM's headers where they and libclang are found, otherwise from the
//! checked-in output of the same generation, so that the crate builds on any machine.

use std::env;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

/// The functions that are bound. By name: a wildcard would bind functions that the headers declare but
/// the host library does not export.
const FUNCTIONS: &[&str] = &[
    // Life cycle.
    "nvshmemx_get_uniqueid",
    "nvshmemx_set_attr_uniqueid_args",
    "nvshmemx_set_attr_mpi_comm_args",
    "nvshmemx_hostlib_init_attr",
    "nvshmemx_hostlib_finalize",
    "nvshmemx_init_status",
    "nvshmem_query_thread",
    "nvshmem_global_exit",
    // Versions.
    "nvshmem_info_get_version",
    "nvshmem_info_get_name",
    "nvshmemx_vendor_get_version_info",
    // Processing elements and teams.
    "nvshmem_my_pe",
    "nvshmem_n_pes",
    "nvshmem_team_my_pe",
    "nvshmem_team_n_pes",
    "nvshmem_team_translate_pe",
    // Symmetric heap.
    "nvshmem_malloc",
    "nvshmem_calloc",
    "nvshmem_align",
    "nvshmem_free",
    "nvshmem_ptr",
    "nvshmemx_buffer_register",
    "nvshmemx_buffer_unregister",
    "nvshmemx_buffer_unregister_all",
    "nvshmemx_buffer_register_symmetric",
    "nvshmemx_buffer_unregister_symmetric",
    // Host-side ordering and transfers, for set-up and tests.
    "nvshmem_barrier_all",
    "nvshmem_sync_all",
    "nvshmem_quiet",
    "nvshmem_fence",
    "nvshmem_putmem",
    "nvshmem_getmem",
    "nvshmemx_barrier_all_on_stream",
    "nvshmemx_quiet_on_stream",
    // Device state of separately loaded code.
    "nvshmemx_cumodule_init",
    "nvshmemx_cumodule_finalize",
    "nvshmemx_culibrary_init",
    "nvshmemx_culibrary_finalize",
];

const TYPES: &[&str] = &[
    "nvshmemx_init_attr_t",
    "nvshmemx_init_args_t",
    "nvshmemx_uniqueid_t",
    "nvshmemx_uniqueid_args_t",
    "nvshmemx_init_status_t",
    "nvshmemx_status",
    "nvshmem_team_t",
    "nvshmem_team_id_t",
    "nvshmemi_thread_support",
    "flags",
];

const CONSTANTS: &[&str] = &[
    "NVSHMEM_VENDOR_MAJOR_VERSION",
    "NVSHMEM_VENDOR_MINOR_VERSION",
    "NVSHMEM_VENDOR_PATCH_VERSION",
    "NVSHMEM_MAJOR_VERSION",
    "NVSHMEM_MINOR_VERSION",
    "NVSHMEM_MAX_NAME_LEN",
    "NVSHMEM_SYS_INIT_ATTR_VERSION",
    "NVSHMEM_SYS_INIT_ARGS_VERSION",
    "NVSHMEM_SYS_UNIQUEID_ARGS_VERSION",
    "NVSHMEM_SYS_UNIQUEID_VERSION",
];

/// Where the headers lie.
struct Headers {
    nvshmem: PathBuf,
    cuda: PathBuf,
}

fn main() {
    if let Err(error) = run() {
        eprintln!("nvshmem-sys: {error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let manifest = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    let output = PathBuf::from(env::var("OUT_DIR")?).join("bindings.rs");
    let checked_in = manifest.join("bindings/nvshmem.rs");
    println!("cargo:rerun-if-changed=build.rs");
    // scripts/setup.sh touches this file when it has installed headers.
    println!("cargo:rerun-if-changed=wrapper.h");
    println!("cargo:rerun-if-changed=bindings/nvshmem.rs");
    for variable in [
        "NVSHMEM_HOME",
        "CUDA_HOME",
        "CUDA_PATH",
        "LIBCLANG_PATH",
        "LLVM_CONFIG_PATH",
        "BINDGEN_EXTRA_CLANG_ARGS",
    ] {
        println!("cargo:rerun-if-env-changed={variable}");
    }

    let headers = find_headers(&manifest);
    // Warns if the user named a folder or if the headers found cannot be used. A machine without headers gets no
    // warning.
    let expected = headers.is_ok() || env::var_os("NVSHMEM_HOME").is_some();
    let source = match headers.and_then(|headers| generate(&manifest, &headers)) {
        Ok(text) => {
            fs::write(&output, text)
                .map_err(|error| format!("cannot write {}: {error}", output.display()))?;
            "generated".to_owned()
        }
        Err(reason) => {
            let reason = reason.to_string().replace('\n', "; ");
            if expected {
                println!("cargo:warning=nvshmem-sys uses its checked-in bindings: {reason}");
            }
            fs::copy(&checked_in, &output)
                .map_err(|error| format!("cannot copy {}: {error}", checked_in.display()))?;
            format!("checked-in: {reason}")
        }
    };
    println!("cargo:rustc-env=NVSHMEM_SYS_BINDINGS={source}");
    Ok(())
}

/// Generates the bindings, or says what is missing.
fn generate(manifest: &Path, headers: &Headers) -> Result<String, Box<dyn Error>> {
    println!("cargo:rerun-if-changed={}", headers.nvshmem.display());
    println!("cargo:rerun-if-changed={}", headers.cuda.join("cuda_runtime.h").display());
    // bindgen panics if libclang is missing, so check first.
    clang_sys::load().map_err(|error| {
        format!("libclang cannot be loaded ({error}); install libclang-dev or set LIBCLANG_PATH")
    })?;

    let mut builder = bindgen::Builder::default()
        .header(manifest.join("wrapper.h").display().to_string())
        .clang_args(["-x", "c++", "-std=c++17"])
        .clang_arg(format!("-I{}", headers.nvshmem.display()))
        .clang_arg(format!("-isystem{}", headers.cuda.display()))
        // From CUDA 13 on the C++ core libraries lie one folder deeper.
        .clang_arg(format!("-isystem{}", headers.cuda.join("cccl").display()))
        .rust_target(bindgen::RustTarget::stable(88, 0).map_err(|error| error.to_string())?)
        .rust_edition(bindgen::RustEdition::Edition2024)
        .formatter(bindgen::Formatter::Prettyplease)
        .sort_semantically(true)
        .merge_extern_blocks(true)
        .generate_comments(false)
        .prepend_enum_name(false)
        .layout_tests(true)
        .allowlist_recursively(true)
        .dynamic_library_name("Functions")
        .dynamic_link_require_all(true)
        .wrap_unsafe_ops(true);
    for function in FUNCTIONS {
        builder = builder.allowlist_function(function);
    }
    for name in TYPES {
        builder = builder.allowlist_type(name);
    }
    for name in CONSTANTS {
        builder = builder.allowlist_var(name);
    }
    let text = builder.generate().map_err(|error| format!("bindgen: {error}"))?.to_string();
    if let Some(missing) = FUNCTIONS.iter().find(|name| !text.contains(&format!("pub unsafe fn {name}("))) {
        return Err(format!("the headers in {} do not declare {missing}", headers.nvshmem.display()).into());
    }
    Ok(text)
}

/// Looks for `nvshmem_host.h` and `cuda_runtime.h`: the folder variables first, then the set-up's folder,
/// then the usual places.
fn find_headers(manifest: &Path) -> Result<Headers, Box<dyn Error>> {
    let setup = manifest.parent().unwrap_or(manifest).join(".setup/nvidia");
    let home = env::var_os("NVSHMEM_HOME").map(PathBuf::from);

    let nvshmem = match &home {
        Some(home) => vec![home.clone()],
        None => vec![setup.join("nvshmem")],
    };
    let mut cuda: Vec<PathBuf> =
        ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os).map(PathBuf::from).collect();
    if let Some(home) = &home {
        // PyPI packages lie side by side: nvidia/nvshmem and nvidia/cu13.
        cuda.push(home.join("../cu13"));
    }
    cuda.push(setup.join("cu13"));
    cuda.push("/usr/local/cuda".into());

    Ok(Headers {
        nvshmem: find("NVSHMEM_HOME", &nvshmem, "nvshmem_host.h")?,
        cuda: find("CUDA_HOME", &cuda, "cuda_runtime.h")?,
    })
}

/// The first `include` folder under `roots` that holds `header`.
fn find(variable: &str, roots: &[PathBuf], header: &str) -> Result<PathBuf, Box<dyn Error>> {
    let folders = roots.iter().map(|root| root.join("include"));
    folders.clone().find(|folder| folder.join(header).is_file()).ok_or_else(|| {
        let looked: Vec<_> = folders.map(|folder| folder.display().to_string()).collect();
        format!("{header} was not found in {} (set {variable})", looked.join(", ")).into()
    })
}
