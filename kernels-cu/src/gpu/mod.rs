//! The part of the GPU target that needs no GPU: the kernel variant of each task, the model's own CUDA source, and its
//! compilation to a cubin, which is kept in a folder.
//!
//! 1. [`task_codes`]: the C++ type of each task, from its folder. Equal types are one kernel variant. Ranks that share
//!    a cubin merge their lists with [`merge`].
//! 2. [`source`]: one file with a jump table (a dense switch) over these kernel variants.
//! 3. [`compile`]: nvcc, or the result of an earlier run in the [`Cache`].

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
