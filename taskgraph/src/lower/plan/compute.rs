//! Adds the slots of an operator that tasks of registered types compute, step by step, and what its steps send.

use super::Plan;
use crate::collective::{JOINED_ROWS, JOINED_SUMS};
use crate::dtype::DType;
use crate::lower::collectives::{CutStep, cut_exchange};
use crate::lower::joined::Joins;
use crate::lower::own_rows::spread;
use crate::lower::stores::{Stored, Storing};
use crate::lower::types::{Dims, LocalClass, OwnStep, Slot, SlotKind};
use crate::op_graph::{Op, OpGraph, Rows};
use crate::task_graph::{Allreduce, Space};
use crate::task_type::ExpansionOperand;

/// The most bytes of a row of copied summands and residual for which whole sums are joined. A GPU task has the row in its shared memory, where it
/// has 88 KiB on Hopper. A sum in column tiles needs no room for whole rows.
const MOST_JOINED_BYTES: u64 = 80 << 10;
/// The most words of a row, of all ranks, for which whole sums of pushed words are joined. One task polls them all, where otherwise each
/// column tile has a task.
const MOST_JOINED_WORDS: u64 = 20 << 10;
/// The most ranks for that. A thread has four words of each rank in registers at a time.
const MOST_JOINED_RANKS: u32 = 8;

/// What an operator has to do with the collectives before and after it.
#[derive(Clone, Copy)]
pub(super) struct Around<'a> {
    /// If each rank has its own rows of an input, a sum: the slot in which that sum first sends.
    pub completes: Option<u32>,
    /// Present if the operator stores its output with the ranks that sum it.
    pub storing: Option<&'a Storing>,
}

impl Plan {
    /// Adds the temporaries and slots of an operator. `push` adds the buffer into which an output is pushed: (output, buffer). Returns the
    /// first slot of the step that stores its tiles with their owners, if there is one.
    pub(super) fn add_compute(
        &mut self,
        graph: &OpGraph,
        op: &Op,
        class: &[LocalClass],
        around: Around<'_>,
        joins: &mut Joins,
        push: impl FnOnce(&mut Self) -> Option<(u8, u32)>,
    ) -> Option<u32> {
        let mut first_store = None;
        let mut temporaries = Vec::new();
        for (i, (suffix, ty)) in class[0].temporaries.iter().enumerate() {
            let is_sent = class[0].own.is_some_and(|own| own.temporary == i);
            let space = if is_sent { Space::Symmetric } else { Space::Device };
            let name = format!("{}{suffix}", op.name);
            let dims = class.iter().map(|c| Dims::new(&c.temporaries[i].1.dims)).collect();
            temporaries.push(self.add_activation(name, ty.dtype, ty.rows, space, dims));
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
                if class[0].own.is_none() {
                    self.await_whole_rows(joins);
                }
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

    /// The parts that do the work of the last slot, a sum, together with the operator's first step, which reads the sum's rows; and which
    /// input of the step the sum is.
    fn joined(
        &mut self,
        joins: &mut Joins,
        class: &[LocalClass],
        inputs: &[u32],
    ) -> Option<(ExpansionOperand, Vec<u32>)> {
        let (target, sum) = (&self.options.target, self.slots.last()?);
        let [written] = sum.outputs[..] else { return None };
        if self.tensors[written as usize].dtype != DType::F32 {
            return None;
        }
        joins.within = target.tuned(&JOINED_ROWS) != 0;
        // Who asks for a lowering gets one `reduce` for each of its tiles, unless the knob says otherwise.
        let least = if self.options.allreduce == Allreduce::Auto { 1 } else { 2 };
        joins.whole = target.tuned(&JOINED_SUMS) >= least && self.has_short_rows(sum);
        let sums: Vec<u32> = self.part_of.iter().filter_map(|slots| slots.last().copied()).collect();
        joins.join(&self.slots, &sums, inputs, class, &mut self.parts)
    }

    /// Whether a task can have whole rows of what a `reduce` sums: the ranks' summands and the residual.
    fn has_short_rows(&self, reduce: &Slot) -> bool {
        let of_row = |&input: &u32| {
            let tensor = &self.tensors[input as usize];
            let elements = match tensor.dims.first().map(Dims::as_slice) {
                Some(&[senders, _, columns]) => u64::from(senders) * u64::from(columns),
                Some(&[_, columns]) => u64::from(columns),
                _ => 0,
            };
            (tensor.dtype, elements)
        };
        let mut rows = reduce.inputs.iter().map(of_row);
        match rows.next() {
            Some((DType::F32Flagged, words)) => {
                words <= MOST_JOINED_WORDS && self.options.world <= MOST_JOINED_RANKS
            }
            // The rank's own summand takes the place of its slot among the received ones.
            _ => rows.map(|(dtype, elements)| elements * dtype.size()).sum::<u64>() <= MOST_JOINED_BYTES,
        }
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

    /// Gives what arrives for the last slot, a sum whose tasks have whole rows, one event on each rank.
    fn await_whole_rows(&mut self, joins: &mut Joins) {
        let Some(at) = self.slots.len().checked_sub(2) else { return };
        let SlotKind::Arrive { exchange } = self.slots[at].kind else { return };
        let arrive: Vec<u32> = self.part_of.iter().map(|slots| slots[at]).collect();
        let exchange = &mut self.exchanges[exchange as usize];
        let (table, arrive) = joins.one_event.of(&exchange.table, &arrive, &mut self.parts);
        exchange.table = table;
        self.part_of.iter_mut().zip(arrive).for_each(|(slots, part)| slots[at] = part);
    }

    /// Adds the slots of a step that stores its output with the owners. Returns the first of them.
    fn add_stores(&mut self, storing: &Storing, inputs: Vec<u32>) -> u32 {
        let (first, target) = (self.slots.len() as u32, storing.buffer);
        let Stored { table, to_peers, arrive, own } = &*storing.tiles;
        let exchange = self.add_exchange(table, target, None, true);
        self.add_slot(SlotKind::Store { exchange }, inputs.clone(), vec![], |r| to_peers[r as usize]);
        self.add_slot(SlotKind::Arrive { exchange }, vec![], vec![target], |r| arrive[r as usize]);
        self.add_slot(SlotKind::Compute { push: None }, inputs, vec![target], |r| own[r as usize]);
        first
    }

    /// Adds the slots in which each rank sends its own rows of a tensor to the others.
    fn add_spread(&mut self, own: OwnStep, tensor: u32, kind: Rows, completes: Option<u32>) {
        let exchange = spread(own, &self.tensors[tensor as usize].dims[0], kind, &self.options);
        let CutStep::Exchange { table, copy, arrive } =
            cut_exchange(&exchange, None, self.options.world, &mut self.parts)
        else {
            return;
        };
        let number = self.add_exchange(&table, tensor, completes, exchange.beside_producer);
        self.add_copies(number, tensor, &copy, &arrive);
    }
}
