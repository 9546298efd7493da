//! The bytes that an operand touches, as boxes in the index space of its tensor.
//!
//! An element index of a tensor whose strides nest has one position in each dimension, so a set of elements is a set
//! of positions and two boxes share bytes exactly where they overlap. A view has strides of its own; it becomes one
//! box where they are the tensor's, and several where it takes elements otherwise.

use crate::dtype::DType;
use crate::op_graph::Role;
use crate::region::{MAX_DIMS, Region};
use crate::task_graph::{Operand, Task, TaskGraph, TensorEntry, core_types};
use smallvec::SmallVec;

/// Most boxes that one view is cut into.
const MOST_BOXES: usize = 1024;

/// The bytes of one operand.
pub(super) type Boxes = SmallVec<[Region; 2]>;

/// The view takes its elements in a way that makes too many boxes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Scattered;

/// The regions of this tensor stand for bytes that are known at run time only.
pub(super) fn is_symbolic(tensor: &TensorEntry) -> bool {
    matches!(tensor.role, Role::Persistent { .. }) && tensor.region_dims != tensor.dims
}

/// Bytes from the tensor's start to the end of a view's last element; `offset` for a view without elements.
pub(super) fn last_byte(offset: u64, dims: &[u32], strides: &[u32], dtype: DType) -> u64 {
    if dims.contains(&0) {
        return offset;
    }
    let last: u64 = dims
        .iter()
        .zip(strides)
        .fold(0, |sum: u64, (&d, &s)| sum.saturating_add(u64::from(d - 1) * u64::from(s)));
    last.saturating_add(1).saturating_mul(dtype.size()).saturating_add(offset)
}

/// Strides such that no two positions are the same element, in every dimension that counts.
pub(super) fn strides_nest(dims: &[u32], strides: &[u32]) -> bool {
    let mut by_stride: SmallVec<[(u64, u64); MAX_DIMS]> =
        dims.iter().zip(strides).filter(|(d, _)| **d > 1).map(|(&d, &s)| (s.into(), d.into())).collect();
    by_stride.sort_unstable();
    let mut reach = 1;
    by_stride.iter().all(|&(stride, dim)| {
        let fits = stride >= reach;
        reach = stride.saturating_mul(dim);
        fits
    })
}

/// Boxes that `operand` touches in `tensor`, whose strides nest. `by_slot`: some task takes this tensor's rows by
/// slot, so that any row named otherwise may be any slot's.
pub(super) fn boxes(tensor: &TensorEntry, operand: &Operand, by_slot: bool) -> Result<Boxes, Scattered> {
    let mut found = Boxes::new();
    if is_symbolic(tensor) {
        let region = match operand.trust {
            Some(trust) if trust.of_pages() => operand.region,
            _ => Region::whole(&tensor.region_dims),
        };
        found.push(region);
    } else if operand.trust.is_some_and(|t| t.of_rows()) {
        found.push(operand.region);
    } else {
        let used = 0..usize::from(operand.ndim).min(MAX_DIMS);
        if used.clone().any(|d| operand.dims[d] == 0) {
            return Ok(found);
        }
        let mut dims: ViewDims = used
            .map(|d| (u64::from(operand.dims[d]), u64::from(operand.strides[d])))
            .filter(|(count, stride)| *count > 1 && *stride > 0)
            .collect();
        dims.sort_by_key(|&(_, stride)| std::cmp::Reverse(stride));
        cut(tensor, operand.offset / tensor.dtype.size(), &dims, &mut found)?;
        if by_slot {
            let rows = tensor.dims.first().copied().unwrap_or(1);
            found.iter_mut().for_each(|b| (b.lo[0], b.hi[0]) = (0, rows));
        }
    }
    found.retain(|b| !b.is_empty());
    Ok(found)
}

/// A rank's own slot of the receive buffer is a hole in what its `reduce` reads: nobody writes it.
pub(super) fn hole(graph: &TaskGraph, task: &Task, input: usize) -> Option<u32> {
    const FLAGGED: u32 = 1;
    if input != 1 || graph.type_names.get(usize::from(task.task_type))? != core_types::REDUCE {
        return None;
    }
    let operand = graph.inputs(task).get(1)?;
    match graph.variants.get(usize::from(task.variant))?.params[..] {
        [world, rank, _, flags, ..]
            if flags & FLAGGED == 0 && operand.ndim == 3 && operand.dims[0] == world && rank < world =>
        {
            Some(rank)
        }
        _ => None,
    }
}

/// The operand without index `hole` of its first dimension, in up to two pieces.
pub(super) fn without(operand: &Operand, size: u64, hole: u32) -> SmallVec<[Operand; 2]> {
    let part = |from: u32, to: u32| {
        let mut piece = *operand;
        piece.offset += u64::from(from) * u64::from(operand.strides[0]) * size;
        piece.dims[0] = to - from;
        piece
    };
    let mut pieces = SmallVec::new();
    if hole > 0 {
        pieces.push(part(0, hole));
    }
    if hole + 1 < operand.dims[0] {
        pieces.push(part(hole + 1, operand.dims[0]));
    }
    pieces
}

/// The dimensions of a view that have more than one index, widest stride first: (indices, stride).
type ViewDims = SmallVec<[(u64, u64); MAX_DIMS]>;

/// Adds the boxes of the elements that start at `start` and lie along `dims`.
fn cut(tensor: &TensorEntry, start: u64, dims: &[(u64, u64)], found: &mut Boxes) -> Result<(), Scattered> {
    if let Some(whole) = one_box(tensor, start, dims) {
        if found.len() >= MOST_BOXES {
            return Err(Scattered);
        }
        found.push(whole);
        return Ok(());
    }
    let Some((&(count, stride), inner)) = dims.split_first() else { return Err(Scattered) };
    let piece = |first: u64, outer: &[(u64, u64)], found: &mut Boxes| {
        let mut all: ViewDims = outer.iter().copied().filter(|(n, _)| *n > 1).collect();
        all.extend_from_slice(inner);
        cut(tensor, start + first * stride, &all, found)
    };
    // A run that goes on from one row into the next is cut where rows begin.
    let strides =
        (0..tensor.dims.len()).filter(|&d| tensor.dims[d] > 1).map(|d| u64::from(tensor.strides[d]));
    if let Some(row) = strides.filter(|&s| s > stride && s % stride == 0).min() {
        let (in_row, at) = (row / stride, start % row / stride);
        if at + count > in_row {
            let head = if at == 0 { 0 } else { in_row - at };
            let rows = (count - head) / in_row;
            let tail = count - head - rows * in_row;
            for (first, n, outer) in [
                (0, head, (1, row)),
                (head, in_row * rows.min(1), (rows, row)),
                (count - tail, tail, (1, row)),
            ] {
                if n > 0 {
                    piece(first, &[outer, (n, stride)], found)?;
                }
            }
            return Ok(());
        }
    }
    if count > MOST_BOXES as u64 {
        return Err(Scattered);
    }
    (0..count).try_for_each(|i| piece(i, &[], found))
}

fn one_box(tensor: &TensorEntry, start: u64, dims: &[(u64, u64)]) -> Option<Region> {
    let mut region = Region { lo: [0; MAX_DIMS], hi: [1; MAX_DIMS] };
    let mut order: SmallVec<[usize; MAX_DIMS]> =
        (0..tensor.dims.len()).filter(|&d| tensor.dims[d] > 1).collect();
    if order.windows(2).any(|pair| tensor.strides[pair[0]] < tensor.strides[pair[1]]) {
        order.sort_by_key(|&d| std::cmp::Reverse(tensor.strides[d]));
    }
    let (mut rest, mut next) = (start, 0);
    for d in order {
        let stride = u64::from(tensor.strides[d]);
        let lo = rest / stride;
        rest %= stride;
        let mut count = 1;
        if let Some(&(indices, of)) = dims.get(next)
            && of == stride
        {
            count = indices;
            next += 1;
        }
        if lo + count > u64::from(tensor.dims[d]) {
            return None;
        }
        (region.lo[d], region.hi[d]) = (lo as u32, (lo + count) as u32);
    }
    (next == dims.len() && rest == 0).then_some(region)
}
