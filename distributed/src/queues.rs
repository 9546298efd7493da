//! The queues of dynamic placement, sized so that none can overflow.

use crate::control_writer::ControlWriter;
use crate::error::Result;
use crate::image::Image;
use crate::memory::Layout;
use kernels_cu::abi;
use taskgraph::task_graph::TaskGraph;

/// The places of a rank's worker and scheduler queues in an image.
pub(crate) struct Queues {
    workers: Group,
    schedulers: Group,
    written: u64,
}

/// Queues with the same capacity.
struct Group {
    count: u64,
    capacity: u64,
    structs: u64,
    slots: u64,
}

impl Queues {
    /// Reserves a worker queue for each (worker, scheduler) and an event queue for each local scheduler, at the end of `layout`.
    ///
    /// Every worker queue has room for all tasks of an iteration, and every event queue for all events. Both have room for one
    /// more entry, of the previous iteration, which may still be in the queue because it is removed after its work is done. So no
    /// queue can overflow.
    pub fn reserve(
        graphs: &[TaskGraph],
        workers: u32,
        schedulers: u32,
        world: u32,
        layout: &mut Layout,
    ) -> Self {
        let tasks = graphs.iter().map(|g| g.tasks.len()).max().unwrap_or(1) as u64;
        let events = graphs.iter().map(|g| g.events.len()).max().unwrap_or(1) as u64;
        let local = schedulers.saturating_sub(u32::from(world > 1));
        let mut group = |count: u64, entries: u64| {
            let structs = layout.reserve(count * size_of::<abi::mpk_queue>() as u64, 128);
            Group { count, capacity: (entries + 1).next_power_of_two(), structs, slots: 0 }
        };
        let mut workers = group(u64::from(workers) * u64::from(schedulers), tasks);
        let mut schedulers = group(u64::from(local), events);
        let written = layout.bytes();
        for group in [&mut workers, &mut schedulers] {
            group.slots = layout.reserve(group.count * group.capacity * 8, 128);
        }
        Queues { workers, schedulers, written }
    }

    /// End of the written part. The slots follow; there may be many, and they start as zeros.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Writes the queues. Returns the addresses of those of `[worker][scheduler]` and of those of the local schedulers (0: none).
    pub fn write(&self, image: &mut Image) -> (u64, u64) {
        (self.workers.write(image), self.schedulers.write(image))
    }
}

impl Queues {
    /// Empties all queues, for another launch.
    pub fn reset(&self, image: &Image, writer: &impl ControlWriter) -> Result<()> {
        for group in [&self.workers, &self.schedulers] {
            let queues = group.empty(image);
            // SAFETY: plain structs without padding, read as bytes.
            let bytes =
                unsafe { std::slice::from_raw_parts(queues.as_ptr().cast::<u8>(), size_of_val(&queues[..])) };
            writer.write(group.structs, bytes)?;
            writer.zero(group.slots, group.count * group.capacity * 8)?;
        }
        Ok(())
    }
}

impl Group {
    fn write(&self, image: &mut Image) -> u64 {
        if self.count == 0 {
            return 0;
        }
        let queues = self.empty(image);
        image.put(self.structs, &queues);
        image.address(self.structs)
    }

    /// The structs of empty queues.
    fn empty(&self, image: &Image) -> Vec<abi::mpk_queue> {
        (0..self.count)
            .map(|index| {
                // SAFETY: all-zero is a valid mpk_queue.
                let mut queue: abi::mpk_queue = unsafe { std::mem::zeroed() };
                queue.slots = image.address(self.slots + index * self.capacity * 8) as *mut u64;
                queue.mask = self.capacity - 1;
                queue
            })
            .collect()
    }
}
