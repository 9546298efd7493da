//! Memory: which activations overlap, and whether ranks must tell each other that they are done.
//!
//! Two tensors may share bytes if all accesses to one are done before any write to the other. Between iterations of any graphs,
//! areas ensure this ([`Area`]). For a rank's own memory, the rank's own end is enough. Symmetric tensors are in two areas: one
//! for tensors that are no longer used when any rank ends, the other for tensors that peers write only after all ranks have
//! begun.

use super::order::Order;
use super::plan::Plan;
use super::types::{PlanTensor, SlotKind};
use crate::dtype::DType;
use crate::task_graph::{Area, Overlay, Placement, Space};

/// Alignment of tensors in an area, in bytes.
const ALIGN: u64 = 256;

/// The places of activations, the same on all ranks.
#[derive(Debug)]
pub(crate) struct Memory {
    /// The place of each tensor that shares memory.
    pub overlay: Vec<Option<Overlay>>,
    /// True for each tensor that some slot accesses.
    pub used: Vec<bool>,
    /// For each tensor, the tensor whose memory it uses; itself if it has its own memory.
    pub home: Vec<u32>,
    /// The order alone does not make the next iteration safe, so ranks end the iteration together.
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

pub(crate) fn plan_memory(plan: &Plan, order: &Order) -> Memory {
    let mut accesses = accesses(plan);
    let home = in_place(plan, order, &mut accesses);
    let used: Vec<bool> = accesses.iter().map(|a| !a.slots.is_empty()).collect();
    let all = || (0..plan.tensors.len()).filter(|&t| used[t]);
    let unsafe_reuse = all().any(|t| !awaited(order, &accesses[t]) && !settled(plan, order, &accesses[t]));
    // A send is known to be done once its arrival is. If that is not before this rank's end, then in the next iteration the send,
    // and the writers of what it reads, must wait until the peers have begun it.
    let open_sends = || {
        let slots = plan.slots.iter().enumerate();
        slots.filter(|(i, slot)| slot.kind.sends().is_some() && !order.before_end(i + 1))
    };
    let place = |tensor: u32| home[plan.root(tensor, 0).0 as usize] as usize;
    let waits = |source: u32| {
        let access = &accesses[place(source)];
        access.local_writers.iter().chain(&access.remote_writers).all(|&w| order.begin_elsewhere(w as usize))
    };
    let open_send = open_sends().any(|(i, slot)| {
        plan.options.placement == Placement::Dynamic
            || !order.begin_elsewhere(i)
            || !slot.inputs.iter().all(|&source| waits(source))
    });
    let closing = plan.options.world > 1 && (unsafe_reuse || open_send);
    // What such sends read shares no memory, because the writers of another tensor would have to wait too.
    let mut in_flight = vec![false; plan.tensors.len()];
    if !closing {
        for (_, slot) in open_sends() {
            slot.inputs.iter().for_each(|&source| in_flight[place(source)] = true);
        }
    }

    let mut of_area: [Vec<Sized>; Area::ALL.len()] = Default::default();
    for t in all().filter(|&t| shareable(&plan.tensors[t]) && !in_flight[t]) {
        let tensor = &plan.tensors[t];
        let area = match tensor.space {
            _ if tensor.dtype == DType::F32Flagged => Area::Flagged,
            Space::Device => Area::Device,
            Space::Symmetric if closing || settled(plan, order, &accesses[t]) => Area::Settled,
            Space::Symmetric => Area::Awaited,
        };
        let elements = tensor.dims.iter().map(|d| d.volume()).max().unwrap_or(0);
        let bytes = (elements * tensor.dtype.size()).next_multiple_of(ALIGN);
        of_area[area as usize].push(Sized { tensor: t, bytes, first_writer: accesses[t].first_writer });
    }
    let mut overlay = vec![None; plan.tensors.len()];
    for (area, tensors) in Area::ALL.into_iter().zip(of_area) {
        // Between iterations, the area decides. For flagged words, the two tensors decide.
        let next_is_safe = |a: usize, b: usize| {
            area != Area::Flagged
                || closing
                || settled(plan, order, &accesses[a])
                || awaited(order, &accesses[b])
        };
        let free = |a: usize, b: usize| {
            may_follow(plan, order, &accesses[a], &accesses[b]) && next_is_safe(a, b) && next_is_safe(b, a)
        };
        for (tensor, offset) in pack(tensors, free) {
            overlay[tensor] = Some(Overlay { area, offset });
        }
    }
    Memory { overlay, used, home, closing }
}

/// Results that reuse the memory of an operand, where the graph allows it: other accesses to the operand must be done
/// before, and each task must write only what no other task reads. The operand's accesses then include those of the
/// result.
fn in_place(plan: &Plan, order: &Order, accesses: &mut [Access]) -> Vec<u32> {
    let mut home: Vec<u32> = (0..plan.tensors.len() as u32).collect();
    let mut pairs: Vec<(u32, u32)> = plan.graph.overwrites.iter().map(|(&to, &from)| (from, to)).collect();
    pairs.sort_by_key(|&(_, to)| accesses[to as usize].first_writer);
    for (from, to) in pairs {
        let (a, b) = (&plan.tensors[from as usize], &plan.tensors[to as usize]);
        let place = home[from as usize] as usize;
        let alike = a.dims == b.dims && a.dtype == b.dtype && a.rows == b.rows && a.space == b.space;
        let plain = |t: &PlanTensor| shareable(t) && t.space == Space::Device && t.region_dims.is_none();
        let [writer] = accesses[to as usize].local_writers[..] else { continue };
        let mut others = accesses[place].clone();
        others.slots.retain(|&s| s != writer);
        if !alike
            || !plain(a)
            || !plain(b)
            || !accesses[to as usize].remote_writers.is_empty()
            || !may_follow(plan, order, &others, &accesses[to as usize])
            || !writes_what_it_reads(plan, writer, from, to)
        {
            continue;
        }
        home[to as usize] = place as u32;
        let result = std::mem::take(&mut accesses[to as usize]);
        let operand = &mut accesses[place];
        operand.slots.extend(result.slots);
        operand.slots.sort_unstable();
        operand.slots.dedup();
        operand.local_writers.extend(result.local_writers);
    }
    home
}

/// True if every task of the slot reads exactly the region of one tensor that it writes of the other.
fn writes_what_it_reads(plan: &Plan, slot: u32, from: u32, to: u32) -> bool {
    let operands = &plan.slots[slot as usize];
    (0..plan.options.world).filter_map(|rank| plan.part(rank, slot as usize)).all(|part| {
        part.tasks.iter().all(|task| {
            let reads = task.reads.iter().map(|a| (operands.inputs[usize::from(a.operand)], a));
            // A block of that tensor, under another name, is elsewhere in its memory.
            let mut reads = reads.filter(|&(input, _)| plan.root(input, 0).0 == from);
            let mut writes = task.writes.iter().filter(|a| operands.outputs[usize::from(a.operand)] == to);
            let write = writes.next();
            write.is_some_and(|w| {
                writes.next().is_none()
                    && w.trust.is_none()
                    && reads.all(|(input, a)| input == from && a.region == w.region && a.trust.is_none())
            })
        })
    })
}

/// A tensor that needs a place.
struct Sized {
    tensor: usize,
    bytes: u64,
    first_writer: u32,
}

/// Assigns an offset to each tensor, the largest first: the lowest place without a tensor that it must not overlap. `free(a, b)`
/// means that a, which is written first, is no longer used when b is written.
fn pack(mut tensors: Vec<Sized>, free: impl Fn(usize, usize) -> bool) -> Vec<(usize, u64)> {
    tensors.sort_by_key(|t| (std::cmp::Reverse(t.bytes), t.first_writer, t.tensor));
    let mut placed: Vec<(u64, Sized)> = Vec::with_capacity(tensors.len());
    for new in tensors {
        let mut taken: Vec<(u64, u64)> = placed
            .iter()
            .filter(|(_, other)| {
                let new_first = (new.first_writer, new.tensor) < (other.first_writer, other.tensor);
                let (a, b) = if new_first { (&new, other) } else { (other, &new) };
                !free(a.tensor, b.tensor)
            })
            .map(|(offset, other)| (*offset, offset + other.bytes))
            .collect();
        taken.sort_unstable();
        let mut offset = 0;
        for (start, end) in taken {
            if start >= offset + new.bytes {
                break;
            }
            offset = offset.max(end);
        }
        placed.push((offset, new));
    }
    placed.into_iter().map(|(offset, t)| (t.tensor, offset)).collect()
}

fn shareable(tensor: &PlanTensor) -> bool {
    tensor.activation && !tensor.output && tensor.alias.is_none()
}

fn accesses(plan: &Plan) -> Vec<Access> {
    let mut all: Vec<Access> =
        vec![Access { first_writer: u32::MAX, ..Access::default() }; plan.tensors.len()];
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

fn sends(plan: &Plan, slot: u32) -> bool {
    plan.slots[slot as usize].kind.sends().is_some()
}

/// True if all accesses to one tensor are done, on this rank, before any write to the other. What sends is known to be done once its
/// arrival is.
fn may_follow(plan: &Plan, order: &Order, before: &Access, after: &Access) -> bool {
    // The latest access comes first, because it is the most likely not to be done.
    before.slots.iter().rev().all(|&a| {
        let (sends, arrival) = (sends(plan, a), a as usize + 1);
        after.local_writers.iter().all(|&w| {
            if sends { order.other(arrival, w as usize) } else { order.own(a as usize, w as usize) }
        }) && after.remote_writers.iter().filter(|_| plan.options.protected).all(|&w| {
            if sends {
                order.other(arrival, w as usize) && order.own(arrival, w as usize)
            } else {
                order.other(a as usize, w as usize)
            }
        })
    })
}

/// True if a peer that is one iteration ahead writes this memory only after this rank has begun that iteration.
fn awaited(order: &Order, access: &Access) -> bool {
    access.remote_writers.iter().all(|&w| order.begin_elsewhere(w as usize))
}

/// True if no rank can end the iteration before this rank has finished with this memory.
fn settled(plan: &Plan, order: &Order, access: &Access) -> bool {
    access.slots.iter().all(|&a| order.before_end(if sends(plan, a) { a as usize + 1 } else { a as usize }))
}
