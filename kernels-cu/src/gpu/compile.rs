//! Compiles kernel variants to a cubin.

use super::cache::{Build, Description, Entry};
use super::{
    Architecture, Cache, CompileOptions, Expression, GpuError, NvshmemFiles, Toolchain, ToolchainIdentity,
    embedded, identity, nvcc, source,
};
use crate::signals;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A compiled model.
#[derive(Clone, Debug)]
pub struct Cubin {
    /// The ELF file that the driver loads.
    pub bytes: Vec<u8>,
    /// It was in the cache, or another process has just made it.
    pub from_cache: bool,
    /// Its file in the cache.
    pub path: PathBuf,
    /// Hash of everything that determines it except the toolchain.
    pub key: String,
    /// The toolchain that made it. The host library must be compatible with the version in `nvshmem`.
    pub toolchain: ToolchainIdentity,
    /// The output of nvcc, including the kernel's registers and spills.
    pub log: String,
    /// The time to find or make it.
    pub took: Duration,
}

/// The cubin with these kernel variants, from the cache or compiled by nvcc. If several processes need the same cubin, one
/// compiles it and the others wait. Needs no toolchain if it is in the cache. NVSHMEM's headers and device library may
/// lie in one of `packages`, as for [`NvshmemFiles::find`].
///
/// # Errors
/// There is no toolchain, nvcc refuses the source, or the cache cannot be used.
pub fn compile(
    expressions: &[Expression],
    options: &CompileOptions,
    packages: &[PathBuf],
    cache: &Cache,
) -> Result<Cubin, GpuError> {
    let started = Instant::now();
    let toolchain = Toolchain::find(options.architecture, options.nvshmem, packages);
    let cubin = compile_with(expressions, options, cache, toolchain)?;
    Ok(Cubin { took: started.elapsed(), ..cubin })
}

pub(super) fn compile_with(
    expressions: &[Expression],
    options: &CompileOptions,
    cache: &Cache,
    toolchain: Result<Toolchain, GpuError>,
) -> Result<Cubin, GpuError> {
    let started = Instant::now();
    let text = source(expressions, options);
    let key = identity::key("cubin", &text, &flags(options), Some(options));
    let (entry, from_cache) =
        cached(cache, &key, "cubin", toolchain, |toolchain, build| make(&text, options, toolchain, build))?;
    Ok(Cubin {
        bytes: entry.content,
        from_cache,
        path: entry.path,
        key,
        toolchain: entry.description.toolchain,
        log: entry.description.log,
        took: started.elapsed(),
    })
}

/// The file of `key`, and whether it was cached. If it was not, `make` returns its content and the compiler's output.
pub(super) fn cached(
    cache: &Cache,
    key: &str,
    extension: &str,
    toolchain: Result<Toolchain, GpuError>,
    make: impl FnOnce(&Toolchain, &Path) -> Result<(Vec<u8>, String), GpuError>,
) -> Result<(Entry, bool), GpuError> {
    let identity = toolchain.as_ref().ok().map(Toolchain::identity);
    if let Some(entry) = cache.find(key, extension, identity.as_ref())? {
        return Ok((entry, true));
    }
    let toolchain = toolchain?;
    let build: Build = cache.build(key)?;
    let identity = toolchain.identity();
    if let Some(entry) = cache.made_meanwhile(key, extension, &identity) {
        return Ok((entry, true));
    }
    let (content, log) = match make(&toolchain, build.folder()) {
        Err(error) if signals::is_ending() => {
            // nvcc was interrupted. What ends the process also says why.
            drop(build);
            signals::await_end();
            return Err(error);
        }
        made => made?,
    };
    if !content.starts_with(b"\x7fELF") {
        return Err(GpuError::Compile {
            command: toolchain.nvcc.path.display().to_string(),
            status: "it ended without an error".to_string(),
            output: format!(
                "  but its {extension} file of {} bytes is not an ELF file\n{log}",
                content.len()
            ),
            fix: None,
        });
    }
    let description = Description { toolchain: identity, log };
    let path = cache.store(key, extension, &description, &content, &build)?;
    Ok((Entry { path, description, content }, false))
}

/// nvcc's options that affect the code, except for macros, which are in the source.
fn flags(options: &CompileOptions) -> Vec<String> {
    let mut flags: Vec<String> =
        embedded::INCLUDE_FOLDERS.iter().map(|folder| format!("-I{folder}")).collect();
    flags.push(code_flag(options.architecture));
    for flag in [
        "-std=c++17",
        "-O3",
        "-Xptxas=-v",
        // No host code is kept, so any host compiler will do.
        "-allow-unsupported-compiler",
        // Warnings about CUDA's headers, and about functions that a model does not use.
        "-diag-suppress=177",
    ] {
        flags.push(flag.to_string());
    }
    if options.line_numbers {
        flags.push("-lineinfo".to_string());
    }
    flags
}

/// Registers of a multiprocessor, which runs one block of the persistent kernel. Threads get them in units of eight.
const REGISTERS: u32 = 65_536;

/// What nvcc makes code for.
pub(super) fn code_flag(architecture: Architecture) -> String {
    format!("-gencode=arch={},code={architecture}", architecture.virtual_name())
}

/// Runs nvcc in `folder`. Returns the cubin and nvcc's output.
fn make(
    text: &str,
    options: &CompileOptions,
    toolchain: &Toolchain,
    folder: &Path,
) -> Result<(Vec<u8>, String), GpuError> {
    let failed =
        |path: &Path, e: std::io::Error| GpuError::Cache { path: path.to_path_buf(), problem: e.to_string() };
    embedded::write(folder).map_err(|e| failed(folder, e))?;
    let (model, cubin) = (folder.join("model.cu"), folder.join("model.cubin"));
    fs::write(&model, text).map_err(|e| failed(&model, e))?;
    let run = |arguments: &[&str], more: &[OsString]| {
        let mut list: Vec<OsString> = arguments.iter().map(OsString::from).collect();
        list.extend_from_slice(more);
        nvcc::run(&toolchain.nvcc.path, &list, folder)
    };
    let mut flags: Vec<OsString> = flags(options).into_iter().map(OsString::from).collect();
    let log = match &toolchain.nvshmem {
        None => run(&["-cubin", "-o", "model.cubin", "model.cu"], &flags)?,
        Some(NvshmemFiles { include, lib, .. }) => {
            flags.push(nvcc::joined("-I", include));
            // Linked functions do not know the kernel's launch bounds. A function that needs more registers than the
            // kernel may have cannot be linked.
            let registers = REGISTERS / options.config.block_threads / 8 * 8;
            flags.push(format!("-maxrregcount={registers}").into());
            // Compiles device code only, because NVSHMEM's host side takes seconds.
            let compiled = run(&["-cubin", "-rdc=true", "-o", "relocatable.cubin", "model.cu"], &flags)?;
            let link =
                [code_flag(options.architecture).into(), nvcc::joined("-L", lib), "-lnvshmem_device".into()];
            compiled + &run(&["-dlink", "-cubin", "-o", "model.cubin", "relocatable.cubin"], &link)?
        }
    };
    let bytes = fs::read(&cubin).map_err(|e| failed(&cubin, e))?;
    Ok((bytes, log))
}
