//! How many tasks an attention operator becomes: splits, heads of a task and slots of a task.

use crate::tasks::contract;
use crate::tasks::heads::{Heads, MAX_SPLITS, window};
use taskgraph::task_type::{LocalOp, OpError};
use taskgraph::{Backend, Knob, Target};

/// Default minimum number of positions per split, for the longest sequence: a unit of 16 keys for each of a GPU worker's 8
/// compute warps. With fewer positions, warps are idle and the merge has more work.
pub(super) const SPLIT_POSITIONS: Knob = Knob {
    name: "attention.split_positions",
    default: 128,
    candidates: &[64, 128, 256, 512, 1024],
    about: "minimum number of positions per task if several tasks share a head, for the longest sequence",
};

/// On GPUs, in graphs with at least this many slots, the loader brings keys and values of earlier iterations through the ring
/// of stages, ahead of a task's events. By default in every graph: no batch size was slower (`docs/results/log.md`).
pub(super) const STREAMED_SLOTS: Knob = Knob {
    name: "attention.streamed_slots",
    default: 1,
    candidates: &[1, 9, 17, 33, 65, 1 << 16],
    about: "minimum number of slots of a graph for which keys and values come through the ring of stages",
};

/// Maximum number of key-value heads per task on GPUs. Apart from its keys and values, a task takes about 8 us, which its heads
/// share.
pub(super) const KV_HEADS: Knob = Knob {
    name: "attention.kv_heads",
    default: 2,
    candidates: &[1, 2, 4],
    about: "maximum number of key-value heads per attention task, used if there are more tasks than workers",
};

/// Each head has at least one compute warp.
pub(super) const MAX_KV_HEADS: u32 = 8;

/// Maximum number of slots per task on GPUs, for tasks of several heads. Between two tasks of a worker, memory stands still for
/// about 4 us: the ring of stages is full before the next task's queries are ready. Between two slots of a task, there is no event,
/// no trigger and no search for the slot's pages.
pub(super) const SLOTS: Knob = Knob {
    name: "attention.slots",
    default: 4,
    candidates: &[1, 2, 4],
    about: "maximum number of slots per attention task, used if tasks of several heads are more than workers",
};

/// Limit of the knob `attention.slots`.
const MAX_SLOTS: u32 = 4;

/// Default limit for the bytes of a rank's partial results. With many rows, each split writes and reads that much more, which
/// soon costs more than idle workers. They also determine how much memory the activations need.
const PARTIAL_BYTES: u64 = 256 << 20;

/// The positions that a query sees in the longest sequence.
pub(super) fn most_keys(op: &LocalOp<'_>) -> Result<u64, OpError> {
    let max_seq_len = op.inputs[2].dims[0];
    Ok(match window(op.global.attrs)? {
        0 => max_seq_len,
        window => max_seq_len.min(window.into()),
    })
}

/// The number of splits of this operator, the same on every rank of the world.
pub(super) fn splits(op: &LocalOp<'_>, target: &Target) -> Result<u32, OpError> {
    if let Some(splits) = contract::attr_u32(op.global.attrs, "splits")? {
        if splits == 0 || splits > MAX_SPLITS {
            return Err(OpError(format!("`splits` must be 1 to {MAX_SPLITS}, not {splits}")));
        }
        return Ok(splits);
    }
    let sharding = op.global.inputs[0].sharding;
    let (mut fewest, mut most_partial) = (u64::MAX, 1);
    for rank in 0..op.world {
        let heads = Heads::local(op.global.attrs, sharding, rank, op.world)?;
        fewest = fewest.min(heads.num_key_values());
        most_partial = most_partial.max(op.inputs[0].dims[0] * heads.num_queries() * heads.head_dim * 4);
    }
    let tasks = fewest.max(1) * u64::from(op.global.capacity.active.max(1));
    let page_size = op.inputs[1].dims[2].max(1);
    let most = most_keys(op)?
        .div_ceil(page_size.max(target.tuned(&SPLIT_POSITIONS)))
        .clamp(1, u64::from(MAX_SPLITS));
    let most = most.min(PARTIAL_BYTES / most_partial).max(1);
    // No more tasks than workers, because a second round would take as long as the first.
    Ok((u64::from(target.workers) / tasks).clamp(1, most) as u32)
}

/// Number of key-value heads per task. On GPUs, as many as a worker would have single-head tasks one after the other, up to
/// a limit.
pub(super) fn kv_heads_of_task(heads: &Heads, active: u32, splits: u32, target: &Target) -> u32 {
    let all = heads.num_key_values();
    let alike = (1..all).all(|h| heads.readers(h).count() == heads.readers(0).count());
    let most = target.tuned(&KV_HEADS).min(u64::from(MAX_KV_HEADS));
    let mut of_task = 1;
    while target.backend == Backend::Cuda
        && alike
        && splits == 1
        && 2 * of_task <= most
        && all.is_multiple_of(2 * of_task)
        && all / of_task * u64::from(active) > u64::from(target.workers)
    {
        of_task *= 2;
    }
    of_task as u32
}

/// Number of slots per task: as many as a worker would have tasks one after the other, up to a limit.
pub(super) fn slots_of_task(heads: &Heads, active: u32, kv_heads: u32, target: &Target) -> u32 {
    let tasks = heads.num_key_values() / u64::from(kv_heads) * u64::from(active);
    let most = target.tuned(&SLOTS).clamp(1, u64::from(MAX_SLOTS));
    if kv_heads == 1 {
        return 1; // the GPU code has no loop over slots then
    }
    tasks.div_ceil(u64::from(target.workers).max(1)).clamp(1, most) as u32
}
