//! Offsets in the symmetric heap: the same on every rank.

use crate::memory::Layout;
use crate::world::World;
use kernels_cu::abi;
use taskgraph::Placement;
use taskgraph::task_graph::{Area, Space, TaskGraph};

const COUNTER_BYTES: u64 = abi::MPK_COUNTER_STRIDE as u64 * 8;

/// The offsets of everything in the symmetric heap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeapLayout {
    /// Event counters of each graph.
    pub counters: Vec<u64>,
    /// Remote rings, one per sending rank.
    pub rings: u64,
    /// Distance between two rings.
    pub ring_bytes: u64,
    /// Entries of a ring.
    pub ring_capacity: u64,
    /// For each graph, the offset of each symmetric tensor (0 for other tensors). Graphs share the areas in which tensors
    /// overlap.
    pub tensors: Vec<Vec<u64>>,
    /// Size of the control block, counters and rings at the beginning. They must be zero before a launch.
    pub protocol_bytes: u64,
    /// Size.
    pub bytes: u64,
}

impl HeapLayout {
    /// Collective: lays out the control block, counters, rings and symmetric tensors of `graphs`. Ranks may have different
    /// numbers of events, so they agree on the largest.
    pub fn agree(world: &World, graphs: &[TaskGraph]) -> Self {
        // Epochs of a sender's pushes that may be outstanding. The sender cannot be more than one iteration ahead, because every
        // iteration ends with an exchange between all ranks.
        const EPOCHS_IN_FLIGHT: u64 = 2;
        let remote_triggers = |graph: &TaskGraph| -> u64 {
            graph.events.iter().filter(|e| e.remote).map(|e| u64::from(e.num_triggers)).sum()
        };
        let dynamic = graphs.iter().any(|g| g.placement == Placement::Dynamic) && world.size() > 1;
        let most_pushes = if dynamic { graphs.iter().map(remote_triggers).max().unwrap_or(0) } else { 0 };
        let mut numbers: Vec<u64> = graphs.iter().map(|g| g.events.len() as u64).collect();
        numbers.push(most_pushes);
        let numbers = world.max(&numbers);
        let (events, most_pushes) = (&numbers[..graphs.len()], numbers[graphs.len()]);

        let mut layout = Layout::default();
        layout.reserve(size_of::<abi::mpk_control>() as u64, 256);
        let counters = events.iter().map(|&n| layout.reserve(n * COUNTER_BYTES, 256)).collect();
        let ring_capacity =
            if dynamic { (EPOCHS_IN_FLIGHT * most_pushes).max(2).next_power_of_two() } else { 0 };
        let ring_bytes = if dynamic {
            (size_of::<abi::mpk_remote_ring>() as u64
                + ring_capacity * size_of::<abi::mpk_remote_entry>() as u64)
                .next_multiple_of(256)
        } else {
            0
        };
        let rings = layout.reserve(ring_bytes * u64::from(world.size()), 256);
        let protocol_bytes = layout.bytes();
        let areas = Area::ALL.map(|area| {
            if area.space() == Space::Device || !area.is_shared() {
                return 0;
            }
            let bytes = graphs.iter().map(|graph| graph.area_bytes(area)).max().unwrap_or(0);
            layout.reserve(bytes, 256)
        });
        let tensors = graphs
            .iter()
            .map(|graph| {
                let mut areas = areas;
                for area in Area::ALL.into_iter().filter(|area| !area.is_shared()) {
                    areas[area as usize] = layout.reserve(graph.area_bytes(area), 256);
                }
                let offset = |t: &taskgraph::task_graph::TensorEntry| match (t.space, t.overlay) {
                    (Space::Device, _) => 0,
                    (Space::Symmetric, Some(overlay)) => areas[overlay.area as usize] + overlay.offset,
                    (Space::Symmetric, None) => layout.reserve(t.bytes, 256),
                };
                graph.tensors.iter().map(offset).collect()
            })
            .collect();
        HeapLayout {
            counters,
            rings,
            ring_bytes,
            ring_capacity,
            tensors,
            protocol_bytes,
            bytes: layout.bytes(),
        }
    }
}
