//! The machine that runs the tasks, CPU or GPU, and what it needs besides the graphs.

use crate::engine::agreement::together;
use crate::engine::config::{BackendChoice, RunConfig};
use crate::engine::cubin::code;
use crate::engine::error::Error;
use crate::model::app_error::AppError;
use crate::model::model_json::ModelJson;
use distributed::affinity::Cores;
use distributed::cuda::{Found, Machine, WarmUp, driver};
use distributed::plan::{BatchPlan, RunOptions};
use distributed::{CpuRank, CudaRank, Rank, World};
use kernels_cu::isa::Isa;
use std::time::Instant;
use taskgraph::target::Device;
use taskgraph::words::counted;
use taskgraph::{Target, TaskGraph, Tuning};

/// Maximum number of threads per rank that read weights for a GPU. More threads do not make the copy faster.
const MOST_READERS: usize = 8;

/// The machine that a run uses.
pub enum Backend {
    /// Threads on these cores.
    Cpu(Cores),
    /// A GPU with its row of the hardware table. The cores are those of the host.
    Cuda(Box<Machine>, Device, Cores),
}

impl Backend {
    /// Collective: chooses what `config.backend` asks for. `auto` chooses GPUs if every rank's node has one, and the CPU if
    /// none has.
    ///
    /// # Errors
    /// A GPU is asked for but missing, or it cannot be used.
    pub fn choose(world: &World, config: &RunConfig, warm_up: Option<WarmUp>) -> Result<Backend, Error> {
        let begin = Instant::now();
        let cores = world.cores();
        if config.backend == BackendChoice::Cpu {
            log_cpu(world, &cores, "");
            return Ok(Backend::Cpu(cores));
        }
        // Kept until the machine holds the GPU itself.
        let _warm = warm_up.and_then(WarmUp::end);
        let found = together(world, driver::find().map_err(AppError::from))?;
        let counts = world.all_gather(match &found {
            Found::Nothing(_) => 0,
            Found::Driver(driver) => u64::from(driver.devices()),
        });
        let driver = match found {
            Found::Driver(driver) => Ok(driver),
            Found::Nothing(reason) => {
                if config.backend == BackendChoice::Auto && counts.iter().all(|&count| count == 0) {
                    log_cpu(world, &cores, &format!(" (no GPU: {reason})"));
                    return Ok(Backend::Cpu(cores));
                }
                Err(AppError::from(distributed::Error::NoGpu { reason }))
            }
        };
        let driver = together(world, driver)?;
        let machine = Machine::of_rank(world, driver, config.transport, config.bootstrap);
        let machine = together(world, machine.map_err(AppError::from))?;
        let row = together(world, machine.context.gpu().row().map_err(AppError::from))?;
        let gpu = machine.context.gpu();
        tracing::info!(
            "backend cuda: rank {} of {} on GPU {} ({}, {}), driver for CUDA {}.{}: {:.2} s",
            world.rank(),
            world.size(),
            gpu.ordinal,
            gpu.name,
            row.architecture,
            driver.cuda_version().0,
            driver.cuda_version().1,
            begin.elapsed().as_secs_f64()
        );
        Ok(Backend::Cuda(Box::new(machine), row, cores))
    }

    /// Collective: the target that graphs are built for, the same on every rank.
    ///
    /// # Errors
    /// There are more workers than the GPU has multiprocessors.
    pub fn target(&self, world: &World, model: &ModelJson) -> Result<Target, Error> {
        match self {
            Backend::Cpu(cores) => {
                let mut target = Target::cpu(workers(world, model, cores));
                // For tests: graphs are cut as for Hopper. The CPU target can run those tasks, but not faster.
                target.wide = std::env::var_os("MPK_DEBUG_WIDE").is_some_and(|value| value == "1");
                Ok(target)
            }
            Backend::Cuda(_, row, _) => {
                // GPUs with the same name may differ in multiprocessors; the smallest number counts.
                let least = u64::MAX - world.max(&[u64::MAX - u64::from(row.sms)])[0];
                let row = Device { sms: least as u32, ..*row };
                together(world, cuda_target(&row, model))
            }
        }
    }

    /// Whether all ranks are on one node and reach each other's memory, as far as the machine decides that.
    pub fn reach(&self) -> bool {
        match self {
            Backend::Cpu(_) => true,
            Backend::Cuda(machine, ..) => machine.local,
        }
    }

    /// The GPU's name in the hardware table.
    pub fn device(&self) -> Option<&'static str> {
        match self {
            Backend::Cpu(_) => None,
            Backend::Cuda(_, row, _) => Some(row.name),
        }
    }

    /// Threads of this rank that read weights.
    pub fn readers(&self) -> usize {
        match self {
            Backend::Cpu(cores) => cores.own.len(),
            Backend::Cuda(_, _, cores) => cores.own.len().clamp(1, MOST_READERS),
        }
    }

    /// Collective: a rank that is ready to be filled with weights.
    ///
    /// # Errors
    /// Something that the rank needs is missing.
    pub fn rank(
        self,
        world: &World,
        config: &RunConfig,
        tuning: &Tuning,
        graphs: Vec<TaskGraph>,
        plan: BatchPlan,
        options: &RunOptions,
    ) -> Result<Rank, Error> {
        match self {
            Backend::Cpu(cores) => {
                let rank = CpuRank::new(world, graphs, plan, options, cores).map_err(AppError::from);
                Ok(Rank::Cpu(Box::new(together(world, rank)?)))
            }
            Backend::Cuda(machine, row, _) => {
                // Before the compiler runs, because compiling may take long.
                together(world, machine.check(world, &graphs, options).map_err(AppError::from))?;
                let begin = Instant::now();
                let code = code(world, config, tuning, &row, machine.puts_through_nvshmem(world), &graphs)?;
                let took = begin.elapsed();
                let rank = CudaRank::new(world, *machine, code, graphs, plan, options);
                let mut rank = together(world, rank.map_err(AppError::from))?;
                rank.add_compile_time(took);
                Ok(Rank::Cuda(Box::new(rank)))
            }
        }
    }
}

/// The number of workers of this rank: the requested number, otherwise its share of the cores. It is the same on every rank.
fn workers(world: &World, model: &ModelJson, cores: &Cores) -> u32 {
    let share = world.max(&[u64::MAX - cores.own.len() as u64])[0];
    let share = (u64::MAX - share) as u32;
    let workers = model.runtime.workers.unwrap_or(share).max(1);
    if workers > share.max(1) {
        tracing::warn!(
            "{workers} workers per rank share {} and take turns, which is slow; leave out Overrides::workers and runtime.workers to get one worker per core",
            counted(share, "core")
        );
    }
    workers
}

fn log_cpu(world: &World, cores: &Cores, why: &str) {
    if let Some(problem) = Isa::problem() {
        tracing::warn!("{problem}; using {}", Isa::current().name());
    }
    tracing::info!(
        "backend cpu{why}, {}, {} per rank{}",
        counted(world.size(), "rank"),
        counted(cores.own.len(), "core"),
        if cores.sharers > 1 { " (shared)" } else { "" }
    );
}

/// The target for a GPU, with the number of workers that the model asks for.
///
/// # Errors
/// There are more workers than multiprocessors, so not all of their blocks could run at once.
pub fn cuda_target(row: &Device, model: &ModelJson) -> Result<Target, AppError> {
    let mut target = Target::cuda(row);
    if let Some(workers) = model.runtime.workers {
        if workers > row.sms {
            return Err(AppError::input(format!(
                "{workers} workers (Overrides::workers or runtime.workers), but {} has only {} multiprocessors, one per worker; use fewer workers",
                row.name, row.sms
            )));
        }
        target.workers = workers;
        target.max_tiles = workers;
    }
    Ok(target)
}
