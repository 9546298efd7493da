//! What all launches of a rank have in common, on any target.

use crate::arrays::GraphArrays;
use crate::heap_layout::HeapLayout;
use crate::plan::RunOptions;
use crate::tensors::Slot;

/// The parts of the control memory that stay the same from launch to launch. Addresses are those that the kernel uses.
pub(crate) struct Lasting {
    pub rank: u32,
    pub world: u32,
    pub schedulers: u32,
    pub arrays: Vec<GraphArrays>,
    pub heap: HeapLayout,
    /// Flagged words outside the first bytes of the heap. They must be zero before a launch.
    pub flagged: Vec<Slot>,
    /// How triggers from peers are added to counters (`mpk_signals`). The same on all ranks.
    pub signals: u32,
    /// The scratch memory of each worker.
    pub scratch: Vec<u64>,
    /// Trace records, `[worker][capacity]`. Capacity 0 means none.
    pub trace: u64,
    pub trace_capacity: u64,
    pub options: RunOptions,
    /// CPU: `mpk_cores`. GPU: 1 if ranks share it.
    pub oversubscribed: u32,
    /// CPU: threads that share a core; otherwise 0.
    pub threads_per_core: u32,
    /// CPU: the kernels by task type; otherwise 0.
    pub kernels: u64,
    /// GPU: the word through which the host aborts the kernel; otherwise 0.
    pub host_abort: u64,
    /// The ring of the proxy, which carries data to ranks that stores cannot reach; otherwise 0.
    pub proxy: u64,
}
