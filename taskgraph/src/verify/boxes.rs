//! The bytes that an operand accesses, as boxes in the index space of its tensor.
//!
//! If the strides of a tensor nest, each element has one position in each dimension. So a set of elements is a set of positions,
//! and two boxes share bytes exactly where they overlap. A view has its own strides. If they are the tensor's strides, the view
//! is one box; otherwise it may be several.

use crate::dtype::DType;
use crate::op_graph::Role;
use crate::region::{MAX_DIMS, Region};
use crate::task_graph::{Operand, TILE_ROWS, Task, TaskGraph, TensorEntry, core_types};
use crate::trust::RowShares;
use smallvec::SmallVec;

/// Maximum number of boxes of one view.
const MOST_BOXES: usize = 1024;

/// The bytes of one operand.
pub(super) type Boxes = SmallVec<[Region; 2]>;

/// The view would consist of too many boxes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Scattered;

/// True if the tensor's regions stand for bytes that are known only at run time.
pub(super) fn is_symbolic(tensor: &TensorEntry) -> bool {
    matches!(tensor.role, Role::Persistent { .. }) && tensor.region_dims != tensor.dims
}

/// Offset of the end of an operand's last element; its own offset if it has no elements.
pub(super) fn end_of(tensor: &TensorEntry, operand: &Operand) -> u64 {
    let ndim = usize::from(operand.ndim);
    if let (true, &[rows, columns]) = (tensor.tiled, &operand.dims[..ndim])
        && rows > 0
        && columns > 0
    {
        let before = u64::from(rows.div_ceil(TILE_ROWS) - 1) * u64::from(operand.strides[0]);
        let elements = before.saturating_add(u64::from(columns)).saturating_mul(u64::from(TILE_ROWS));
        return elements.saturating_mul(tensor.dtype.size()).saturating_add(operand.offset);
    }
    last_byte(operand.offset, &operand.dims[..ndim], &operand.strides[..ndim], tensor.dtype)
}

/// The same for a view that is not packed.
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

/// True if no two positions are the same element.
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

/// The boxes that `operand` accesses in `tensor`, whose strides nest. `shares`: how all tasks share the tensor's rows. An access that
/// shares them in another way may conflict with any row.
pub(super) fn boxes(tensor: &TensorEntry, operand: &Operand, shares: RowShares) -> Result<Boxes, Scattered> {
    let mut found = Boxes::new();
    let any_row = |region: &mut Region| {
        for &d in shares.any_row(operand.trust) {
            (region.lo[d], region.hi[d]) = (0, tensor.dims.get(d).copied().unwrap_or(1));
        }
    };
    if is_symbolic(tensor) {
        let region = match operand.trust {
            Some(trust) if trust.of_pages() => operand.region,
            _ => Region::whole(&tensor.region_dims),
        };
        found.push(region);
    } else if operand.trust.is_some_and(|t| t.of_rows()) {
        found.push(operand.region);
        found.iter_mut().for_each(any_row);
    } else {
        if operand.dims[..usize::from(operand.ndim).min(MAX_DIMS)].contains(&0) {
            return Ok(found);
        }
        if is_region(tensor, operand) {
            found.push(operand.region);
        } else {
            cut_view(tensor, operand, &mut found)?;
        }
        found.iter_mut().for_each(any_row);
    }
    found.retain(|b| !b.is_empty());
    Ok(found)
}

/// The box that `operand` accesses, if it is its region: then [`boxes`] is that box alone. `None` says nothing.
#[inline]
pub(super) fn one_region(tensor: &TensorEntry, operand: &Operand, shares: RowShares) -> Option<Region> {
    let plain = shares.is_empty() && operand.trust.is_none() && !is_symbolic(tensor);
    (plain && is_region(tensor, operand)).then_some(operand.region)
}

/// True if the view has elements and covers exactly its region. This is the common case and quick to check.
pub(super) fn is_region(tensor: &TensorEntry, operand: &Operand) -> bool {
    let region = &operand.region;
    let (mut at, mut start) = (0, 0);
    for d in 0..MAX_DIMS {
        let (lo, hi) = (region.lo[d], region.hi[d]);
        if lo >= hi || hi > tensor.dims.get(d).copied().unwrap_or(1) {
            return false;
        }
        if d >= tensor.dims.len() {
            continue;
        }
        start += u64::from(lo) * u64::from(tensor.strides[d]);
        let of_view = at < usize::from(operand.ndim);
        if of_view
            && operand.dims[at] == hi - lo
            && (hi - lo == 1 || operand.strides[at] == tensor.strides[d])
        {
            at += 1;
        } else if hi - lo != 1 {
            return false;
        }
    }
    operand.dims[at..usize::from(operand.ndim).max(at)].iter().all(|&n| n == 1)
        && operand.offset == start * tensor.dtype.size()
}

/// The boxes of any view.
fn cut_view(tensor: &TensorEntry, operand: &Operand, found: &mut Boxes) -> Result<(), Scattered> {
    let mut dims: ViewDims = (0..usize::from(operand.ndim).min(MAX_DIMS))
        .map(|d| (u64::from(operand.dims[d]), u64::from(operand.strides[d])))
        .filter(|(count, stride)| *count > 1 && *stride > 0)
        .collect();
    dims.sort_by_key(|&(_, stride)| std::cmp::Reverse(stride));
    cut(tensor, operand.offset / tensor.dtype.size(), &dims, found)
}

/// A rank's own slot of the receive buffer is a hole in what its `reduce` reads, because no task writes it.
pub(super) fn hole(graph: &TaskGraph, task: &Task, input: usize) -> Option<u32> {
    if input != 1 { None } else { own_slot(graph, task, graph.inputs(task).get(1)?) }
}

/// The same for a second input like `operand`.
pub(super) fn own_slot(graph: &TaskGraph, task: &Task, operand: &Operand) -> Option<u32> {
    const FLAGGED: u32 = 1;
    if graph.type_names.get(usize::from(task.task_type))? != core_types::REDUCE {
        return None;
    }
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

/// The dimensions of a view with more than one index, widest stride first: (indices, stride).
type ViewDims = SmallVec<[(u64, u64); MAX_DIMS]>;

/// Adds the boxes of the elements that begin at `start` and extend along `dims`.
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
    // A run that continues from one row into the next is cut at the beginnings of rows.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op_graph::Rows;
    use crate::task_graph::{Place, Space};

    /// The quick check and the general way give the same result.
    #[test]
    fn views_that_are_their_region_are_cut_into_it() {
        let (dims, strides) = (vec![3u32, 4, 1, 5], vec![20u32, 5, 5, 1]);
        let tensor = TensorEntry {
            name: "t".into(),
            dtype: DType::F32,
            dims: dims.clone(),
            strides: strides.clone(),
            space: Space::Device,
            bytes: 240,
            role: Role::Activation,
            parts: Vec::new(),
            region_dims: dims.clone(),
            tiled: false,
            paired: false,
            output: false,
            rows: Rows::Fixed,
            overlay: None,
        };
        let mut seen = 0;
        let spans = |n: u32| (0..n).flat_map(move |lo| (lo + 1..=n).map(move |hi| (lo, hi)));
        for (a, b, c) in spans(3).flat_map(|a| spans(4).flat_map(move |b| spans(5).map(move |c| (a, b, c)))) {
            let region = Region { lo: [a.0, b.0, 0, c.0], hi: [a.1, b.1, 1, c.1] };
            let view = |keep: &[usize], shift: u64| {
                let mut operand = Operand {
                    tensor: 0,
                    offset: 4 * (u64::from(a.0 * 20 + b.0 * 5 + c.0) + shift),
                    dims: [1; MAX_DIMS],
                    strides: [1; MAX_DIMS],
                    ndim: keep.len() as u8,
                    place: Place::Own,
                    region,
                    trust: None,
                };
                for (at, &d) in keep.iter().enumerate() {
                    operand.dims[at] = region.hi[d] - region.lo[d];
                    operand.strides[at] = strides[d];
                }
                operand
            };
            for keep in [&[0, 1, 2, 3][..], &[0, 1, 3], &[1, 2, 3], &[1, 3], &[0, 3], &[3, 1], &[]] {
                for shift in [0, 1] {
                    let operand = view(keep, shift);
                    if is_region(&tensor, &operand) {
                        let mut found = Boxes::new();
                        cut_view(&tensor, &operand, &mut found).unwrap();
                        assert_eq!(found[..], [region], "{operand:?}");
                        seen += 1;
                    }
                }
            }
            assert!(is_region(&tensor, &view(&[0, 1, 2, 3], 0)));
        }
        assert!(seen > 1000, "{seen}");
    }
}
