//! What serving needs of a rank, whichever target it is on.

use crate::control::{Control, ControlWriter};
use crate::cpu::CpuRank;
use crate::cuda::CudaRank;
use crate::error::Result;
use crate::outputs::Outputs;
use crate::world::World;

pub(super) trait Target {
    fn outputs(&self) -> &Outputs;
    fn control(&self) -> &Control;
    fn writer(&self) -> impl ControlWriter;
    /// Collective: see `CpuRank::launch`.
    fn launch(&mut self, world: &World, look: impl FnMut(&Self) -> Result<bool>) -> Result<()>;
}

impl Target for CpuRank {
    fn outputs(&self) -> &Outputs {
        &self.common.outputs
    }

    fn control(&self) -> &Control {
        &self.control
    }

    fn writer(&self) -> impl ControlWriter {
        CpuRank::writer(self)
    }

    fn launch(&mut self, world: &World, look: impl FnMut(&Self) -> Result<bool>) -> Result<()> {
        CpuRank::launch(self, world, look)
    }
}

impl Target for CudaRank {
    fn outputs(&self) -> &Outputs {
        &self.common.outputs
    }

    fn control(&self) -> &Control {
        &self.control
    }

    fn writer(&self) -> impl ControlWriter {
        CudaRank::writer(self)
    }

    fn launch(&mut self, world: &World, look: impl FnMut(&Self) -> Result<bool>) -> Result<()> {
        CudaRank::launch(self, world, look)
    }
}
