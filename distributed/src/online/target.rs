//! What serving needs from a rank, on any target.

use crate::bell::Bell;
use crate::control::Control;
use crate::control_writer::ControlWriter;
use crate::cpu::CpuRank;
use crate::cuda::CudaRank;
use crate::error::Result;
use crate::outputs::Outputs;
use crate::world::World;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

pub(super) trait Target {
    fn outputs(&self) -> &Arc<Outputs>;
    fn control(&self) -> &Control;
    fn writer(&self) -> impl ControlWriter;
    /// A wait for another rank without progress for this long ends the run.
    fn deadline(&self) -> Duration;
    /// The bell that this rank's host sleeps on.
    fn bell(&self) -> Bell;
    /// Wakes the hosts of other ranks, if they can be reached, because there is a message for them. Other hosts check now and
    /// then.
    fn ring_others(&self);
    /// Wakes rank 0's host, if it can be reached.
    fn ring_first(&self);
    /// Collective: see `CpuRank::launch`.
    fn launch(
        &mut self,
        world: &World,
        begin: impl FnOnce(Result<()>) -> Result<()>,
        look: impl FnMut(&Self) -> Result<bool>,
    ) -> Result<()>;
}

impl Target for CpuRank {
    fn outputs(&self) -> &Arc<Outputs> {
        &self.common.outputs
    }

    fn control(&self) -> &Control {
        &self.control
    }

    fn writer(&self) -> impl ControlWriter {
        CpuRank::writer(self)
    }

    fn deadline(&self) -> Duration {
        Duration::from_nanos(self.header().deadline_ns)
    }

    fn bell(&self) -> Bell {
        let word = self.bell_of(self.header().rank as usize).unwrap_or(NonNull::dangling());
        // SAFETY: the control block is in the heap, which lives as long as the rank, and the word is only accessed atomically.
        unsafe { Bell::new(word, true) }
    }

    fn ring_others(&self) {
        let header = self.header();
        for rank in (0..header.world as usize).filter(|&rank| rank != header.rank as usize) {
            if let Some(word) = self.bell_of(rank) {
                // SAFETY: as above; the heaps of all ranks live as long as each of them serves.
                unsafe { Bell::new(word, true) }.ring();
            }
        }
    }

    fn ring_first(&self) {
        if let Some(word) = self.bell_of(0) {
            // SAFETY: as above.
            unsafe { Bell::new(word, true) }.ring();
        }
    }

    fn launch(
        &mut self,
        world: &World,
        begin: impl FnOnce(Result<()>) -> Result<()>,
        look: impl FnMut(&Self) -> Result<bool>,
    ) -> Result<()> {
        CpuRank::launch(self, world, begin, look)
    }
}

impl Target for CudaRank {
    fn outputs(&self) -> &Arc<Outputs> {
        &self.common.outputs
    }

    fn control(&self) -> &Control {
        &self.control
    }

    fn writer(&self) -> impl ControlWriter {
        CudaRank::writer(self)
    }

    fn deadline(&self) -> Duration {
        self.deadline
    }

    fn bell(&self) -> Bell {
        // SAFETY: the word is in the memory of the results, which lives as long as the rank, and is only accessed atomically.
        unsafe { Bell::new(self.common.outputs.bell(), false) }
    }

    fn ring_others(&self) {}

    fn ring_first(&self) {}

    fn launch(
        &mut self,
        world: &World,
        begin: impl FnOnce(Result<()>) -> Result<()>,
        look: impl FnMut(&Self) -> Result<bool>,
    ) -> Result<()> {
        CudaRank::launch(self, world, begin, look)
    }
}
