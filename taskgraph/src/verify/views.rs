//! What of a tensor a view covers.

use crate::dtype::DType;
use crate::op_graph::Role;
use crate::region::{MAX_DIMS, Region};
use crate::task_graph::{Operand, TensorEntry};

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

/// Whether the elements of a view lie in `region`, for views that are not the whole tensor and tensors whose regions
/// count elements and that are not constant.
pub(super) fn view_in_region(tensor: &TensorEntry, operand: &Operand, region: &Region) -> bool {
    let ndim = usize::from(operand.ndim);
    let dims = &operand.dims[..ndim];
    let volume = |dims: &[u32]| dims.iter().fold(1u64, |p, &d| p.saturating_mul(u64::from(d)));
    if tensor.region_dims != tensor.dims
        || tensor.tiled
        || matches!(tensor.role, Role::Weight { .. } | Role::Constant | Role::Input)
        || volume(dims) == volume(&tensor.dims)
        || dims.contains(&0)
        || region.is_empty()
    {
        return true;
    }
    let mut rest = operand.offset / tensor.dtype.size();
    let mut by_stride: [usize; MAX_DIMS] = [0, 1, 2, 3];
    let by_stride = &mut by_stride[..tensor.dims.len()];
    by_stride.sort_by_key(|&d| std::cmp::Reverse((tensor.strides[d], tensor.dims[d])));
    let mut lo = [0u64; MAX_DIMS];
    let mut extent = [0u64; MAX_DIMS];
    for &d in by_stride.iter() {
        let stride = u64::from(tensor.strides[d]).max(1);
        if tensor.dims[d] > 1 {
            lo[d] = rest / stride;
            rest %= stride;
        }
    }
    for i in 0..ndim {
        let (count, stride) = (u64::from(operand.dims[i] - 1), u64::from(operand.strides[i]));
        let along =
            by_stride.iter().find(|&&d| tensor.dims[d] > 1 && u64::from(tensor.strides[d]).max(1) <= stride);
        if let (Some(&d), true) = (along, count > 0) {
            extent[d] = extent[d].saturating_add(count * (stride / u64::from(tensor.strides[d]).max(1)));
        }
    }
    (0..tensor.dims.len()).all(|d| {
        tensor.dims[d] <= 1
            || (lo[d] >= u64::from(region.lo[d]) && lo[d] + extent[d] < u64::from(region.hi[d]))
    })
}
