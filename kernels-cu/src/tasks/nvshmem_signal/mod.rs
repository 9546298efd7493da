//! `nvshmem_signal`: signals a peer's event without data, such as "buffer free". The worker loop sends the signal. The
//! kernel computes nothing and has no operands. A core task type: taskgraph creates its tasks.

use crate::abi::{MPK_TASK_TYPE_NVSHMEM_SIGNAL, mpk_task_nvshmem_signal};
use crate::registry::Registration;

/// Registry entry.
pub const REGISTRATION: Registration = Registration {
    name: "nvshmem_signal",
    core_number: Some(MPK_TASK_TYPE_NVSHMEM_SIGNAL as u16),
    contract: None,
    run: Some(mpk_task_nvshmem_signal),
    ready: None,
    gpu: None,
};

#[cfg(test)]
mod tests {
    use crate::testing::{Call, TestBatch, TestRank, TestTask, run_task};

    #[test]
    fn does_nothing_and_succeeds() {
        let code = run_task(
            "nvshmem_signal",
            &TestTask::default(),
            &mut TestBatch::rows(1),
            &TestRank::default(),
            Call::Run,
        );
        assert_eq!(code, 0);
    }
}
