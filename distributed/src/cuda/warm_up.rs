//! Runs the slow parts of a GPU's start while the model's files are read.

use super::device::{Context, Gpu};
use super::driver::{self, Found};
use crate::world::World;
use std::sync::Arc;
use std::thread::JoinHandle;

/// A start that runs in its own thread.
pub struct WarmUp(Option<JoinHandle<Option<Arc<Context>>>>);

impl WarmUp {
    /// Starts the driver, the context of the GPU that this process will probably use, and NVSHMEM's library. Errors are ignored
    /// here: they occur again, and are reported, where the result is needed.
    ///
    /// MPI must be initialised first: its start sets environment variables, and the driver's start reads many. Until
    /// version 2.41, glibc's `getenv` may read freed memory if `setenv` runs at the same time.
    pub fn begin(world: &World) -> WarmUp {
        let (rank, several) = (world.node_rank(), world.size() > 1);
        let start = move || {
            let Ok(Found::Driver(driver)) = driver::find() else { return None };
            let context = Context::new(Gpu::open(driver, rank % driver.devices()).ok()?).ok();
            if several {
                // Stays loaded. It is initialised later, together with all ranks.
                let _ = nvshmem_sys::Library::load();
            }
            context
        };
        WarmUp(std::thread::Builder::new().name("GPU".into()).spawn(start).ok())
    }

    /// Waits for the start. The context lives as long as the returned value, so that later users find it.
    pub fn end(mut self) -> Option<Arc<Context>> {
        self.0.take().and_then(|thread| thread.join().ok()).flatten()
    }
}

impl Drop for WarmUp {
    /// The process must not end while the driver starts.
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            drop(thread.join());
        }
    }
}
