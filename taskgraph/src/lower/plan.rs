//! The plan that all ranks share: slots, the tensors that they access, the exchanges between ranks, and each rank's parts.
//!
//! This file has the plan itself, questions about it, and what its builder adds to it piece by piece. `build` makes a plan from an op
//! graph: `compute` adds the slots of operators that tasks compute, `collective` those of collectives.

mod build;
mod collective;
mod compute;

use super::overlap::Shift;
use super::types::{Dims, Part, PlanExchange, PlanTensor, Slot, SlotKind, Table};
use crate::collective::Buffer;
use crate::dtype::DType;
use crate::op_graph::{OpGraph, Role, Rows, Tensor};
use crate::options::BuildOptions;
use crate::task_graph::Space;
use std::sync::Arc;

/// What all ranks have in common, and each rank's parts.
#[derive(Debug)]
pub(crate) struct Plan {
    pub graph: OpGraph,
    pub options: BuildOptions,
    pub tensors: Vec<PlanTensor>,
    pub slots: Vec<Slot>,
    pub exchanges: Vec<PlanExchange>,
    pub parts: Vec<Part>,
    /// For each rank and slot, the index in `parts`, or `NONE`.
    pub part_of: Vec<Vec<u32>>,
    pub op_names: Vec<String>,
    pub notes: Vec<String>,
}

impl Plan {
    /// The tensor that owns the memory of `tensor`, and the start of `tensor` in it on `rank`.
    pub fn root(&self, tensor: u32, rank: u32) -> (u32, Shift) {
        match &self.tensors[tensor as usize].alias {
            Some((root, dim, first)) => (*root, (*dim, first[rank as usize])),
            None => (tensor, (0, 0)),
        }
    }

    /// The part of a slot on a rank, if it has tasks there.
    pub fn part(&self, rank: u32, slot: usize) -> Option<&Part> {
        self.parts.get(self.part_of[rank as usize][slot] as usize)
    }

    /// True if the tensor persists across iterations and may be written.
    pub fn is_persistent(&self, tensor: u32) -> bool {
        self.tensors[tensor as usize]
            .source
            .is_some_and(|s| matches!(self.graph.tensors[s as usize].role, Role::Persistent { .. }))
    }

    /// True if both ranks are cut into the same tasks, and these access the same places.
    pub fn same_cut(&self, a: u32, b: u32) -> bool {
        let placed = |(_, _, first): &(u32, usize, Vec<u32>)| first[a as usize] == first[b as usize];
        self.part_of[a as usize] == self.part_of[b as usize]
            && self.tensors.iter().filter_map(|t| t.alias.as_ref()).all(placed)
    }

    /// Makes room for `CLOSING_EVENT` on every rank.
    pub fn add_closing_event(&mut self) {
        self.exchanges.iter_mut().flat_map(|e| &mut e.first_event).for_each(|e| *e += 1);
    }

    fn add_tensor(&mut self, tensor: PlanTensor) -> u32 {
        self.tensors.push(tensor);
        self.tensors.len() as u32 - 1
    }

    /// Adds an activation that the op graph does not have. `dims`: on each rank.
    fn add_activation(
        &mut self,
        name: String,
        dtype: DType,
        rows: Rows,
        space: Space,
        dims: Vec<Dims>,
    ) -> u32 {
        self.add_tensor(PlanTensor {
            name,
            dtype,
            rows,
            source: None,
            activation: true,
            space,
            output: false,
            alias: None,
            dims,
            paired: false,
            region_dims: None,
        })
    }

    /// Adds the buffers of a collective with first input `of`. They are in the symmetric heap.
    fn add_buffers(&mut self, of: &Tensor, buffers: &[Buffer]) -> Vec<u32> {
        let world = self.options.world as usize;
        buffers
            .iter()
            .map(|buffer| {
                let dims: Vec<u64> = buffer.dims.iter().map(|&d| u64::from(d)).collect();
                let (name, dims) = (format!("{}{}", of.name, buffer.suffix), vec![Dims::new(&dims); world]);
                self.add_activation(name, buffer.dtype, Rows::Fixed, Space::Symmetric, dims)
            })
            .collect()
    }

    /// Adds a slot of the operator that was named last. `parts`: the index of each rank's part, or `NONE`.
    fn add_slot(&mut self, kind: SlotKind, inputs: Vec<u32>, outputs: Vec<u32>, parts: impl Fn(u32) -> u32) {
        let op = self.op_names.len() as u32 - 1;
        self.slots.push(Slot { op, kind, inputs, outputs });
        for (rank, slots) in self.part_of.iter_mut().enumerate() {
            slots.push(parts(rank as u32));
        }
    }

    /// Adds an exchange, and returns its index. Its events are numbered once all exchanges are known.
    fn add_exchange(
        &mut self,
        table: &Arc<Table>,
        target: u32,
        completes: Option<u32>,
        beside_producer: bool,
    ) -> u32 {
        let (table, first_event) = (table.clone(), Vec::new());
        self.exchanges.push(PlanExchange { table, target, first_event, completes, beside_producer });
        self.exchanges.len() as u32 - 1
    }

    /// Adds the slots of an exchange whose sends are copies of `source`: the copies, then their arrival.
    fn add_copies(&mut self, exchange: u32, source: u32, copy: &[u32], arrive: &[u32]) {
        let target = self.exchanges[exchange as usize].target;
        self.add_slot(SlotKind::Copy { exchange }, vec![source], vec![], |r| copy[r as usize]);
        self.add_slot(SlotKind::Arrive { exchange }, vec![], vec![target], |r| arrive[r as usize]);
    }
}
