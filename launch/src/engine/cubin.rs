//! The cubin of a run: its compile options, its kernel variants and its compilation.

use crate::engine::agreement::together;
use crate::engine::config::{LaunchChoice, RunConfig};
use crate::engine::error::Error;
use crate::model::app_error::AppError;
use distributed::cuda::{Code, Transport};
use distributed::probe::LeftOut;
use distributed::{World, are_mixed};
use kernels_cu::gpu::{
    Architecture, Cache, CollectiveShim, CompileOptions, Cubin, Expression, GpuError, KernelConfig,
    NvshmemFiles, collective_shim, compile, merge, task_codes,
};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};
use taskgraph::target::Device;
use taskgraph::words::counted;
use taskgraph::{TaskGraph, Tuning};

/// The properties of a GPU kernel besides its tasks.
#[derive(Clone, Copy, Debug, Default)]
pub struct KernelKind {
    /// It is linked with NVSHMEM's device library.
    pub device_library: bool,
    /// Its puts go through the host ([`Transport::Host`]).
    pub by_host: bool,
    /// It can keep a timeline.
    pub traced: bool,
    /// It runs static and dynamic graphs.
    pub mixed: bool,
}

/// The compile options for a GPU.
///
/// # Errors
/// No cubin can be compiled for it, or a block has too little shared memory.
pub fn compile_options(row: &Device, kind: KernelKind, tuning: &Tuning) -> Result<CompileOptions, AppError> {
    let architecture = Architecture::of_device(row)
        .ok_or_else(|| AppError::environment(format!("no cubin can be compiled for {}", row.architecture)))?;
    let mut options = CompileOptions::new(architecture, kind.device_library);
    // For compute-sanitizer; see config.cuh.
    if std::env::var_os("MPK_DEBUG_EVERY_LANE_ARRIVES").is_some_and(|value| value == "1") {
        options.defines.push(("MPK_EVERY_LANE_ARRIVES".into(), "1".into()));
        options.line_numbers = true;
    }
    if kind.by_host {
        options.defines.push(("MPK_HOST_PROXY".into(), "1".into()));
    }
    if kind.traced {
        options.defines.push(("MPK_TRACE".into(), "1".into()));
    }
    if kind.mixed {
        options.defines.push(("MPK_MIXED_PLACEMENT".into(), "1".into()));
    }
    options.config = fit(options.config.tuned(tuning), row.shared_memory).ok_or_else(|| {
        AppError::environment(format!(
            "a block of {} has {} bytes of shared memory, too few for the kernel; choose another GPU (CUDA_VISIBLE_DEVICES), or run with BackendChoice::Cpu",
            row.name, row.shared_memory
        ))
    })?;
    Ok(options)
}

/// The kernel's configuration on a device with less shared memory than the table says for its architecture. The tasks get less
/// of it.
fn fit(config: KernelConfig, shared_memory: u32) -> Option<KernelConfig> {
    /// Minimum shared memory that the tasks need.
    const LEAST_WORK: u32 = 32 << 10;
    /// Static shared memory of NVSHMEM's device library, in addition to the dynamic part.
    const STATIC: u32 = 2 << 10;
    let excess = (config.shared_bytes + STATIC).saturating_sub(shared_memory);
    let work_bytes = config.work_bytes.checked_sub(excess)? / 1024 * 1024;
    (work_bytes >= LEAST_WORK || excess == 0).then_some(match excess {
        0 => config,
        _ => KernelConfig {
            work_bytes,
            shared_bytes: config.shared_bytes - (config.work_bytes - work_bytes),
            ..config
        },
    })
}

/// Collective: the cubin that runs all ranks' graphs, and the kernel variant of each task in it.
pub(super) fn code(
    world: &World,
    config: &RunConfig,
    tuning: &Tuning,
    row: &Device,
    device_library: bool,
    graphs: &[TaskGraph],
) -> Result<Code, Error> {
    world.phase("compilation");
    let by_host = config.transport.puts_through_host(world.size());
    let begin = Instant::now();
    let codes = task_codes(graphs).map_err(|e| AppError::from(distributed::Error::Code(e)));
    let mut codes = together(world, codes)?;
    let expressions = united(world, &codes.expressions);
    codes.renumber(expressions.clone());
    let kind =
        KernelKind { device_library, by_host, traced: config.trace.is_some(), mixed: are_mixed(graphs) };
    let options = together(world, compile_options(row, kind, tuning))?;
    let generated = begin.elapsed();
    let cache = Cache::from_environment().map_err(|e| AppError::from(distributed::Error::Code(e)));
    let cache = together(world, cache)?;
    let left_out = config.probe.iter().flat_map(|probe| &probe.kernels);
    let others: Vec<CompileOptions> = left_out.map(|&left_out| leaving_out(&options, left_out)).collect();
    let make = || {
        let cubins =
            telling(expressions.len(), || compile_side_by_side(&expressions, &options, &others, &cache));
        cubins.map_err(|e| AppError::from(distributed::Error::Code(e)))
    };
    // One rank of each node compiles; the others find the cubin in the cache.
    let first = world.node_rank() == 0;
    let made = together(world, if first { make().map(Some) } else { Ok(None) })?;
    let cubins = match made {
        Some(cubins) => Ok(cubins),
        None => make(),
    };
    let (cubin, probes) = together(world, cubins)?;
    log_cubin(&cubin, expressions.len(), generated.as_secs_f64());
    // Without NVSHMEM, nothing can launch collectively.
    let collective = config.launch != LaunchChoice::Cooperative && !by_host;
    let shim = if collective { shim(world, options.architecture, &cache) } else { None };
    let nvshmem = match cubin.toolchain.nvshmem {
        None if world.size() > 1 => {
            let installed = NvshmemFiles::find(&nvshmem_sys::packages()).ok().map(|files| files.version);
            installed.or_else(|| shim.as_ref().and_then(|shim| shim.nvshmem))
        }
        linked => linked,
    };
    Ok(Code { cubin, probes, config: options.config, codes: codes.graphs, nvshmem, collective, shim })
}

/// The compile options of a kernel that leaves out a part of the work. `left_out` is a sum of the values of `LeftOut`
/// (kernels-cu/src/gpu/config.cuh).
fn leaving_out(ordinary: &CompileOptions, left_out: LeftOut) -> CompileOptions {
    let mut options = ordinary.clone();
    options.defines.push(("MPK_WITHOUT".into(), left_out.to_string()));
    options
}

/// The cubin of `options` and one cubin for each of the `others`, all compiled at the same time.
fn compile_side_by_side(
    expressions: &[Expression],
    options: &CompileOptions,
    others: &[CompileOptions],
    cache: &Cache,
) -> Result<(Cubin, Vec<Cubin>), GpuError> {
    let packages = nvshmem_sys::packages();
    let compile = |options| compile(expressions, options, &packages, cache);
    std::thread::scope(|scope| {
        let others: Vec<_> = others.iter().map(|options| scope.spawn(move || compile(options))).collect();
        let cubin = compile(options);
        let others =
            others.into_iter().map(|thread| thread.join().unwrap_or_else(|p| std::panic::resume_unwind(p)));
        let others = others.collect::<Result<_, _>>();
        Ok((cubin?, others?))
    })
}

/// How long a compilation stays silent. Reading the cache takes less.
const SILENT: Duration = Duration::from_secs(1);
/// Interval at which the log then repeats that the compiler is still running.
const REPEATED: Duration = Duration::from_secs(10);

/// Runs `make`, which may compile `variants` kernel variants. If it takes long, the log says so, and repeats it.
fn telling<T>(variants: usize, make: impl FnOnce() -> T) -> T {
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let (done, ended) = mpsc::channel::<()>();
        scope.spawn(move || {
            let mut silent = SILENT;
            while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(silent) {
                if silent == SILENT {
                    tracing::info!(
                        "compiling {}; this takes about a minute, and later starts use the cache",
                        counted(variants, "kernel variant")
                    );
                } else {
                    tracing::info!("still compiling, {} s so far", begin.elapsed().as_secs());
                }
                silent = REPEATED;
            }
        });
        let made = make();
        drop(done);
        made
    })
}

fn log_cubin(cubin: &Cubin, variants: usize, generated: f64) {
    tracing::info!(
        "{} in {generated:.2} s; cubin {} in {:.2} s ({})",
        counted(variants, "kernel variant"),
        if cubin.from_cache { "from the cache" } else { "compiled" },
        cubin.took.as_secs_f64(),
        cubin.path.display()
    );
}

/// Collective: the sorted union of all ranks' kernel variants.
fn united(world: &World, own: &[Expression]) -> Vec<Expression> {
    let lists = world.gather(Expression::to_text(own).into_bytes());
    let lists: Vec<Vec<Expression>> =
        lists.iter().map(|text| Expression::from_text(&String::from_utf8_lossy(text))).collect();
    let united = Expression::to_text(&merge(lists.iter().map(Vec::as_slice)));
    Expression::from_text(&String::from_utf8_lossy(&world.broadcast(0, united.into_bytes())))
}

/// Collective: the shim for NVSHMEM's collective launch, if the host library does not export that launch and the shim can be
/// built. Without it the kernel is launched cooperatively.
fn shim(world: &World, architecture: Architecture, cache: &Cache) -> Option<CollectiveShim> {
    if world.size() == 1 {
        return None;
    }
    let exported = nvshmem_sys::Library::load().is_ok_and(|library| library.has_collective_launch());
    // One rank of each node builds it.
    let first = world.node_rank() == 0;
    let build = || match collective_shim(architecture, &nvshmem_sys::packages(), cache) {
        Ok(shim) => Some(shim),
        Err(error) => {
            tracing::info!(
                "NVSHMEM's collective launch is not used because its shim could not be built: {error}"
            );
            None
        }
    };
    let own = if first && !exported { build() } else { None };
    // All ranks must launch the same way. If one rank cannot have the shim, the others do not try to build it.
    let lacks = first && !exported && own.is_none();
    let lacks = world.max(&[u64::from(lacks)])[0] != 0;
    if first || exported || lacks { own } else { build() }
}

/// A cubin compiled without a GPU.
pub struct Compiled {
    /// The cubin.
    pub cubin: Cubin,
    /// The number of kernel variants in it.
    pub variants: usize,
}

/// Compiles the kernels of all ranks' graphs into the cache. `auto` assumes that the node's GPUs reach each other's memory.
/// With `traced`, the kernel can keep a timeline.
///
/// # Errors
/// The GPU cannot run a task, or the toolchain lacks something.
pub fn compile_all(
    row: &Device,
    transport: Transport,
    traced: bool,
    tuning: &Tuning,
    all: &[Vec<TaskGraph>],
) -> Result<Compiled, AppError> {
    let error = |e| AppError::from(distributed::Error::Code(e));
    let mut lists = Vec::new();
    let mut ranks = 1;
    for graphs in all {
        ranks = graphs.len() as u32;
        lists.push(task_codes(graphs).map_err(error)?.expressions);
    }
    let expressions = merge(lists.iter().map(Vec::as_slice));
    let kind = KernelKind {
        device_library: transport.puts_through_nvshmem(ranks, true),
        by_host: transport.puts_through_host(ranks),
        traced,
        mixed: are_mixed(all.iter().flatten()),
    };
    let options = compile_options(row, kind, tuning)?;
    let cache = Cache::from_environment().map_err(error)?;
    let packages = nvshmem_sys::packages();
    let cubin =
        telling(expressions.len(), || compile(&expressions, &options, &packages, &cache)).map_err(error)?;
    if ranks > 1
        && let Err(problem) = collective_shim(options.architecture, &packages, &cache)
    {
        tracing::info!("NVSHMEM's collective launch is not used: {problem}");
    }
    log_cubin(&cubin, expressions.len(), 0.0);
    Ok(Compiled { cubin, variants: expressions.len() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_with_less_shared_memory_get_less_work_area() {
        let config = KernelConfig::new(Architecture::Sm80);
        assert_eq!(fit(config, 163 << 10), Some(config));
        match fit(config, 99 << 10) {
            Some(small) => {
                assert!(small.shared_bytes + (2 << 10) <= 99 << 10);
                assert_eq!(config.shared_bytes - small.shared_bytes, config.work_bytes - small.work_bytes);
            }
            None => assert!(config.shared_bytes - config.work_bytes + (34 << 10) > 99 << 10),
        }
        assert_eq!(fit(config, 16 << 10), None);
    }
}
