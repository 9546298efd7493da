//! `mpk-run doctor`: checks whether this machine can run a model, and says what is missing and how to fix it.

use crate::cli::args::DoctorArgs;
use crate::cli::choices::Backend;
use crate::cli::console::{self, tell};
use crate::cli::options::in_options;
use crate::cli::tool;
use crate::engine::ModelSpec;
use crate::engine::backend::cuda_target;
use crate::engine::cubin::{KernelKind, compile_options};
use crate::engine::graphs::{GraphBuild, ModelGraphs, build_one};
use crate::model::app_error::AppError;
use crate::model::model_source::ModelSource;
use distributed::cuda::{Driver, Found, Gpu, driver, gibibytes, memory_needed};
use kernels_cu::gpu::{Architecture, Cache, GpuError, Nvcc, NvshmemFiles};
use rustix::fs::{Access, access};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;
use taskgraph::Tuning;
use taskgraph::builder::BuildOptions;
use taskgraph::target::{self, Device};
use taskgraph::words::counted;

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Good,
    /// Works, with a limit that the text explains.
    Note,
    /// Missing or wrong. A run that needs it is not possible.
    Missing,
}

/// A line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Check {
    what: String,
    state: State,
    found: String,
    fix: Option<String>,
}

/// All checks, and whether a CUDA run is possible.
#[derive(Default)]
struct Table {
    checks: Vec<Check>,
    /// The last line.
    verdict: Option<String>,
}

impl Table {
    fn good(&mut self, what: &str, found: impl Into<String>) {
        self.add(what, State::Good, found.into(), None);
    }

    fn note(&mut self, what: &str, found: impl Into<String>, fix: impl Into<String>) {
        self.add(what, State::Note, found.into(), Some(fix.into()));
    }

    fn missing(&mut self, what: &str, found: impl Into<String>, fix: impl Into<String>) {
        self.add(what, State::Missing, found.into(), Some(fix.into()));
    }

    fn add(&mut self, what: &str, state: State, found: String, fix: Option<String>) {
        self.checks.push(Check { what: what.to_string(), state, found, fix });
    }

    fn error(&mut self, what: &str, error: impl Into<AppError>) {
        let error = error.into();
        self.add(what, State::Missing, error.message, error.help);
    }

    /// Adds something that was not found, and says what does not work without it.
    fn lack(&mut self, what: &str, error: impl Into<AppError>, lost: &str, state: State) {
        let error = error.into();
        self.add(what, state, format!("{}\n{lost}", error.message), error.help);
    }

    fn has(&self, what: &str) -> bool {
        self.checks.iter().any(|check| check.what == what && check.state != State::Missing)
    }

    fn text(&self) -> String {
        let width = self.checks.iter().map(|check| check.what.len()).max().unwrap_or(0);
        let indent = " ".repeat(width + 10);
        let mut text = String::new();
        for check in &self.checks {
            let state = match check.state {
                State::Good => "ok",
                State::Note => "note",
                State::Missing => "MISSING",
            };
            let found = check.found.trim().replace('\n', &format!("\n{indent}"));
            let _ = writeln!(text, "{:width$}  {state:7} {found}", check.what);
            if let Some(fix) = &check.fix {
                let _ = writeln!(text, "{indent}-> {}", fix.replace('\n', &format!("\n{indent}   ")));
            }
        }
        if let Some(verdict) = &self.verdict {
            let _ = writeln!(text, "\n{verdict}");
        }
        text
    }
}

/// Prints the table. The exit status is 0 if a run on the requested backend is possible, otherwise 3.
pub fn run(args: &DoctorArgs) -> i32 {
    let mut table = Table::default();
    let gpus = check_gpus(&mut table);
    check_toolkit(&mut table, gpus.as_ref());
    check_nvshmem(&mut table, args.ranks);
    check_mpi(&mut table, args.ranks);
    if let Some((_, gpus)) = &gpus {
        check_peers(&mut table, gpus);
    }
    check_shared_memory(&mut table);
    check_cache(&mut table, Cache::from_environment());
    let rows = gpus.as_ref().map(|(_, gpus)| gpus.as_slice()).unwrap_or_default();
    if let Some(path) = &args.model
        && let Err(error) = check_model(&mut table, path, args.ranks, rows)
    {
        let status = print(&table, error.status);
        tell(format_args!("mpk-run: error: {error}"));
        return status;
    }
    let cuda = cuda_possible(&table, args.ranks);
    say_ranks(&mut table, args, rows, cuda);
    let (status, verdict) = verdict(args, rows, cuda);
    table.verdict = Some(verdict);
    print(&table, status)
}

/// The exit status, and the last line, which says the same.
fn verdict(args: &DoctorArgs, gpus: &[Gpu], cuda: bool) -> (i32, String) {
    let launcher = if args.ranks > 1 { format!("mpirun -n {} ", args.ranks) } else { String::new() };
    match args.backend {
        Backend::Cuda if !cuda => {
            (3, "not possible: `--backend cuda` lacks what is marked MISSING; `--backend cpu` works".into())
        }
        Backend::Auto if !gpus.is_empty() && !cuda => (
            0,
            format!(
                "possible: `{launcher}mpk-run --backend cpu`; a run on the GPU lacks what is marked MISSING"
            ),
        ),
        Backend::Auto if gpus.is_empty() => (0, format!("possible: `{launcher}mpk-run`, on the CPU")),
        Backend::Auto => (0, format!("possible: `{launcher}mpk-run`, on the GPU")),
        Backend::Cpu => (0, format!("possible: `{launcher}mpk-run --backend cpu`")),
        Backend::Cuda => (0, format!("possible: `{launcher}mpk-run --backend cuda`")),
    }
}

/// Prints the table. Returns `status`, or the error's status if standard output cannot be written.
fn print(table: &Table, status: i32) -> i32 {
    match console::print(&in_options(&table.text())) {
        Ok(_) => status,
        Err(error) => {
            tell(format_args!("mpk-run: error: {error}"));
            error.status
        }
    }
}

/// How long another program may take to print its version.
const VERSION_LIMIT: Duration = Duration::from_secs(10);

const DRIVER: &str = "NVIDIA driver";
const NVCC: &str = "CUDA toolkit";
const HOST_COMPILER: &str = "C++ compiler for nvcc";
const NVSHMEM_DEVICE: &str = "NVSHMEM headers, device library";
const NVSHMEM_HOST: &str = "NVSHMEM host library";
const CACHE: &str = "cache of compiled kernels";
const MEMORY: &str = "memory for the model";
const RUN: &str = "ranks";

fn check_gpus(table: &mut Table) -> Option<(Driver, Vec<Gpu>)> {
    let driver = match driver::find() {
        Ok(Found::Driver(driver)) => driver,
        Ok(Found::Nothing(reason)) => {
            table.missing(
                DRIVER,
                reason,
                "for runs on GPUs: sudo apt-get install nvidia-driver-580-open; in a container: docker run --gpus all",
            );
            return None;
        }
        Err(error) => {
            table.error(DRIVER, error);
            return None;
        }
    };
    let (major, minor) = driver.cuda_version();
    table.good(DRIVER, format!("supports CUDA up to {major}.{minor}"));
    let gpus = match Gpu::all(driver) {
        Ok(gpus) => gpus,
        Err(error) => {
            table.error("GPUs", error);
            return None;
        }
    };
    for gpu in &gpus {
        let what = format!("GPU {}", gpu.ordinal);
        let found = format!(
            "{}, compute capability {}.{}, {} multiprocessors, {}",
            gpu.name,
            gpu.capability.0,
            gpu.capability.1,
            gpu.sms,
            gibibytes(gpu.memory)
        );
        match gpu
            .row()
            .map_err(AppError::from)
            .and_then(|row| compile_options(&row, KernelKind::default(), &Tuning::default()))
        {
            Ok(options) => {
                table.good(&what, format!("{found}, kernels are compiled for {}", options.architecture))
            }
            Err(error) => table.missing(&what, found, error.to_string()),
        }
    }
    Some((driver, gpus))
}

fn check_toolkit(table: &mut Table, gpus: Option<&(Driver, Vec<Gpu>)>) {
    // A toolkit that supports the newest GPU supports all of them.
    let architectures = gpus.iter().flat_map(|(_, gpus)| gpus).filter_map(|gpu| {
        let (major, minor) = gpu.capability;
        Architecture::from_compute_capability(major, minor)
    });
    match Nvcc::find(architectures.max()) {
        Ok(nvcc) => {
            let found = format!("nvcc {}.{} ({})", nvcc.release.0, nvcc.release.1, nvcc.path.display());
            match gpus.map_or(Ok(()), |(driver, _)| driver.serves(nvcc.release)) {
                Ok(()) => table.good(NVCC, found),
                Err(error) => table.missing(NVCC, found, AppError::from(error).to_string()),
            }
            check_host_compiler(table, std::env::var_os("NVCC_CCBIN"));
        }
        Err(error) => {
            let lost = "Without it, only models whose kernels are already in the cache run on a GPU";
            table.lack(NVCC, error, lost, State::Note);
        }
    }
}

/// Checks the host compiler of nvcc: `NVCC_CCBIN` (a program, or the folder of one), otherwise gcc.
fn check_host_compiler(table: &mut Table, named: Option<OsString>) {
    let program = match named.map(PathBuf::from) {
        Some(folder) if folder.is_dir() => folder.join("gcc"),
        Some(program) => program,
        None => "gcc".into(),
    };
    match tool::version(&program, VERSION_LIMIT) {
        Ok(text) => table.good(HOST_COMPILER, text.lines().next().unwrap_or_default()),
        Err(problem) => table.note(
            HOST_COMPILER,
            format!(
                "{} {problem}; only models whose kernels are already in the cache run on a GPU",
                program.display()
            ),
            "sudo apt-get install g++; if NVCC_CCBIN is set, unset it or set it to another compiler",
        ),
    }
}

fn check_nvshmem(table: &mut Table, ranks: u32) {
    let needed = ranks > 1;
    let device = NvshmemFiles::find(&nvshmem_sys::packages());
    match &device {
        Ok(files) => {
            table.good(NVSHMEM_DEVICE, format!("{} ({})", files.version, files.include.display()));
        }
        Err(error) => {
            let lost = "Needed to compile kernels for several ranks whose GPUs cannot reach each other's memory, or for --transport nvshmem";
            table.lack(NVSHMEM_DEVICE, error, lost, State::Note);
        }
    }
    match nvshmem_sys::Library::load() {
        Ok(library) => {
            let host = library.version();
            let found = format!("{host} ({})", library.path().display());
            match &device {
                Ok(files) if (files.version.major, files.version.minor) != (host.major, host.minor) => {
                    table.missing(
                        NVSHMEM_HOST,
                        format!("{found}, but headers and device library are {}", files.version),
                        "set NVSHMEM_HOME to one installation, or run scripts/setup.sh --nvshmem",
                    );
                }
                _ => table.good(NVSHMEM_HOST, found),
            }
        }
        Err(error) => {
            let state = if needed { State::Missing } else { State::Note };
            let error = AppError { help: error.help(), ..AppError::environment(error.to_string()) };
            table.lack(NVSHMEM_HOST, error, "Only runs with several ranks on GPUs need it", state);
        }
    }
}

fn check_mpi(table: &mut Table, ranks: u32) {
    let library = distributed::world::mpi_library();
    let library = library.lines().next().unwrap_or_default().trim().to_string();
    let library = library.split(", package").next().unwrap_or_default().to_string();
    let fix = "sudo apt-get install openmpi-bin libopenmpi-dev";
    match tool::version(Path::new("mpirun"), VERSION_LIMIT) {
        Ok(text) => {
            let version = text.lines().next().unwrap_or_default().to_string();
            let family = |text: &str| text.to_ascii_lowercase().contains("open");
            if family(&version) == family(&library) {
                table.good("MPI", format!("library {library}; {version}"));
            } else {
                table.missing("MPI", format!("library {library}, but {version}"), fix);
            }
        }
        Err(problem) if ranks > 1 => {
            table.missing("MPI", format!("library {library}; mpirun {problem}"), fix);
        }
        Err(problem) => {
            table.note("MPI", format!("library {library}; mpirun {problem}; one rank runs without it"), fix)
        }
    }
}

fn check_peers(table: &mut Table, gpus: &[Gpu]) {
    if gpus.len() < 2 {
        return;
    }
    let mut matrix = String::new();
    let mut all = true;
    for from in gpus {
        let reach: Vec<&str> = gpus
            .iter()
            .map(|to| match from.reaches(to) {
                Ok(true) => "yes",
                _ => {
                    all = false;
                    "no"
                }
            })
            .collect();
        let _ = writeln!(matrix, "GPU {} reaches {}", from.ordinal, reach.join(" "));
    }
    if all {
        table.good("peer access", format!("between all {} GPUs", gpus.len()));
    } else {
        table.note(
            "peer access",
            matrix,
            "ranks without it go through NVSHMEM's network transports and --transport p2p is refused; `nvidia-smi topo -p2p rw` says why",
        );
    }
}

fn check_shared_memory(table: &mut Table) {
    const LITTLE: u64 = 256 << 20;
    match distributed::cpu::shared_memory_free() {
        Some(free) if free < LITTLE => table.note(
            "shared memory",
            format!("{} free in /dev/shm", gibibytes(free)),
            "for several ranks on the CPU: mount -o remount,size=1G /dev/shm; in a container: docker run --shm-size=1g",
        ),
        Some(free) => table.good("shared memory", format!("{} free in /dev/shm", gibibytes(free))),
        None => table.note("shared memory", "/dev/shm cannot be read", "mount -t tmpfs tmpfs /dev/shm"),
    }
}

fn check_cache(table: &mut Table, cache: Result<Cache, GpuError>) {
    let fix = "set MPK_CACHE_DIR to a folder that you can write to";
    let cache = match cache {
        Ok(cache) => cache,
        Err(error) => return table.error(CACHE, error),
    };
    let folder = cache.folder();
    if let Err(error) = cache.check() {
        return table.error(CACHE, error);
    }
    // The cache folder may not exist yet. Its nearest existing ancestor decides whether it can be created.
    let existing = folder.ancestors().find(|path| path.symlink_metadata().is_ok()).unwrap_or(Path::new("/"));
    if !writable(existing) {
        return table.missing(CACHE, format!("{} is not writable", folder.display()), fix);
    }
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let (count, bytes) = files
        .filter_map(|entry| entry.metadata().ok().filter(std::fs::Metadata::is_file))
        .fold((0, 0), |(count, bytes), file| (count + 1, bytes + file.len()));
    table.good(CACHE, format!("{} ({}, {})", folder.display(), counted(count, "file"), gibibytes(bytes)));
}

fn writable(folder: &Path) -> bool {
    access(folder, Access::WRITE_OK | Access::EXEC_OK).is_ok()
}

/// Checks whether each GPU can hold the ranks that would share it.
fn check_model(table: &mut Table, path: &Path, ranks: u32, gpus: &[Gpu]) -> Result<(), AppError> {
    let model = ModelSpec::path(path).open()?;
    let ModelSource::Model(source) = ModelSource::open(&model)? else {
        table.good("model", "an op graph of its own");
        return Ok(());
    };
    let row: Device = match gpus.first() {
        Some(gpu) => gpu.row()?,
        None => target::device("h200").copied().ok_or_else(|| AppError::failed("no row h200"))?,
    };
    let target = cuda_target(&row, &model)?;
    let ops = ModelGraphs::new(&model, &source, ranks, &target)?.graphs;
    let allreduce = crate::engine::graphs::allreduce(model.runtime.allreduce);
    let build = BuildOptions { allreduce, ..BuildOptions::new(ranks, target) };
    let build = GraphBuild::new(build, model.runtime.placements());
    let graphs = build_one(&ops, &kernels_cu::registry::registry(), &build, 0)?;
    let (needed, parts) = memory_needed(&graphs)?;
    let on = if ranks == 1 { "one GPU".into() } else { format!("each of {ranks} GPUs") };
    let found = format!("{} on {on}: {parts}", gibibytes(needed));
    let sharing = ranks.div_ceil(gpus.len().max(1) as u32);
    match gpus.iter().map(|gpu| gpu.memory).min() {
        Some(memory) if needed.saturating_mul(u64::from(sharing)) > memory => table.missing(
            MEMORY,
            format!("{found}, but a GPU of {} has {}", counted(sharing, "rank"), gibibytes(memory)),
            "use more ranks or GPUs, fewer slots (max_batch) or shorter sequences (max_seq_len)",
        ),
        _ => table.good(MEMORY, found),
    }
    Ok(())
}

/// True if this node's GPUs have everything that a run with `ranks` ranks needs.
fn cuda_possible(table: &Table, ranks: u32) -> bool {
    let memory = !table.checks.iter().any(|check| check.what == MEMORY) || table.has(MEMORY);
    let nvshmem = ranks == 1 || (table.has(NVSHMEM_HOST) && table.has("MPI"));
    table.has(DRIVER) && table.has("GPU 0") && table.has(NVCC) && table.has(CACHE) && memory && nvshmem
}

fn say_ranks(table: &mut Table, args: &DoctorArgs, gpus: &[Gpu], cuda: bool) {
    let ranks = args.ranks;
    if args.backend == Backend::Cuda && !cuda {
        return;
    }
    if args.backend == Backend::Cpu || gpus.is_empty() || !cuda {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let each = (cores / ranks as usize).max(1);
        let cores_each = if ranks == 1 {
            counted(each, "core")
        } else {
            format!("{each} of {} each", counted(cores, "core"))
        };
        table.good(RUN, format!("{} on the CPU, {cores_each}", counted(ranks, "rank")));
        return;
    }
    let mut text = format!("{}:", counted(ranks, "rank"));
    for rank in 0..ranks.min(64) {
        let _ = write!(
            text,
            "{} rank {rank} on GPU {}",
            if rank > 0 { "," } else { "" },
            rank % gpus.len() as u32
        );
    }
    let sharing = ranks.div_ceil(gpus.len() as u32);
    if sharing > 1 {
        table.note(RUN, text, format!("up to {sharing} ranks share a GPU, which works but is slow"));
    } else {
        table.good(RUN, text);
    }
}

#[cfg(test)]
#[path = "doctor_test.rs"]
mod tests;
