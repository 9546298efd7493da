//! How the kernel is started on all ranks.

use super::library::{Kernel, Shape};
use super::memory::Stream;
use crate::error::{Error, Result};
use crate::world::World;
use kernels_cu::gpu::CollectiveShim;
use nvshmem_sys::{Dim3, Library as Nvshmem};
use std::ffi::{c_int, c_void};
use std::fmt;

/// `mpk_collective_launch` of the shim.
type ShimLaunch = unsafe extern "C" fn(
    *const c_void,
    *const u32,
    *const u32,
    *mut *mut c_void,
    usize,
    *mut c_void,
) -> c_int;

/// A way to launch the kernel, which all ranks have agreed on.
pub(crate) enum Launcher {
    /// nvshmemx_collective_launch, exported by the host library.
    Exported,
    /// nvshmemx_collective_launch in a shim. The library is never unloaded, because NVSHMEM may keep pointers to it.
    Shim(ShimLaunch),
    /// The driver, on each rank separately, after all ranks agreed that all blocks can run.
    Cooperative,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Launcher::Exported => "nvshmemx_collective_launch of NVSHMEM's host library",
            Launcher::Shim(_) => "nvshmemx_collective_launch through the shim",
            Launcher::Cooperative => "cuLaunchCooperativeKernel",
        })
    }
}

impl Launcher {
    /// Collective: the best way that every rank supports. Without `collective`, the driver's.
    pub fn agree(
        world: &World,
        nvshmem: Option<&Nvshmem>,
        collective: bool,
        shim: Option<&CollectiveShim>,
    ) -> Launcher {
        let own = match nvshmem.filter(|_| collective) {
            Some(nvshmem) if nvshmem.has_collective_launch() => Launcher::Exported,
            Some(_) => shim.and_then(open_shim).map_or(Launcher::Cooperative, Launcher::Shim),
            None => Launcher::Cooperative,
        };
        let rank = match own {
            Launcher::Exported => 0,
            Launcher::Shim(_) => 1,
            Launcher::Cooperative => 2,
        };
        // Ranks with the same installation support the same. If they differ, use the way that needs nothing.
        if world.all_gather(rank).iter().all(|&other| other == rank) { own } else { Launcher::Cooperative }
    }

    /// Collective: launches `kernel` with a single argument, the address `rank`.
    ///
    /// # Safety
    /// The kernel takes one pointer, and everything that it leads to lives until the kernel has ended.
    pub unsafe fn launch(
        &self,
        nvshmem: Option<&Nvshmem>,
        kernel: Kernel,
        shape: Shape,
        stream: &Stream,
        rank: u64,
    ) -> Result<()> {
        let mut rank = rank;
        let mut arguments = [(&raw mut rank).cast::<c_void>()];
        let shared = shape.shared_bytes as usize;
        match (self, nvshmem) {
            (Launcher::Exported, Some(nvshmem)) => {
                let dim = |x| Dim3 { x, y: 1, z: 1 };
                // SAFETY: as the caller guarantees; kernel and stream belong to the context in which NVSHMEM was initialised.
                unsafe {
                    nvshmem.collective_launch(
                        kernel.handle(),
                        dim(shape.blocks),
                        dim(shape.threads),
                        arguments.as_mut_ptr(),
                        shared,
                        stream.raw().cast(),
                    )
                }
                .map_err(Error::from)
            }
            (Launcher::Shim(launch), _) => {
                let (grid, block) = ([shape.blocks, 1, 1], [shape.threads, 1, 1]);
                // SAFETY: the signature is the shim's (kernels_cu::gpu::CollectiveShim); the rest as above.
                let status = unsafe {
                    launch(
                        kernel.handle(),
                        grid.as_ptr(),
                        block.as_ptr(),
                        arguments.as_mut_ptr(),
                        shared,
                        stream.raw().cast(),
                    )
                };
                if status == 0 {
                    Ok(())
                } else {
                    Err(Error::Cuda {
                        call: "nvshmemx_collective_launch",
                        reason: format!("status {status}"),
                    })
                }
            }
            // SAFETY: as the caller guarantees.
            _ => unsafe { kernel.launch_cooperative(shape, stream, &mut arguments) },
        }
    }
}

fn open_shim(shim: &CollectiveShim) -> Option<ShimLaunch> {
    // SAFETY: the shim was built by this program from its own source (or found in its private cache); its
    // initialisers are NVSHMEM's.
    let library = match unsafe { libloading::Library::new(&shim.path) } {
        Ok(library) => library,
        Err(error) => {
            tracing::warn!("{}: {error}; using cuLaunchCooperativeKernel instead", shim.path.display());
            return None;
        }
    };
    // SAFETY: the symbol has this signature.
    let launch = unsafe { library.get::<ShimLaunch>(b"mpk_collective_launch\0") }.ok().map(|symbol| *symbol);
    std::mem::forget(library);
    launch
}
