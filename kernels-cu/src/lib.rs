//! The ABI shared by Rust, the CPU target and the GPU target; the task types (contract, reference and kernels, one
//! folder each under `src/tasks`); and the weight layouts that the kernels read.

pub mod abi;
pub mod gpu;
pub mod isa;
pub mod layout;
pub mod registry;
pub mod sanitizer;
pub mod signals;
pub mod tasks;
pub mod testing;

pub use registry::{Registration, kernel_table, registry, type_number};
