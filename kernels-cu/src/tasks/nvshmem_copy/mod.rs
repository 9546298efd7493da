//! `nvshmem_copy`: writes the rows in use of a view into the same view of a peer, or of the rank's own memory; the worker
//! loop then signals the task's trigger event. A core task type: taskgraph makes its tasks.
//!
//! Parameters (`mpk_nvshmem_copy_params`): rows_kind (0 tokens, 1 samples, 2 all): how many of the second last
//! dimension are in use. Input: the source view, one to four dimensions. Output: the destination view of the same
//! dimensions and dtype, in the symmetric heap, `pe` the peer, `addr` as at this rank; or, with `pe` -1, anywhere in
//! the rank's own memory. The last dimension lies side
//! by side in both.

use crate::abi::{MPK_TASK_TYPE_NVSHMEM_COPY, mpk_task_nvshmem_copy};
use crate::registry::{GpuSite, Registration};

/// Registry entry.
pub const REGISTRATION: Registration = Registration {
    name: "nvshmem_copy",
    core_number: Some(MPK_TASK_TYPE_NVSHMEM_COPY as u16),
    contract: None,
    run: Some(mpk_task_nvshmem_copy),
    ready: None,
    gpu: Some(gpu),
};

/// The GPU code.
fn gpu(_site: &GpuSite<'_>) -> Result<String, String> {
    Ok("mpk::gpu::NvshmemCopy".to_string())
}

#[cfg(test)]
mod test;
