//! `nvshmem_copy`: writes the rows in use of a view into the same view on a peer, or in the rank's own memory. The worker
//! loop then signals the task's trigger event. A core task type: taskgraph creates its tasks.
//!
//! Parameters (`mpk_nvshmem_copy_params`): rows_kind (0 tokens, 1 samples, 2 all) says how many indices of the second
//! last dimension are in use. Input: the source view, with one to four dimensions. Output: the destination view with the
//! same dimensions and dtype. It is in the symmetric heap, with the peer in `pe` and `addr` as on this rank; or, with
//! `pe` -1, anywhere in the rank's own memory. The last dimension is contiguous in both.

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
