//! The parts of a rank that all targets share.

use crate::outputs::Outputs;
use crate::tensors::Slot;
use std::sync::Arc;
use taskgraph::op_graph::Role;
use taskgraph::task_graph::{TaskGraph, TensorEntry};

/// The parts of a rank that all targets share.
pub struct Common {
    pub(crate) graphs: Vec<TaskGraph>,
    pub(crate) slots: Vec<Vec<Slot>>,
    pub(crate) outputs: Arc<Outputs>,
    pub(crate) constant_bytes: u64,
}

impl Common {
    /// The task graphs.
    pub fn graphs(&self) -> &[TaskGraph] {
        &self.graphs
    }

    /// Bytes of weights and constants on this rank.
    pub fn constant_bytes(&self) -> u64 {
        self.constant_bytes
    }

    /// Slots of the graph input `name` in all graphs that have it with room for `bytes`.
    pub(crate) fn inputs(&self, name: &str, bytes: usize) -> Vec<Slot> {
        let all = self.graphs.iter().zip(&self.slots).flat_map(|(g, slots)| g.tensors.iter().zip(slots));
        all.filter(|(tensor, slot)| {
            tensor.name == name && matches!(tensor.role, Role::Input) && bytes as u64 <= slot.bytes
        })
        .map(|(_, &slot)| slot)
        .collect()
    }

    /// A tensor of graph `graph`, and its slot.
    pub(crate) fn tensor(&self, graph: usize, name: &str) -> Option<(&TensorEntry, Slot)> {
        let tensors = &self.graphs.get(graph)?.tensors;
        let index = tensors.iter().position(|t| t.name == name)?;
        Some((&tensors[index], self.slots[graph][index]))
    }
}
