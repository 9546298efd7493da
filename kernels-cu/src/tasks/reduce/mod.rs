//! `reduce`: the sum of the ranks' partial tiles in rank order, in f32, plus the residual once. A core task type:
//! taskgraph makes its tasks when it lowers an allreduce.
//!
//! Parameters (`mpk_reduce_params`): world, rank, rows_kind (0 tokens, 1 samples, 2 all), flags (1 flagged, 2 has a
//! residual). Not flagged: inputs are the own partial tile f32 [rows, columns], the receive view f32
//! [world, rows, columns], whose own slot is not read, and the residual f32 [rows, columns]. Flagged: inputs are the
//! receive view f32_flagged [world, rows, columns], of which all slots are read, and the residual. Output:
//! [rows, columns], f32 or the act dtype. Any strides, but columns lie side by side.

use crate::abi::{MPK_TASK_TYPE_REDUCE, mpk_task_reduce, mpk_task_reduce_ready};
use crate::registry::Registration;

/// Registry entry.
pub const REGISTRATION: Registration = Registration {
    name: "reduce",
    core_number: Some(MPK_TASK_TYPE_REDUCE as u16),
    contract: None,
    run: mpk_task_reduce,
    ready: Some(mpk_task_reduce_ready),
    gpu: None,
};

#[cfg(test)]
mod test;
