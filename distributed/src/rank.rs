//! One rank of a run, on any target.

use crate::common::Common;
use crate::cpu::CpuRank;
use crate::cuda::CudaRank;
use crate::error::Result;
use crate::fill::TensorSource;
use crate::plan::BatchPlan;
use crate::trace;
use crate::world::World;
use std::time::Duration;
use taskgraph::task_graph::TensorEntry;

/// One rank, ready to run.
pub enum Rank {
    /// Threads of this process.
    Cpu(Box<CpuRank>),
    /// One persistent kernel on a GPU.
    Cuda(Box<CudaRank>),
}

impl std::ops::Deref for Rank {
    type Target = Common;

    fn deref(&self) -> &Common {
        match self {
            Rank::Cpu(rank) => &rank.common,
            Rank::Cuda(rank) => &rank.common,
        }
    }
}

impl Rank {
    /// Name of the target, as in `--backend`.
    pub fn backend(&self) -> &'static str {
        match self {
            Rank::Cpu(_) => "cpu",
            Rank::Cuda(_) => "cuda",
        }
    }

    /// On a GPU: the time from the task graphs to the loaded cubin.
    pub fn compile_time(&self) -> Option<Duration> {
        match self {
            Rank::Cpu(_) => None,
            Rank::Cuda(rank) => Some(rank.compile_time()),
        }
    }

    /// Fills weights and constants, using `threads` threads that read. `done` gets the number of bytes of the tensors finished so
    /// far.
    ///
    /// # Errors
    /// The first error of a thread.
    pub fn fill<S: TensorSource>(
        &mut self,
        threads: usize,
        source: &S,
        done: impl Fn(u64) + Sync,
    ) -> std::result::Result<(), S::Error> {
        match self {
            Rank::Cpu(rank) => rank.fill(threads, source, done),
            Rank::Cuda(rank) => rank.fill(threads, source, done),
        }
    }

    /// Writes a graph input, in every graph that has it, before a run. Returns false if no graph has it.
    ///
    /// # Errors
    /// The device failed.
    pub fn write_input(&mut self, name: &str, bytes: &[u8]) -> Result<bool> {
        match self {
            Rank::Cpu(rank) => Ok(rank.write_input(name, bytes)),
            Rank::Cuda(rank) => rank.write_input(name, bytes),
        }
    }

    /// A tensor of graph `graph`, as this rank holds it after a run.
    ///
    /// # Errors
    /// The device failed.
    pub fn read(&self, graph: usize, name: &str) -> Result<Option<(&TensorEntry, Vec<u8>)>> {
        match self {
            Rank::Cpu(rank) => Ok(rank.read(graph, name)),
            Rank::Cuda(rank) => rank.read(graph, name),
        }
    }

    /// Collective: runs the graphs of a plan with [`crate::plan::Mode::Fixed`]. Always ends within the deadline.
    ///
    /// # Errors
    /// [`crate::Error::Aborted`] with this rank's report if the run ends early, or an error of the device.
    pub fn run(&mut self, world: &World) -> Result<()> {
        match self {
            Rank::Cpu(rank) => rank.run(world),
            Rank::Cuda(rank) => rank.run(world),
        }
    }

    /// Prepares another launch of `plan`. Weights and the compiled kernel stay in memory. The last launch must have ended on
    /// every rank; its outputs are lost.
    ///
    /// # Errors
    /// There is not enough memory, or the device failed.
    pub fn restart(&mut self, plan: &BatchPlan) -> Result<()> {
        match self {
            Rank::Cpu(rank) => rank.restart(plan),
            Rank::Cuda(rank) => rank.restart(plan),
        }
    }

    /// The clock of [`Rank::trace`].
    pub fn clock(&self) -> trace::Clock {
        match self {
            Rank::Cpu(_) => trace::Clock::Host,
            Rank::Cuda(_) => trace::Clock::Device,
        }
    }

    /// The timeline: one row per worker, and one for the batch step.
    ///
    /// # Errors
    /// The device failed.
    pub fn trace(&self) -> Result<Vec<trace::Row>> {
        match self {
            Rank::Cpu(rank) => Ok(rank.trace()),
            Rank::Cuda(rank) => rank.trace(),
        }
    }

    /// Collective: frees symmetric memory.
    ///
    /// # Errors
    /// The device failed.
    pub fn free(self, world: &World) -> Result<()> {
        match self {
            Rank::Cpu(rank) => {
                rank.free(world);
                Ok(())
            }
            Rank::Cuda(rank) => rank.free(world),
        }
    }
}
