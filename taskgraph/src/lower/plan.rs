//! The plan that all ranks share.

use super::classes::Classes;
use super::collectives::{Cut, CutStep, Uses, cut_collectives, cut_exchange};
use super::joined::Joins;
use super::layouts::Layouts;
use super::own_rows::spread;
use super::owned::Owned;
use super::paired::paired_weights;
use super::stores::{Stored, Stores, Storing, can_store};
use super::types::{
    Dims, FIRST_EVENT, LocalClass, NONE, OwnStep, Part, PlanExchange, PlanTensor, Slot, SlotKind,
};
use crate::collective::{
    Buffer, JOINED_ROWS, Operand, Placed, Step, SumRows, local_copies, moves, rows_kind,
};
use crate::error::BuildError;
use crate::op_graph::{OpGraph, Role, Rows, Tensor};
use crate::options::BuildOptions;
use crate::registry::Registry;
use crate::split::Sharding;
use crate::task_graph::Space;
use crate::task_type::ExpansionOperand;
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// What an operator has to do with collectives around it.
#[derive(Clone, Copy)]
struct Around<'a> {
    /// If each rank has its own rows of an input, a sum: the slot in which that sum first sends.
    completes: Option<u32>,
    /// Present if it stores its output with the ranks that sum it.
    storing: Option<&'a Storing>,
}

/// The plan that all ranks share; see the module's documentation.
#[derive(Debug)]
pub(crate) struct Plan {
    pub graph: OpGraph,
    pub options: BuildOptions,
    pub tensors: Vec<PlanTensor>,
    pub slots: Vec<Slot>,
    pub exchanges: Vec<PlanExchange>,
    pub parts: Vec<Part>,
    /// The part of each rank and slot, or [`NONE`].
    pub part_of: Vec<Vec<u32>>,
    pub op_names: Vec<String>,
    pub notes: Vec<String>,
}

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
        // Buffers of collectives whose input is pushed. They must exist before the operator that pushes.
        let mut pushed_into: FxHashMap<usize, Vec<u32>> = FxHashMap::default();
        // The same for those whose input is stored with its owners, with the slots of the stores.
        let mut stored_into: FxHashMap<usize, (Vec<u32>, u32)> = FxHashMap::default();
        // The slots in which collectives first send, by their output.
        let mut first_sends: FxHashMap<u32, u32> = FxHashMap::default();
        let (mut joins, mut stores) = (Joins::default(), Stores::default());
        for (index, op) in graph.ops.iter().enumerate() {
            if let Some(cut) = &cuts[index] {
                plan.op_names.push(op.name.clone());
                let (buffers, stores) = match stored_into.remove(&index) {
                    Some((buffers, slot)) => (Some(buffers), Some(slot)),
                    None => (pushed_into.remove(&index), None),
                };
                let inputs = plan.kept_inputs(&graph, index, cut);
                first_sends.insert(op.outputs[0], stores.unwrap_or(plan.slots.len() as u32));
                plan.add_collective(&graph, index, cut, (buffers, stores), &inputs)?;
                continue;
            }
            let pushed = uses.pushed_by(&graph, index, &cuts);
            let dealt = uses.dealt_by(&graph, index, &cuts);
            let own = owned.input_of(&op.inputs);
            let completes = own.and_then(|input| first_sends.get(&op.inputs[input]).copied());
            let class = classes.cut(op, pushed.is_some(), dealt, own, &mut plan.parts)?;
            let stored = uses.stored_by(&graph, index, &cuts);
            let storing = match stored.and_then(|(output, reader)| Some((output, cuts[reader].as_ref()?))) {
                Some((output, cut)) => {
                    let (step, tiles) = stores.split(&class, output, &mut plan.parts).ok_or_else(|| {
                        BuildError::op(
                            &op.name,
                            "has tiles that belong to several owners; set allreduce.stored_tiles to 0",
                        )
                    })?;
                    let source = &graph.tensors[op.outputs[output] as usize];
                    let buffers = plan.add_buffers(source, &cut.lowered.buffers);
                    Some(Storing {
                        step,
                        tiles,
                        buffer: buffers[cut.lowered.stored_into.unwrap_or(0)],
                        buffers,
                    })
                }
                None => None,
            };
            let around = Around { completes, storing: storing.as_ref() };
            let first_store = plan.add_compute(&graph, index, &class, around, &mut joins, |plan| {
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

    /// The tensor that owns the memory of `tensor`, and the start of `tensor` in it on `rank`.
    pub fn root(&self, tensor: u32, rank: u32) -> (u32, super::overlap::Shift) {
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

    /// Makes room for [`CLOSING_EVENT`] on every rank.
    pub fn add_closing_event(&mut self) {
        self.exchanges.iter_mut().flat_map(|e| &mut e.first_event).for_each(|e| *e += 1);
    }

    fn add_tensor(&mut self, tensor: PlanTensor) -> u32 {
        self.tensors.push(tensor);
        self.tensors.len() as u32 - 1
    }

    pub(super) fn add_slot(
        &mut self,
        kind: SlotKind,
        inputs: Vec<u32>,
        outputs: Vec<u32>,
        parts: impl Fn(u32) -> u32,
    ) {
        let op = self.op_names.len() as u32 - 1;
        self.slots.push(Slot { op, kind, inputs, outputs });
        for (rank, slots) in self.part_of.iter_mut().enumerate() {
            slots.push(parts(rank as u32));
        }
    }

    /// `push` creates the buffer for an output that is pushed: (output, buffer). Returns the first slot of the step that stores its tiles
    /// with their owners, if there is one.
    fn add_compute(
        &mut self,
        graph: &OpGraph,
        index: usize,
        class: &Arc<Vec<LocalClass>>,
        around: Around<'_>,
        joins: &mut Joins,
        push: impl FnOnce(&mut Self) -> Option<(u8, u32)>,
    ) -> Option<u32> {
        let op = &graph.ops[index];
        let mut first_store = None;
        let mut temporaries = Vec::new();
        for (i, (suffix, ty)) in class[0].temporaries.iter().enumerate() {
            temporaries.push(self.add_tensor(PlanTensor {
                name: format!("{}{suffix}", op.name),
                dtype: ty.dtype,
                rows: ty.rows,
                source: None,
                activation: true,
                space: if class[0].own.is_some_and(|own| own.temporary == i) {
                    Space::Symmetric
                } else {
                    Space::Device
                },
                output: false,
                alias: None,
                dims: class.iter().map(|c| Dims::new(&c.temporaries[i].1.dims)).collect(),
                paired: false,
                region_dims: None,
            }));
        }
        let pushed = push(self);
        for (i, step) in class[0].steps.iter().enumerate() {
            self.op_names.push(format!("{}{}", op.name, step.suffix));
            let resolve = |operands: &[ExpansionOperand]| -> Vec<u32> {
                operands
                    .iter()
                    .map(|operand| match *operand {
                        ExpansionOperand::Input(i) => op.inputs[i],
                        ExpansionOperand::Output(i) => op.outputs[i],
                        ExpansionOperand::Temporary(i) => temporaries[i],
                    })
                    .collect()
            };
            if let Some(storing) = around.storing.filter(|storing| storing.step == i) {
                first_store = Some(self.add_stores(storing, resolve(&step.inputs)));
                continue;
            }
            let mut outputs = resolve(&step.outputs);
            // If there are several steps, the one that writes the operator's output pushes.
            let push = pushed.and_then(|(pushed, buffer)| {
                let output = ExpansionOperand::Output(usize::from(pushed));
                let at = step.outputs.iter().position(|&operand| operand == output)?;
                outputs[at] = buffer;
                Some(at as u8)
            });
            let joined = (i == 0 && push.is_none()).then(|| self.joined(joins, class, &op.inputs)).flatten();
            if let Some((sum, parts)) = joined {
                let mut others = step.inputs.clone();
                others.retain(|&operand| operand != sum);
                self.extend_sum(&resolve(&others), &outputs, &parts);
            } else {
                let kind = SlotKind::Compute { push };
                let part = |rank: u32| class[rank as usize].steps[i].part;
                joins.note(self.slots.len(), step);
                self.add_slot(kind, resolve(&step.inputs), outputs, part);
            }
            if let Some(own) = class[0].own.filter(|own| own.step == i) {
                let kind = graph.tensors[op.inputs[own.input] as usize].rows;
                self.add_spread(own, temporaries[own.temporary], kind, around.completes);
            }
        }
        first_store
    }

    /// The parts that do the work of the last slot, a sum, and of the operator's first step, which reads its rows; and the step's input
    /// that is the sum.
    fn joined(
        &mut self,
        joins: &mut Joins,
        class: &[LocalClass],
        inputs: &[u32],
    ) -> Option<(ExpansionOperand, Vec<u32>)> {
        if self.options.target.tuned(&JOINED_ROWS) == 0 {
            return None;
        }
        let sums: Vec<u32> = self.part_of.iter().filter_map(|slots| slots.last().copied()).collect();
        joins.join(&self.slots, &sums, inputs, class, &mut self.parts)
    }

    /// Gives the last slot, a sum, these parts and further operands.
    fn extend_sum(&mut self, inputs: &[u32], outputs: &[u32], parts: &[u32]) {
        if let Some(slot) = self.slots.last_mut() {
            slot.inputs.extend(inputs);
            slot.outputs.extend(outputs);
        }
        for (slots, &joined) in self.part_of.iter_mut().zip(parts) {
            slots.last_mut().into_iter().for_each(|part| *part = joined);
        }
    }

    /// Adds the slots of a step that stores its output with the owners. Returns the first of them.
    fn add_stores(&mut self, storing: &Storing, inputs: Vec<u32>) -> u32 {
        let (first, exchange) = (self.slots.len() as u32, self.exchanges.len() as u32);
        let Stored { table, to_peers, arrive, own } = &*storing.tiles;
        let (table, target) = (table.clone(), storing.buffer);
        let (first_event, beside_producer) = (Vec::new(), true);
        self.exchanges.push(PlanExchange { table, target, first_event, completes: None, beside_producer });
        self.add_slot(SlotKind::Store { exchange }, inputs.clone(), vec![], |r| to_peers[r as usize]);
        self.add_slot(SlotKind::Arrive { exchange }, vec![], vec![target], |r| arrive[r as usize]);
        self.add_slot(SlotKind::Compute { push: None }, inputs, vec![target], |r| own[r as usize]);
        first
    }

    /// Each rank sends its own rows of a tensor to the others.
    fn add_spread(&mut self, own: OwnStep, tensor: u32, kind: Rows, completes: Option<u32>) {
        let exchange = spread(own, &self.tensors[tensor as usize].dims[0], kind, &self.options);
        let CutStep::Exchange { table, copy, arrive } =
            cut_exchange(&exchange, None, self.options.world, &mut self.parts)
        else {
            return;
        };
        let number = self.exchanges.len() as u32;
        let (first_event, beside_producer) = (Vec::new(), exchange.beside_producer);
        self.exchanges.push(PlanExchange { table, target: tensor, first_event, completes, beside_producer });
        self.add_slot(SlotKind::Copy { exchange: number }, vec![tensor], vec![], |r| copy[r as usize]);
        self.add_slot(SlotKind::Arrive { exchange: number }, vec![], vec![tensor], |r| arrive[r as usize]);
    }

    /// Memory in the symmetric heap for a collective with first input `of`.
    fn add_buffers(&mut self, of: &Tensor, buffers: &[Buffer]) -> Vec<u32> {
        let world = self.options.world;
        buffers
            .iter()
            .map(|buffer| {
                let dims: Vec<u64> = buffer.dims.iter().map(|&d| u64::from(d)).collect();
                self.add_tensor(PlanTensor {
                    name: format!("{}{}", of.name, buffer.suffix),
                    dtype: buffer.dtype,
                    rows: Rows::Fixed,
                    source: None,
                    activation: true,
                    space: Space::Symmetric,
                    output: false,
                    alias: None,
                    dims: vec![Dims::new(&dims); world as usize],
                    paired: false,
                    region_dims: None,
                })
            })
            .collect()
    }

    /// The inputs of a collective. Its puts may still read a persistent tensor when a later operator of the graph writes that. So they
    /// read a copy.
    fn kept_inputs(&mut self, graph: &OpGraph, index: usize, cut: &Cut) -> Vec<u32> {
        let op = &graph.ops[index];
        let reads =
            |step: &Step, input| matches!(step, Step::Exchange(e) if e.source == Operand::Input(input));
        let sent = |input| cut.lowered.steps.iter().any(|step| reads(step, input));
        let mut inputs = op.inputs.clone();
        for (input, tensor) in inputs.iter_mut().enumerate() {
            let source = &graph.tensors[*tensor as usize];
            if matches!(source.role, Role::Persistent { .. })
                && graph.ops[index + 1..].iter().any(|later| later.outputs.contains(tensor))
                && sent(input)
            {
                let name = format!("{}.kept", source.name);
                let copy = Tensor { name, role: Role::Activation, output: false, ..source.clone() };
                let mut copy = PlanTensor::new(index, &copy, self.options.world);
                copy.source = None;
                let copy = self.add_tensor(copy);
                self.add_copy(source, *tensor, copy);
                *tensor = copy;
            }
        }
        inputs
    }

    /// `buffers` and `stores`: its buffers, if they exist already, and the slot in which its producer sends, if that does.
    fn add_collective(
        &mut self,
        graph: &OpGraph,
        index: usize,
        cut: &Cut,
        (buffers, stores): (Option<Vec<u32>>, Option<u32>),
        inputs: &[u32],
    ) -> Result<(), BuildError> {
        let (op, lowered) = (&graph.ops[index], &cut.lowered);
        let (source, output) =
            (&graph.tensors[op.inputs[0] as usize], &graph.tensors[op.outputs[0] as usize]);
        let buffers = buffers.unwrap_or_else(|| self.add_buffers(source, &lowered.buffers));
        let arrives =
            |operand| lowered.steps.iter().any(|s| matches!(s, Step::Exchange(e) if e.target == operand));
        // Peers only write to the symmetric heap. A tensor elsewhere gets its value from there.
        let staged = output.role != Role::Activation
            && (arrives(Operand::Output)
                || lowered.output_in_input.is_some()
                || lowered.output_in_buffer.is_some());
        let written = match staged {
            false => op.outputs[0],
            true => {
                let tensor = Tensor {
                    name: format!("{}.staged", output.name),
                    role: Role::Activation,
                    output: false,
                    ..output.clone()
                };
                let mut tensor = PlanTensor::new(index, &tensor, self.options.world);
                tensor.source = None;
                self.add_tensor(tensor)
            }
        };
        if arrives(Operand::Output) {
            self.tensors[written as usize].space = Space::Symmetric;
        }
        let alias = |of: u32, placed: &Placed| Some((of, placed.dim, placed.first.clone()));
        if let Some(placed) = &lowered.input_in_output {
            self.tensors[op.inputs[0] as usize].alias = alias(written, placed);
        }
        if let Some(placed) = &lowered.output_in_input {
            self.tensors[written as usize].alias = alias(op.inputs[0], placed);
        }
        if let Some((buffer, placed)) = &lowered.output_in_buffer {
            self.tensors[written as usize].alias = alias(buffers[*buffer], placed);
        }
        let resolve = |operand: &Operand| match *operand {
            Operand::Input(i) => inputs[i],
            Operand::Output => written,
            Operand::Buffer(b) => buffers[b],
        };
        let mut first_slot: Vec<u32> = stores.into_iter().collect();
        for (step, parts) in lowered.steps.iter().zip(&cut.steps) {
            match (step, parts) {
                (Step::Exchange(step), CutStep::Exchange { table, copy, arrive }) => {
                    let exchange = self.exchanges.len() as u32;
                    let target = resolve(&step.target);
                    let completes = step.completes.and_then(|s| first_slot.get(s).copied());
                    first_slot.push(self.slots.len() as u32);
                    let (table, first_event) = (table.clone(), Vec::new());
                    let beside_producer = step.beside_producer;
                    self.exchanges.push(PlanExchange {
                        table,
                        target,
                        first_event,
                        completes,
                        beside_producer,
                    });
                    let kind = SlotKind::Copy { exchange };
                    self.add_slot(kind, vec![resolve(&step.source)], vec![], |r| copy[r as usize]);
                    let kind = SlotKind::Arrive { exchange };
                    self.add_slot(kind, vec![], vec![target], |r| arrive[r as usize]);
                }
                (Step::Tasks(step), CutStep::Tasks { part }) => {
                    first_slot.push(self.slots.len() as u32);
                    let inputs = step.inputs.iter().map(resolve).collect();
                    let outputs = step.outputs.iter().map(resolve).collect();
                    self.add_slot(SlotKind::Collective, inputs, outputs, |r| part[r as usize]);
                }
                _ => return Err(BuildError::op(&op.name, "has steps without parts")),
            }
        }
        if staged {
            self.add_copy(output, written, op.outputs[0]);
        }
        Ok(())
    }

    /// Each rank copies its whole part of `like` from one tensor to another.
    fn add_copy(&mut self, like: &Tensor, from: u32, to: u32) {
        let world = self.options.world;
        let kind = if like.dims.len() == 2 { like.rows } else { Rows::Fixed };
        let own = |rank| {
            let dims = like.sharding.local_dims(&like.dims, rank, world);
            moves(&dims, &Sharding::Replicated, &Sharding::Replicated, 1).swap_remove(0)
        };
        let lists: Vec<_> = (0..world).map(own).collect();
        let operands = (Operand::Input(0), Operand::Output);
        let target = self.options.target.clone();
        let step = local_copies(&lists, operands, like.dims.len() - 1, rows_kind(kind), &target);
        let first = self.parts.len() as u32;
        for tasks in step.tasks {
            self.parts.push(Part {
                type_name: step.task_type.into(),
                params: step.params.clone(),
                rank_param: None,
                stacked: None,
                scratch_bytes: 0,
                tasks,
            });
        }
        let parts = &self.parts;
        let numbers: Vec<u32> = (first..first + world)
            .map(|part| if parts[part as usize].tasks.is_empty() { NONE } else { part })
            .collect();
        self.add_slot(SlotKind::Collective, vec![from], vec![to], |rank| numbers[rank as usize]);
    }

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
