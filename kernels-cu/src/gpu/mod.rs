//! The GPU target, as far as no GPU is needed for it: which code each task runs, the model's own CUDA source, and
//! its compilation to a cubin that a folder on disk keeps.
//!
//! 1. [`task_codes`]: each task's C++ type, asked from its folder; equal ones share one code. Ranks that share one
//!    cubin unite theirs with [`merge`].
//! 2. [`source`]: one file with a jump table (a dense switch) over these codes.
//! 3. [`compile`]: nvcc, or what an earlier run left in the [`Cache`].

mod architecture;
mod cache;
mod codes;
mod compile;
#[cfg(test)]
mod compile_test;
mod embedded;
mod error;
mod identity;
mod nvcc;
mod private_folder;
mod shim;
mod source;
mod toolchain;

pub use architecture::{Architecture, KNOBS, KernelConfig};
pub use cache::Cache;
pub use codes::{Expression, TaskCodes, merge, task_codes};
pub use compile::{Cubin, compile};
pub use error::GpuError;
pub use identity::{NvshmemVersion, ToolchainIdentity};
pub use private_folder::PrivateFolder;
pub use shim::{CollectiveShim, collective_shim};
pub use source::{CompileOptions, KERNEL, source};
pub use toolchain::{Nvcc, NvshmemFiles, Toolchain};
