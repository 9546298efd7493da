//! Adds the slots of a collective, and places its operands.

use super::Plan;
use crate::collective::{Operand, Placed, Step, local_copies, moves, rows_kind};
use crate::error::BuildError;
use crate::lower::collectives::{Cut, CutStep};
use crate::lower::types::{NONE, Part, PlanTensor, SlotKind};
use crate::op_graph::{Op, OpGraph, Role, Rows, Tensor};
use crate::split::Sharding;
use crate::task_graph::Space;

impl Plan {
    /// The inputs of a collective. Its puts may still read a persistent tensor when a later operator of the graph writes that tensor. So
    /// they read a copy.
    pub(super) fn kept_inputs(&mut self, graph: &OpGraph, index: usize, cut: &Cut) -> Vec<u32> {
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
                let copy = self.add_like(source, ".kept");
                self.add_copy(source, *tensor, copy);
                *tensor = copy;
            }
        }
        inputs
    }

    /// Adds the slots of a collective. If its producer pushes or stores, `buffers` exist already. If it stores, `first_store` is the slot
    /// in which it sends.
    pub(super) fn add_collective(
        &mut self,
        graph: &OpGraph,
        op: &Op,
        cut: &Cut,
        (buffers, first_store): (Option<Vec<u32>>, Option<u32>),
        inputs: &[u32],
    ) -> Result<(), BuildError> {
        let lowered = &cut.lowered;
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
        let written = if staged { self.add_like(output, ".staged") } else { op.outputs[0] };
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
        // The first slot of each step so far. If the producer stores, its stores come first.
        let mut first_slots: Vec<u32> = first_store.into_iter().collect();
        for (step, parts) in lowered.steps.iter().zip(&cut.steps) {
            match (step, parts) {
                (Step::Exchange(step), CutStep::Exchange { table, copy, arrive }) => {
                    let completes = step.completes.and_then(|s| first_slots.get(s).copied());
                    first_slots.push(self.slots.len() as u32);
                    let target = resolve(&step.target);
                    let exchange = self.add_exchange(table, target, completes, step.beside_producer);
                    self.add_copies(exchange, resolve(&step.source), copy, arrive);
                }
                (Step::Tasks(step), CutStep::Tasks { part }) => {
                    first_slots.push(self.slots.len() as u32);
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

    /// Adds an activation of the type and sharding of `tensor`. The op graph does not have it.
    fn add_like(&mut self, tensor: &Tensor, suffix: &str) -> u32 {
        let name = format!("{}{suffix}", tensor.name);
        let like = Tensor { name, role: Role::Activation, output: false, ..tensor.clone() };
        let like = PlanTensor { source: None, ..PlanTensor::new(0, &like, self.options.world) };
        self.add_tensor(like)
    }

    /// Adds a slot in which each rank copies its whole part of `like` from one tensor to another.
    fn add_copy(&mut self, like: &Tensor, from: u32, to: u32) {
        let world = self.options.world;
        let kind = if like.dims.len() == 2 { like.rows } else { Rows::Fixed };
        let own = |rank| {
            let dims = like.sharding.local_dims(&like.dims, rank, world);
            moves(&dims, &Sharding::Replicated, &Sharding::Replicated, 1).swap_remove(0)
        };
        let lists: Vec<_> = (0..world).map(own).collect();
        let operands = (Operand::Input(0), Operand::Output);
        let target = &self.options.target;
        let step = local_copies(&lists, operands, like.dims.len() - 1, rows_kind(kind), target);
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
}
