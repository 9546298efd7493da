//! Makes the operands of a slot's tasks.
//!
//! Slots that are cut in the same way, such as those of a model's layers, have the same operands in other tensors. Such operands
//! are made once for each rank, and repeated with the indices of the other tensors.

use super::overlap::Shift;
use super::plan::Plan;
use super::types::{Dims, Part, Slot, SlotKind};
use crate::error::BuildError;
use crate::region::{MAX_DIMS, Region};
use crate::task_graph::{Operand, Place, TILE_COLUMNS, TILE_ROWS};
use crate::task_type::Access;
use crate::trust::Trust;
use smallvec::SmallVec;
use std::sync::Arc;

/// How an operand's view relates to its region.
#[derive(Clone, Copy, PartialEq)]
enum View {
    Region,
    Whole,
    /// Without the first dimension, in which the region has one index.
    Inner,
    /// With an additional first dimension of size 1.
    Stacked,
}

impl View {
    fn of(access: &Access) -> View {
        match access.trust {
            Some(_) => View::Whole,
            None if access.inner => View::Inner,
            None => View::Region,
        }
    }
}

/// One of the tensors of a slot.
#[derive(Clone, Copy)]
pub(super) struct SlotTensor {
    /// Its index in the plan.
    pub tensor: u32,
    /// Its index in the graph.
    pub number: u32,
    pub layout: Layout,
}

/// Facts of a tensor that its operands depend on, apart from its index.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Layout {
    pub size: u64,
    pub strides: [u32; MAX_DIMS],
    pub dims: Dims,
    /// Where it starts in the memory that it uses.
    pub shift: Shift,
    pub tiled: bool,
    pub ndim: usize,
}

/// Inputs, then outputs. If the slot sends: inputs, then the target.
pub(super) type SlotTensors = SmallVec<[SlotTensor; 8]>;

/// The operands that were made for a slot.
pub(super) struct Block {
    kind: SlotKind,
    tensors: SlotTensors,
    /// Index of the first of them.
    pub first: u32,
    pub count: u32,
    /// The first of the slot's tasks.
    pub first_task: u32,
}

impl Block {
    pub fn new(kind: SlotKind, tensors: SlotTensors, (first, count): (u32, u32), first_task: u32) -> Self {
        Block { kind, tensors, first, count, first_task }
    }

    /// Pairs of indices: a tensor of this block and the one of `tensors` in its place.
    pub fn renamed(&self, tensors: &SlotTensors) -> impl Iterator<Item = (u32, u32)> {
        self.tensors.iter().zip(tensors).map(|(old, new)| (old.number, new.number))
    }

    /// True if a slot of the same part has these operands, with its own tensors in place of this block's.
    fn fits(&self, plan: &Plan, kind: SlotKind, tensors: &SlotTensors) -> bool {
        let table = |exchange: u32| Arc::as_ptr(&plan.exchanges[exchange as usize].table);
        let same_kind = match (self.kind, kind) {
            (SlotKind::Copy { exchange: a }, SlotKind::Copy { exchange: b })
            | (SlotKind::Store { exchange: a }, SlotKind::Store { exchange: b }) => table(a) == table(b),
            (a, b) => a == b,
        };
        // Two places with one tensor in this block have one tensor in the other slot.
        let same_as = |list: &SlotTensors, i: usize| list.iter().position(|t| t.number == list[i].number);
        same_kind
            && self.tensors.len() == tensors.len()
            && self.tensors.iter().zip(tensors).all(|(a, b)| a.layout == b.layout)
            && (0..tensors.len()).all(|i| same_as(&self.tensors, i) == same_as(tensors, i))
    }
}

/// The blocks of one rank, by the part of their slot.
pub(super) struct Blocks(Vec<Vec<Block>>);

impl Blocks {
    pub fn new(plan: &Plan) -> Self {
        Blocks(plan.parts.iter().map(|_| Vec::new()).collect())
    }

    pub fn find(&self, plan: &Plan, part: u32, kind: SlotKind, tensors: &SlotTensors) -> Option<&Block> {
        self.0[part as usize].iter().find(|block| block.fits(plan, kind, tensors))
    }

    pub fn add(&mut self, part: u32, block: Block) {
        self.0[part as usize].push(block);
    }
}

/// Adds the operands of a slot on `rank`, task by task, inputs first.
pub(super) fn make_operands(
    plan: &Plan,
    rank: u32,
    slot: &Slot,
    part: &Part,
    tensors: &SlotTensors,
    made: &mut Vec<Operand>,
) -> Result<(), BuildError> {
    let mut add = |tensor: &SlotTensor, region: Region, view: View, place: Place, trust: Option<Trust>| {
        made.push(operand(plan, tensor, region, view, place, trust)?);
        Ok(())
    };
    let (inputs, others) = tensors.split_at(slot.inputs.len());
    for (i, spec) in part.tasks.iter().enumerate() {
        for access in &spec.reads {
            let stacked = part.stacked == Some(access.operand);
            let view = if stacked { View::Stacked } else { View::of(access) };
            add(&inputs[access.operand as usize], access.region, view, Place::Own, access.trust)?;
        }
        match slot.kind {
            SlotKind::Store { exchange } => {
                let send = &plan.exchanges[exchange as usize].table.sends[rank as usize][i];
                add(&others[0], send.target, View::Inner, Place::Peer(send.to as u16), None)?;
            }
            SlotKind::Copy { exchange } => {
                let send = &plan.exchanges[exchange as usize].table.sends[rank as usize][i];
                if send.source.is_some() {
                    let stacked = others[0].layout.dims.n > inputs[0].layout.dims.n;
                    let view = if stacked { View::Inner } else { View::Region };
                    add(&others[0], send.target, view, Place::Peer(send.to as u16), None)?;
                }
            }
            kind => {
                for access in &spec.writes {
                    let tensor = &others[access.operand as usize];
                    if kind == (SlotKind::Compute { push: Some(access.operand) }) {
                        let region = access.region.with(0, rank, rank + 1);
                        add(tensor, region, View::Inner, Place::All, None)?;
                    } else {
                        add(tensor, access.region, View::of(access), Place::Own, access.trust)?;
                    }
                }
            }
        }
    }
    Ok(())
}

fn operand(
    plan: &Plan,
    tensor: &SlotTensor,
    mut region: Region,
    view: View,
    place: Place,
    trust: Option<Trust>,
) -> Result<Operand, BuildError> {
    let &Layout { size, mut strides, shift: (dim, shift), mut ndim, .. } = &tensor.layout;
    region.lo[dim] += shift;
    region.hi[dim] += shift;
    let mut dims = [1u32; MAX_DIMS];
    let mut offset = 0u64;
    if view == View::Whole {
        dims = tensor.layout.dims.d;
        offset = u64::from(shift) * u64::from(strides[dim]);
    } else if tensor.layout.tiled {
        let [row, column, ..] = region.lo;
        let (end, columns) = (region.hi[1], tensor.layout.dims.d[1]);
        if row % TILE_ROWS != 0 || column % TILE_COLUMNS != 0 || end % TILE_COLUMNS != 0 && end != columns {
            return Err(BuildError::tensor(
                &plan.tensors[tensor.tensor as usize].name,
                format!(
                    "is packed in tiles of {TILE_ROWS} rows and blocks of {TILE_COLUMNS} columns, but a task reads {region}; cut its rows and columns at multiples of these"
                ),
            ));
        }
        offset = u64::from(row) * u64::from(strides[0]) + u64::from(column) * u64::from(TILE_ROWS);
        (0..ndim).for_each(|d| dims[d] = region.hi[d] - region.lo[d]);
    } else {
        for d in 0..ndim {
            dims[d] = region.hi[d].saturating_sub(region.lo[d]);
            offset += u64::from(region.lo[d]) * u64::from(strides[d]);
        }
    }
    match view {
        View::Inner => {
            dims.rotate_left(1);
            strides.rotate_left(1);
            ndim -= 1;
        }
        View::Stacked => {
            dims.rotate_right(1);
            strides.rotate_right(1);
            dims[0] = 1;
            strides[0] = 0;
            ndim += 1;
        }
        View::Region | View::Whole => {}
    }
    for d in ndim..MAX_DIMS {
        dims[d] = 1;
        strides[d] = 1;
    }
    Ok(Operand {
        tensor: tensor.number,
        offset: offset * size,
        dims,
        strides,
        ndim: ndim as u8,
        place,
        region,
        trust,
    })
}
