//! Buffers: which activations share memory, and whether ranks must tell each other that they are through.

use super::{Dims, NONE, Plan, PlanTensor, SlotKind};
use crate::dtype::DType;
use crate::lower::order::Order;
use crate::task_graph::{Placement, Space};
use std::collections::HashMap;

/// A buffer and the tensors that lie in it, one after the other.
#[derive(Debug)]
pub(crate) struct Buffer {
    pub tensors: Vec<u32>,
}

/// Where activations lie. The same on all ranks.
#[derive(Debug)]
pub(crate) struct Memory {
    pub buffers: Vec<Buffer>,
    /// For each tensor its buffer, or [`NONE`] where it has memory of its own (or none).
    pub buffer_of: Vec<u32>,
    /// For each tensor: some slot touches it.
    pub used: Vec<bool>,
    /// Order alone does not make the next iteration safe: ranks end it together.
    pub closing: bool,
}

#[derive(Clone, Debug, Default)]
struct Access {
    /// Slots that read or write it on its own rank, arrivals included.
    slots: Vec<u32>,
    /// Slots of its own rank that write it.
    local_writers: Vec<u32>,
    /// Slots whose tasks on other ranks write it.
    remote_writers: Vec<u32>,
    first_writer: u32,
}

/// Tensors of one kind may share a buffer: element type, memory, index space, each rank's dimensions.
type Kind<'a> = (DType, Space, Option<Dims>, &'a [Dims]);

pub(crate) fn plan_memory(plan: &Plan, order: &Order) -> Memory {
    let world = plan.options.world;
    let accesses = accesses(plan);
    let used: Vec<bool> = accesses.iter().map(|a| !a.slots.is_empty()).collect();
    let mut shared: Vec<u32> = (0..plan.tensors.len() as u32)
        .filter(|&t| used[t as usize] && shareable(&plan.tensors[t as usize]))
        .collect();
    shared.sort_by_key(|&t| (accesses[t as usize].first_writer, t));
    let mut buffers: Vec<Buffer> = Vec::new();
    let mut buffer_of = vec![NONE; plan.tensors.len()];
    let mut by_kind: HashMap<Kind<'_>, Vec<u32>> = HashMap::new();
    for tensor in shared {
        let t = &plan.tensors[tensor as usize];
        let candidates = by_kind.entry((t.dtype, t.space, t.region_dims, &t.dims)).or_default();
        let free = candidates.iter().copied().find(|&b| {
            buffers[b as usize].tensors.last().is_some_and(|&last| {
                may_follow(plan, order, &accesses[last as usize], &accesses[tensor as usize])
            })
        });
        let buffer = free.unwrap_or_else(|| {
            buffers.push(Buffer { tensors: Vec::new() });
            candidates.push(buffers.len() as u32 - 1);
            buffers.len() as u32 - 1
        });
        buffers[buffer as usize].tensors.push(tensor);
        buffer_of[tensor as usize] = buffer;
    }

    let own: Vec<[u32; 1]> = (0..plan.tensors.len() as u32)
        .filter(|&t| used[t as usize] && buffer_of[t as usize] == NONE)
        .map(|t| [t])
        .collect();
    let unsafe_reuse = buffers
        .iter()
        .map(|b| b.tensors.as_slice())
        .chain(own.iter().map(|t| t.as_slice()))
        .any(|tensors| !next_iteration_is_safe(plan, order, &accesses, tensors));
    // With static placement a worker's list orders a copy before the end; without it only its arrival does.
    let open_copy = plan.options.placement == Placement::Dynamic
        && plan
            .slots
            .iter()
            .enumerate()
            .any(|(i, slot)| matches!(slot.kind, SlotKind::Copy { .. }) && !order.before_end(i + 1));
    Memory { buffers, buffer_of, used, closing: world > 1 && (unsafe_reuse || open_copy) }
}

fn shareable(tensor: &PlanTensor) -> bool {
    // Flags tell epochs apart, not two tensors of one epoch.
    tensor.activation && !tensor.output && tensor.dtype != DType::F32Flagged && tensor.alias.is_none()
}

fn accesses(plan: &Plan) -> Vec<Access> {
    let mut all: Vec<Access> = vec![Access { first_writer: NONE, ..Access::default() }; plan.tensors.len()];
    for (index, slot) in plan.slots.iter().enumerate() {
        let index = index as u32;
        if (0..plan.options.world).all(|r| plan.part(r, index as usize).is_none()) {
            continue;
        }
        for &tensor in slot.inputs.iter().chain(&slot.outputs) {
            let slots = &mut all[plan.root(tensor, 0).0 as usize].slots;
            if slots.last() != Some(&index) {
                slots.push(index);
            }
        }
        for (operand, &tensor) in slot.outputs.iter().enumerate() {
            let access = &mut all[plan.root(tensor, 0).0 as usize];
            access.first_writer = access.first_writer.min(index);
            match slot.kind {
                SlotKind::Arrive { .. } => access.remote_writers.push(index - 1),
                SlotKind::Compute { push: Some(o) } if o as usize == operand => {
                    access.local_writers.push(index);
                    access.remote_writers.push(index);
                }
                _ => access.local_writers.push(index),
            }
        }
    }
    all
}

fn is_copy(plan: &Plan, slot: u32) -> bool {
    matches!(plan.slots[slot as usize].kind, SlotKind::Copy { .. })
}

/// All that touches the one is done, here, before anything writes the other. A copy is known to be done once its
/// arrival is.
fn may_follow(plan: &Plan, order: &Order, before: &Access, after: &Access) -> bool {
    before.slots.iter().all(|&a| {
        let (copy, arrival) = (is_copy(plan, a), a as usize + 1);
        after
            .local_writers
            .iter()
            .all(|&w| if copy { order.other(arrival, w as usize) } else { order.own(a as usize, w as usize) })
            && after.remote_writers.iter().filter(|_| plan.options.protected).all(|&w| {
                if copy {
                    order.other(arrival, w as usize) && order.own(arrival, w as usize)
                } else {
                    order.other(a as usize, w as usize)
                }
            })
    })
}

/// A peer that is an iteration ahead writes this memory only after this rank is through with it: because that
/// peer's writer waits for this rank to have begun, or because the peer could not end before.
fn next_iteration_is_safe(plan: &Plan, order: &Order, accesses: &[Access], tensors: &[u32]) -> bool {
    let of = |t: &u32| &accesses[*t as usize];
    let writers_wait =
        tensors.iter().flat_map(|t| &of(t).remote_writers).all(|&w| order.begin_elsewhere(w as usize));
    writers_wait
        || tensors
            .iter()
            .flat_map(|t| &of(t).slots)
            .all(|&a| order.before_end(if is_copy(plan, a) { a as usize + 1 } else { a as usize }))
}
