//! The loaded kernels of a probe (`crate::probe`).

use super::device::Context;
use super::library::{Kernel, Library, Shape};
use crate::error::Result;
use crate::probe::Probe;
use kernels_cu::gpu::Cubin;
use std::sync::Arc;

/// The loaded kernels of a [`Probe`].
pub(super) struct ProbeKernels {
    pub probe: Arc<Probe>,
    kernels: Vec<(Library, Kernel)>,
    /// Number of launches that have ended.
    pub launches: usize,
}

impl ProbeKernels {
    /// # Errors
    /// The driver cannot load a cubin, or its blocks do not fit.
    pub fn load(
        context: &Arc<Context>,
        probe: &Arc<Probe>,
        cubins: &[Cubin],
        shape: Shape,
    ) -> Result<ProbeKernels> {
        let one = |cubin: &Cubin| {
            let library = Library::load(context, &cubin.bytes)?;
            let kernel = library.kernel(c"mpk_persistent")?;
            kernel.prepare(context, shape)?;
            Ok((library, kernel))
        };
        let kernels = cubins.iter().map(one).collect::<Result<_>>()?;
        Ok(ProbeKernels { probe: probe.clone(), kernels, launches: 0 })
    }

    /// The first one.
    pub fn first(&self) -> Option<&Library> {
        self.libraries().next()
    }

    /// The libraries that NVSHMEM must know.
    pub fn libraries(&self) -> impl Iterator<Item = &Library> {
        self.kernels.iter().map(|(library, _)| library)
    }

    /// The kernel of the next launch, if it is one of these.
    pub fn next(&self) -> Option<Kernel> {
        self.probe.kernel(self.launches).and_then(|number| Some(self.kernels.get(number)?.1))
    }
}
