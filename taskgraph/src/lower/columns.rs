//! Triggers and workers of a rank's tasks, for graphs whose tasks themselves are not kept.

use crate::ids::EventId;
use std::ops::Range;

/// The trigger and the worker of each task.
#[derive(Debug, Default)]
pub(crate) struct Columns {
    /// The event that each triggers, or [`EventId::INVALID`].
    pub triggers: Vec<EventId>,
    /// Static placement: the worker of each. Tasks 0 and 1 have none.
    pub workers: Vec<u32>,
    /// Copies within the rank's own memory. They trigger the rank's own events.
    pub own_copies: Vec<Range<usize>>,
}

impl Columns {
    /// Makes room for this many tasks.
    pub fn clear(&mut self, tasks: usize) {
        self.triggers.clear();
        self.triggers.reserve(tasks);
        self.workers.clear();
        self.workers.reserve(tasks);
        self.own_copies.clear();
    }

    /// Static placement: a worker's list is an order. So among its tasks without dependents, only the last one triggers the end.
    /// On a GPU a trigger is a release, which would also delay the worker's next task. A copy is complete only when its event is
    /// ready, so it keeps its trigger.
    pub fn drop_implied_ends(&mut self, end: EventId, workers: u32) {
        let mut told = vec![false; workers as usize];
        let tasks = self.triggers.iter_mut().zip(&self.workers).enumerate();
        for (task, (trigger, &worker)) in tasks.skip(2).rev() {
            let copy = || self.own_copies.iter().any(|tasks| tasks.contains(&task));
            if *trigger == end && !copy() && std::mem::replace(&mut told[worker as usize], true) {
                *trigger = EventId::INVALID;
            }
        }
    }

    /// The workers whose last task triggers another rank's event.
    pub fn ending_remotely(&self, workers: u32) -> Vec<u32> {
        let mut last = vec![EventId::INVALID; workers as usize];
        for (trigger, &worker) in self.triggers.iter().zip(&self.workers).skip(2) {
            last[worker as usize] = *trigger;
        }
        let remote = |event: EventId| event != EventId::INVALID && event.is_nvshmem();
        (0..workers).filter(|&worker| remote(last[worker as usize])).collect()
    }
}
