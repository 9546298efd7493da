//! The slow parts of a GPU's start, done while MPI comes up.

use super::device::{Context, Gpu};
use super::driver::{self, Found};
use crate::world::launched_by_mpi;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Variables in which launchers put a process's number among those of its node.
const NODE_RANK_VARIABLES: [&str; 4] =
    ["OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMIX_LOCAL_RANK", "SLURM_LOCALID"];

/// A start that is under way in a thread of its own.
pub struct WarmUp(Option<JoinHandle<Option<Arc<Context>>>>);

impl WarmUp {
    /// Begins to bring up the driver, the context of the GPU that this process will probably use, and NVSHMEM's
    /// library. What fails is met again, and told, where it is needed.
    pub fn begin() -> WarmUp {
        let Some(rank) = node_rank() else { return WarmUp(None) };
        let start = move || {
            let Ok(Found::Driver(driver)) = driver::find() else { return None };
            let context = Context::new(Gpu::open(driver, rank % driver.devices()).ok()?).ok();
            if launched_by_mpi() {
                // Stays loaded. Its initialisation comes later, with all ranks.
                let _ = nvshmem_sys::Library::load();
            }
            context
        };
        WarmUp(std::thread::Builder::new().name("GPU".into()).spawn(start).ok())
    }

    /// Waits for it. The context lives as long as what is given back, so that another use of it finds it there.
    pub fn end(mut self) -> Option<Arc<Context>> {
        self.0.take().and_then(|thread| thread.join().ok()).flatten()
    }
}

impl Drop for WarmUp {
    /// The process must not end while the driver comes up.
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            drop(thread.join());
        }
    }
}

/// This process's number on its node, where that is known before MPI is up.
fn node_rank() -> Option<u32> {
    if !launched_by_mpi() {
        return Some(0);
    }
    NODE_RANK_VARIABLES.iter().find_map(|name| std::env::var(name).ok()?.parse().ok())
}
