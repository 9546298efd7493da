//! The places of tensors: offsets in a few areas of memory. The logic is the same for host and device memory.

use crate::error::{Error, Result};
use crate::heap_layout::HeapLayout;
use crate::memory::Layout;
use std::collections::HashMap;
use taskgraph::DType;
use taskgraph::op_graph::Role;
use taskgraph::task_graph::{Space, TaskGraph, TensorEntry};

/// Alignment of tensors in bytes.
const ALIGN: u64 = 256;

/// A kind of memory for tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Area {
    /// Weights and constants.
    Constants,
    /// Tensors that persist between iterations, in the rank's own memory: the key-value cache, chosen tokens.
    Persistent,
    /// Inputs and activations in the rank's own memory.
    Activations,
    /// The symmetric heap.
    Heap,
}

/// The place of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub area: Area,
    pub offset: u64,
    pub bytes: u64,
}

/// Addresses of the areas.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bases {
    pub constants: u64,
    pub persistent: u64,
    pub activations: u64,
    pub heap: u64,
}

/// A tensor's place in the kernel's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    pub address: u64,
    pub bytes: u64,
}

/// The places of all tensors of a rank's graphs.
#[derive(Clone, Debug)]
pub(crate) struct TensorLayout {
    /// Indexed by graph and tensor.
    pub places: Vec<Vec<Place>>,
    /// Size of each area except the heap, in bytes.
    pub constants: u64,
    pub persistent: u64,
    pub activations: u64,
}

impl TensorLayout {
    /// Lays out all tensors. A tensor that graphs share has one place.
    pub fn new(graphs: &[TaskGraph], heap: &HeapLayout) -> Result<TensorLayout> {
        let (mut constants, mut persistent, mut activations) =
            (Layout::default(), Layout::default(), Layout::default());
        let overlaid = graphs.iter().map(|g| g.area_bytes(taskgraph::task_graph::Area::Device)).max();
        let overlaid = activations.reserve(overlaid.unwrap_or(0), ALIGN);
        let mut shared: HashMap<&str, Place> = HashMap::new();
        let mut places = Vec::new();
        for (graph, heap_offsets) in graphs.iter().zip(&heap.tensors) {
            let mut own = Vec::new();
            for (tensor, &heap_offset) in graph.tensors.iter().zip(heap_offsets) {
                let bytes = tensor.bytes;
                let mut share = |area: Area, layout: &mut Layout| {
                    let new = || Place { area, offset: layout.reserve(bytes, ALIGN), bytes };
                    *shared.entry(&tensor.name).or_insert_with(new)
                };
                let place = match (&tensor.role, tensor.space) {
                    (Role::Weight { .. } | Role::Constant, _) => share(Area::Constants, &mut constants),
                    (Role::Persistent { .. }, Space::Symmetric) => *shared
                        .entry(&tensor.name)
                        .or_insert(Place { area: Area::Heap, offset: heap_offset, bytes }),
                    (Role::Persistent { .. }, Space::Device) => share(Area::Persistent, &mut persistent),
                    (_, Space::Symmetric) => Place { area: Area::Heap, offset: heap_offset, bytes },
                    (_, Space::Device) => {
                        let offset = match tensor.overlay {
                            Some(overlay) => overlaid + overlay.offset,
                            None => activations.reserve(bytes, ALIGN),
                        };
                        Place { area: Area::Activations, offset, bytes }
                    }
                };
                if place.bytes != bytes {
                    return Err(Error::Graph {
                        graph: graph.name.clone(),
                        problem: format!(
                            "tensor {} has {bytes} bytes here and {} in another graph",
                            tensor.name, place.bytes
                        ),
                    });
                }
                own.push(place);
            }
            places.push(own);
        }
        Ok(TensorLayout {
            places,
            constants: constants.bytes(),
            persistent: persistent.bytes(),
            activations: activations.bytes(),
        })
    }

    /// Addresses of all tensors, indexed by graph and tensor.
    pub fn slots(&self, bases: Bases) -> Vec<Vec<Slot>> {
        let slot = |place: &Place| {
            let base = match place.area {
                Area::Constants => bases.constants,
                Area::Persistent => bases.persistent,
                Area::Activations => bases.activations,
                Area::Heap => bases.heap,
            };
            Slot { address: base + place.offset, bytes: place.bytes }
        };
        self.places.iter().map(|graph| graph.iter().map(slot).collect()).collect()
    }
}

/// Weights and constants of all graphs with their slots: each once, the largest first.
pub(crate) fn constants<'a>(graphs: &'a [TaskGraph], slots: &[Vec<Slot>]) -> Vec<(&'a TensorEntry, Slot)> {
    let mut seen = std::collections::HashSet::new();
    let mut list: Vec<(&TensorEntry, Slot)> = graphs
        .iter()
        .zip(slots)
        .flat_map(|(graph, slots)| graph.tensors.iter().zip(slots.iter().copied()))
        .filter(|(t, _)| {
            matches!(t.role, Role::Weight { .. } | Role::Constant) && seen.insert(t.name.as_str())
        })
        .collect();
    list.sort_by_key(|(_, slot)| std::cmp::Reverse(slot.bytes));
    list
}

/// The slot of the tensor `name` in the first graph that has it.
pub(crate) fn find(graphs: &[TaskGraph], slots: &[Vec<Slot>], name: &str) -> Option<Slot> {
    graphs.iter().zip(slots).find_map(|(graph, slots)| {
        let index = graph.tensors.iter().position(|t| t.name == name)?;
        Some(slots[index])
    })
}

/// Slots with flagged words, wherever they are.
pub(crate) fn flagged<'a>(
    graphs: &'a [TaskGraph],
    slots: &'a [Vec<Slot>],
) -> impl Iterator<Item = Slot> + 'a {
    let each = graphs.iter().zip(slots).flat_map(|(graph, slots)| graph.tensors.iter().zip(slots));
    each.filter(|(tensor, _)| tensor.dtype == DType::F32Flagged).map(|(_, &slot)| slot)
}

/// Slots of activations with flagged words. They must start as zeros, which is the epoch of no iteration.
pub(crate) fn flagged_activations<'a>(
    graphs: &'a [TaskGraph],
    layout: &'a TensorLayout,
    slots: &'a [Vec<Slot>],
) -> impl Iterator<Item = Slot> + 'a {
    graphs.iter().zip(&layout.places).zip(slots).flat_map(|((graph, places), slots)| {
        let each = graph.tensors.iter().zip(places).zip(slots);
        each.filter(|((tensor, place), _)| {
            tensor.dtype == DType::F32Flagged && place.area == Area::Activations
        })
        .map(|(_, &slot)| slot)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::World;
    use taskgraph::op_graph::{Capacity, Rows};
    use taskgraph::task_graph::Placement;

    fn graph(name: &str, tensors: &[(&str, Space, Role)]) -> TaskGraph {
        let entry = |(name, space, role): &(&str, Space, Role)| TensorEntry {
            name: (*name).into(),
            dtype: DType::F32,
            dims: vec![100],
            strides: vec![1],
            space: *space,
            bytes: 400,
            role: role.clone(),
            parts: Vec::new(),
            region_dims: vec![100],
            tiled: false,
            paired: false,
            output: false,
            rows: Rows::Fixed,
            overlay: None,
        };
        TaskGraph {
            name: name.into(),
            rank: 0,
            world: 1,
            placement: Placement::Static,
            backend: taskgraph::Backend::Cpu,
            workers: 1,
            capacity: Capacity { rows: 1, samples: 1, active: 1 },
            type_names: Vec::new(),
            ops: Vec::new(),
            tensors: tensors.iter().map(entry).collect(),
            variants: Vec::new(),
            operands: Vec::new(),
            tasks: Vec::new(),
            events: Vec::new(),
            worker_lists: Vec::new(),
        }
    }

    /// The verifier assumes that a tensor that persists is the same memory in all graphs, and that peers may write it if it is
    /// symmetric.
    #[test]
    fn a_persistent_tensor_has_one_place_and_is_in_the_heap_if_symmetric() {
        let persistent = Role::Persistent { region_dims: None };
        let kept = ("kept", Space::Symmetric, persistent.clone());
        let own = ("own", Space::Device, persistent);
        let sum = ("sum", Space::Symmetric, Role::Activation);
        let graphs = [
            graph("first", &[sum.clone(), kept.clone(), own.clone()]),
            graph("second", &[own.clone(), kept, sum]),
        ];
        let heap = HeapLayout::agree(&World::single(), &graphs);
        let layout = TensorLayout::new(&graphs, &heap).unwrap();
        let place = |graph: usize, name: &str| {
            let tensors = &graphs[graph].tensors;
            layout.places[graph][tensors.iter().position(|t| t.name == name).unwrap()]
        };
        assert_eq!(place(0, "kept"), place(1, "kept"));
        assert_eq!(place(0, "own"), place(1, "own"));
        assert_eq!([place(0, "kept").area, place(0, "own").area], [Area::Heap, Area::Persistent]);
        // A sum belongs to its graph.
        let mut starts = [place(0, "kept"), place(0, "sum"), place(1, "sum")].map(|place| place.offset);
        starts.sort_unstable();
        assert!(starts.windows(2).all(|pair| pair[0] + 400 <= pair[1]), "{starts:?}");
        assert!(starts[0] >= heap.protocol_bytes && starts[2] + 400 <= heap.bytes);
    }
}
