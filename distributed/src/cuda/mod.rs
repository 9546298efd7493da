//! The CUDA target: one persistent kernel per GPU and rank, with NVSHMEM between them.
//!
//! Nothing here links against CUDA or NVSHMEM. Their libraries are loaded when a run needs them, and [`driver::find`] says
//! whether there is a driver.

mod budget;
pub mod device;
pub mod driver;
mod guard;
mod host_ring;
mod launch;
mod library;
mod machine;
mod memory;
mod prepare;
mod probe;
mod probe_kernels;
mod rank;
mod run;
mod symmetric;
mod warm_up;
mod weights;

pub use crate::gibibytes::gibibytes;
pub use device::{Context, Gpu, hardware_row};
pub use driver::{Driver, Found};
pub use machine::{Machine, check_limits, memory_needed};
pub use rank::{Code, CudaRank};
pub use symmetric::{Bootstrap, Transport};
pub use warm_up::WarmUp;

/// True if the process should end without the libraries' exit handlers. They might wait for a kernel that does not end, or for
/// peers that NVSHMEM believes to exist.
pub fn must_leave_at_once() -> bool {
    device::is_stuck() || symmetric::is_live()
}
