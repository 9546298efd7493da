//! The fixed 64-bit identifiers of tasks and events.

use serde::{Deserialize, Serialize};

/// Iteration in bits 63..32, index in bits 31..0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TaskId(pub u64);

impl TaskId {
    /// Index of the task that ends the kernel.
    pub const TERMINATE: u32 = 0;
    /// Index of the task that begins a graph.
    pub const BEGIN: u32 = 1;

    /// The task `index` of the given iteration.
    pub const fn new(iteration: u32, index: u32) -> Self {
        TaskId(((iteration as u64) << 32) | index as u64)
    }
    /// Bits 63..32.
    pub const fn iteration(self) -> u32 {
        (self.0 >> 32) as u32
    }
    /// Bits 31..0.
    pub const fn index(self) -> u32 {
        self.0 as u32
    }
}

/// Tag in bits 63..48 (0 local, 1 NVSHMEM), owner rank in bits 47..32, index in bits 31..0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EventId(pub u64);

impl EventId {
    /// No event.
    pub const INVALID: EventId = EventId(u64::MAX);
    /// Index of the termination event.
    pub const TERMINATION: u32 = 0;
    /// Index of the event that starts every task without other dependencies. Task 1 triggers it.
    pub const BEGIN: u32 = 1;
    /// Index of the end-of-graph event in every graph.
    pub const END_OF_GRAPH: u32 = 2;
    /// Tag of an event that tasks of its own rank trigger.
    pub const TAG_LOCAL: u16 = 0;
    /// Tag of an event that another rank triggers when it has sent something.
    pub const TAG_NVSHMEM: u16 = 1;

    /// An event triggered by the tasks of its owner.
    pub const fn local(owner: u16, index: u32) -> Self {
        EventId(((owner as u64) << 32) | index as u64)
    }
    /// An event of rank `owner` that another rank triggers.
    pub const fn nvshmem(owner: u16, index: u32) -> Self {
        EventId((1 << 48) | ((owner as u64) << 32) | index as u64)
    }
    /// Bits 63..48.
    pub const fn tag(self) -> u16 {
        (self.0 >> 48) as u16
    }
    /// Bits 47..32.
    pub const fn owner(self) -> u16 {
        (self.0 >> 32) as u16
    }
    /// Bits 31..0.
    pub const fn index(self) -> u32 {
        self.0 as u32
    }
    /// True if the tag equals [`EventId::TAG_NVSHMEM`].
    pub const fn is_nvshmem(self) -> bool {
        self.tag() == Self::TAG_NVSHMEM
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_where_the_contract_puts_them() {
        assert_eq!(TaskId::new(3, 7).0, 0x0000_0003_0000_0007);
        assert_eq!(EventId::nvshmem(5, 9).0, 0x0001_0005_0000_0009);
        assert_eq!(EventId::local(5, 9).0, 0x0000_0005_0000_0009);
        assert!(EventId::nvshmem(0, 0).is_nvshmem() && !EventId::INVALID.is_nvshmem());
        assert_eq!((TaskId::new(8, 1).iteration(), TaskId::new(8, 1).index()), (8, 1));
    }
}
