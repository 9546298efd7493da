//! The slow parts of a GPU's start, done while the model's files are read.

use super::device::{Context, Gpu};
use super::driver::{self, Found};
use crate::world::World;
use std::sync::Arc;
use std::thread::JoinHandle;

/// A start that is under way in a thread of its own.
pub struct WarmUp(Option<JoinHandle<Option<Arc<Context>>>>);

impl WarmUp {
    /// Begins to bring up the driver, the context of the GPU that this process will probably use, and NVSHMEM's
    /// library. What fails is met again, and told, where it is needed.
    ///
    /// MPI is up by then, and must be: its start sets variables of the environment, of which the driver's start reads
    /// many, and until 2.41 glibc's `getenv` beside a `setenv` may read what has been freed.
    pub fn begin(world: &World) -> WarmUp {
        let (rank, several) = (world.node_rank(), world.size() > 1);
        let start = move || {
            let Ok(Found::Driver(driver)) = driver::find() else { return None };
            let context = Context::new(Gpu::open(driver, rank % driver.devices()).ok()?).ok();
            if several {
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
