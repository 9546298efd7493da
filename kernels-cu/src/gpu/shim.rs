//! `nvshmemx_collective_launch` for host libraries before 3.8, which do not export it. There it is in
//! `libnvshmem_device.a`, with C++ linkage.

use super::{Architecture, Cache, GpuError, NvshmemVersion, Toolchain, compile, identity, nvcc};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// A shared object with `extern "C" int mpk_collective_launch(const void* kernel, const unsigned grid[3], const
/// unsigned block[3], void** args, size_t shared_bytes, void* stream)`, which returns NVSHMEM's status. It uses the
/// `libnvshmem_host.so.3` that is already loaded.
#[derive(Clone, Debug)]
pub struct CollectiveShim {
    /// The file.
    pub path: PathBuf,
    /// Version of the device library that it was linked with.
    pub nvshmem: Option<NvshmemVersion>,
}

/// The declaration replaces NVSHMEM's headers, which take long to compile.
const SOURCE: &str = r#"#include <cuda_runtime.h>

int nvshmemx_collective_launch(const void*, dim3, dim3, void**, size_t, cudaStream_t);

extern "C" __attribute__((visibility("default"))) int mpk_collective_launch(
    const void* kernel, const unsigned* grid, const unsigned* block, void** args, size_t shared_bytes, void* stream) {
  return nvshmemx_collective_launch(kernel, dim3(grid[0], grid[1], grid[2]), dim3(block[0], block[1], block[2]), args,
                                    shared_bytes, static_cast<cudaStream_t>(stream));
}
"#;

/// The shim, from the cache or newly built. If this fails, the caller launches cooperatively and logs that. NVSHMEM's
/// device library may lie in one of `packages`, as for [`NvshmemFiles::find`](super::NvshmemFiles::find).
///
/// # Errors
/// There is no toolchain, or the shim cannot be built.
pub fn collective_shim(
    architecture: Architecture,
    packages: &[PathBuf],
    cache: &Cache,
) -> Result<CollectiveShim, GpuError> {
    let flags = [
        compile::code_flag(architecture),
        "-rdc=true".to_string(),
        "-O2".to_string(),
        "-std=c++17".to_string(),
        "-Xcompiler=-fPIC,-fvisibility=hidden".to_string(),
        "-allow-unsupported-compiler".to_string(),
    ];
    let key = identity::key("collective launch", SOURCE, &flags, None);
    let toolchain = Toolchain::find(architecture, true, packages);
    let (entry, _) =
        compile::cached(cache, &key, "so", toolchain, |toolchain, folder| make(toolchain, &flags, folder))?;
    Ok(CollectiveShim { path: entry.path, nvshmem: entry.description.toolchain.nvshmem })
}

fn make(toolchain: &Toolchain, flags: &[String], folder: &Path) -> Result<(Vec<u8>, String), GpuError> {
    let failed =
        |path: &Path, e: std::io::Error| GpuError::Cache { path: path.to_path_buf(), problem: e.to_string() };
    let (source, object) = (folder.join("collective_launch.cu"), folder.join("collective_launch.so"));
    fs::write(&source, SOURCE).map_err(|e| failed(&source, e))?;
    let mut arguments = vec![OsString::from("-shared")];
    arguments.extend(flags.iter().map(OsString::from));
    // A toolkit from Python packages has its libraries where its own nvcc does not look.
    if let Some(root) = toolchain.nvcc.path.parent().and_then(Path::parent) {
        arguments.push(nvcc::joined("-L", &root.join("lib")));
    }
    if let Some(files) = &toolchain.nvshmem {
        arguments.push(nvcc::joined("-L", &files.lib));
    }
    for argument in ["-o", "collective_launch.so", "collective_launch.cu", "-lnvshmem_device"] {
        arguments.push(argument.into());
    }
    // nvlink does not know this form, but the linker does. The name without the version may not exist.
    arguments.push("-Xlinker=-l:libnvshmem_host.so.3".into());
    let log = nvcc::run(&toolchain.nvcc.path, &arguments, folder)?;
    Ok((fs::read(&object).map_err(|e| failed(&object, e))?, log))
}
