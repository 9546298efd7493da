//! Queues of dynamic placement, sized so that none can fill up.

use kernels_cu::abi;
use taskgraph::task_graph::TaskGraph;

/// Owns the worker and scheduler queues of a rank.
pub struct Queues {
    workers: Vec<abi::mpk_queue>,
    schedulers: Vec<abi::mpk_queue>,
    _slots: Vec<Vec<u64>>,
}

impl Queues {
    /// A worker queue for each (worker, scheduler) and an event queue for each local scheduler.
    ///
    /// All tasks of an iteration fit into every worker queue and all events into every event queue, and an
    /// iteration ends only when both are empty: neither can overflow.
    pub fn new(graphs: &[TaskGraph], workers: usize, schedulers: usize, world: u32) -> Self {
        let mut slots = Vec::new();
        let mut make = |count: usize, capacity: usize| -> Vec<abi::mpk_queue> {
            (0..count)
                .map(|_| {
                    let mut memory = vec![0u64; capacity];
                    // SAFETY: all-zero is a valid mpk_queue.
                    let mut queue: abi::mpk_queue = unsafe { std::mem::zeroed() };
                    queue.slots = memory.as_mut_ptr();
                    queue.mask = capacity as u64 - 1;
                    slots.push(memory);
                    queue
                })
                .collect()
        };
        let tasks = graphs.iter().map(|g| g.tasks.len()).max().unwrap_or(1);
        let events = graphs.iter().map(|g| g.events.len()).max().unwrap_or(1);
        let local = schedulers.saturating_sub(usize::from(world > 1));
        let workers = make(workers * schedulers, (tasks + 1).next_power_of_two());
        let schedulers = make(local, (events + 1).next_power_of_two());
        Queues { workers, schedulers, _slots: slots }
    }

    /// `[worker][scheduler]`, or null.
    pub fn worker_queues(&mut self) -> *mut abi::mpk_queue {
        if self.workers.is_empty() { std::ptr::null_mut() } else { self.workers.as_mut_ptr() }
    }

    /// One for each local scheduler, or null.
    pub fn scheduler_queues(&mut self) -> *mut abi::mpk_queue {
        if self.schedulers.is_empty() { std::ptr::null_mut() } else { self.schedulers.as_mut_ptr() }
    }
}
