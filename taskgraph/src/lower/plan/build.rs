//! Makes the plan of an op graph: decides about the collectives and the cut of every operator, then adds the slots in order.

use super::Plan;
use super::compute::Around;
use crate::collective::SumRows;
use crate::error::BuildError;
use crate::lower::classes::Classes;
use crate::lower::collectives::{Cut, Uses, cut_collectives};
use crate::lower::joined::Joins;
use crate::lower::layouts::Layouts;
use crate::lower::owned::Owned;
use crate::lower::paired::paired_weights;
use crate::lower::stores::{Stores, Storing, can_store};
use crate::lower::types::{Dims, FIRST_EVENT, LocalClass, PlanTensor};
use crate::op_graph::{Op, OpGraph};
use crate::options::BuildOptions;
use crate::registry::Registry;
use rustc_hash::FxHashMap;

impl Plan {
    /// The plan of a graph that has been sharded and fused.
    pub fn new(graph: OpGraph, registry: &Registry, options: &BuildOptions) -> Result<Plan, BuildError> {
        let world = options.world;
        let mut plan = Plan {
            tensors: graph.tensors.iter().enumerate().map(|(i, t)| PlanTensor::new(i, t, world)).collect(),
            graph: OpGraph::new("", graph.capacity),
            options: options.clone(),
            slots: Vec::new(),
            exchanges: Vec::new(),
            parts: Vec::new(),
            part_of: vec![Vec::new(); world as usize],
            op_names: Vec::new(),
            notes: Vec::new(),
        };
        for weight in paired_weights(&graph, registry, &options.target)? {
            plan.tensors[weight as usize].paired = true;
        }
        let uses = Uses::new(&graph);
        let layouts = Layouts::new(&graph, registry, options, &uses);
        let mut classes = Classes::new(&graph, registry, &options.target, world, &layouts);
        let owned = Owned::new(&graph, registry, options, &uses, &mut classes, &mut plan.parts)?;
        let can_store = can_store(&graph, options, &uses, &owned, &mut classes, &mut plan.parts)?;
        let rows: Vec<(SumRows, bool)> = owned.rows.iter().copied().zip(can_store).collect();
        let cuts = cut_collectives(&graph, registry, options, &uses, &rows, &mut plan.parts)?;
        plan.notes.extend(cuts.iter().flatten().flat_map(|cut| cut.lowered.notes.clone()));
        for (index, tensor) in plan.tensors.iter_mut().enumerate() {
            if let Some(types) = layouts.of(index as u32) {
                tensor.rows = types[0].rows;
                tensor.dims = types.iter().map(|ty| Dims::new(&ty.dims)).collect();
            }
        }
        // The buffers of collectives whose input is pushed, by collective. The operator that pushes comes first and needs them.
        let mut pushed_into: FxHashMap<usize, Vec<u32>> = FxHashMap::default();
        // The same for collectives whose input is stored with its owners, and the slot of the stores.
        let mut stored_into: FxHashMap<usize, (Vec<u32>, u32)> = FxHashMap::default();
        // The slot in which each collective first sends, by its output.
        let mut first_sends: FxHashMap<u32, u32> = FxHashMap::default();
        let (mut joins, mut stores) = (Joins::default(), Stores::default());
        for (index, op) in graph.ops.iter().enumerate() {
            if let Some(cut) = &cuts[index] {
                plan.op_names.push(op.name.clone());
                let (buffers, first_store) = match stored_into.remove(&index) {
                    Some((buffers, slot)) => (Some(buffers), Some(slot)),
                    None => (pushed_into.remove(&index), None),
                };
                let inputs = plan.kept_inputs(&graph, index, cut);
                first_sends.insert(op.outputs[0], first_store.unwrap_or(plan.slots.len() as u32));
                plan.add_collective(&graph, op, cut, (buffers, first_store), &inputs)?;
                continue;
            }
            let pushed = uses.pushed_by(&graph, index, &cuts);
            let dealt = uses.dealt_by(&graph, index, &cuts);
            let own = owned.input_of(&op.inputs);
            let completes = own.and_then(|input| first_sends.get(&op.inputs[input]).copied());
            let class = classes.cut(op, pushed.is_some(), dealt, own, &mut plan.parts)?;
            let stored = uses.stored_by(&graph, index, &cuts);
            let storing = match stored.and_then(|(output, reader)| Some((output, cuts[reader].as_deref()?))) {
                Some((output, cut)) => Some(plan.storing(&graph, op, &class, (output, cut), &mut stores)?),
                None => None,
            };
            let around = Around { completes, storing: storing.as_ref() };
            let first_store = plan.add_compute(&graph, op, &class, around, &mut joins, |plan| {
                let (output, reader) = pushed?;
                let cut = cuts[reader].as_ref()?;
                let source = &graph.tensors[graph.ops[reader].inputs[0] as usize];
                let buffers = plan.add_buffers(source, &cut.lowered.buffers);
                let into = *buffers.get(cut.lowered.push?)?;
                pushed_into.insert(reader, buffers);
                Some((output, into))
            });
            if let (Some((_, reader)), Some(Storing { buffers, .. }), Some(slot)) =
                (stored, storing, first_store)
            {
                stored_into.insert(reader, (buffers, slot));
            }
        }
        plan.number_remote_events()?;
        plan.graph = graph;
        Ok(plan)
    }

    /// How an operator stores output `output` with the ranks that sum it in the collective `cut`. Adds the collective's buffers.
    fn storing(
        &mut self,
        graph: &OpGraph,
        op: &Op,
        class: &[LocalClass],
        (output, cut): (usize, &Cut),
        stores: &mut Stores,
    ) -> Result<Storing, BuildError> {
        let (step, tiles) = stores.split(class, output, &mut self.parts).ok_or_else(|| {
            BuildError::op(
                &op.name,
                "has tiles that belong to several owners; set allreduce.stored_tiles to 0",
            )
        })?;
        let source = &graph.tensors[op.outputs[output] as usize];
        let buffers = self.add_buffers(source, &cut.lowered.buffers);
        let buffer = buffers[cut.lowered.stored_into.unwrap_or(0)];
        Ok(Storing { step, tiles, buffer, buffers })
    }

    /// Numbers the events that peers trigger on each rank.
    fn number_remote_events(&mut self) -> Result<(), BuildError> {
        let world = self.options.world;
        for rank in 0..world {
            let mut next = FIRST_EVENT;
            for exchange in &mut self.exchanges {
                exchange.first_event.push(next);
                next = u32::try_from(exchange.table.triggers[rank as usize].len())
                    .ok()
                    .and_then(|events| events.checked_add(next))
                    .ok_or_else(|| BuildError::Graph("more than 2^32 events; use fewer tiles".into()))?;
            }
        }
        Ok(())
    }
}
