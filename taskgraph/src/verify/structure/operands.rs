//! Checks an operand against its tensor: the bytes exist, the region covers them, and the task may access that memory.

use super::{COPY, RankCheck};
use crate::dtype::DType;
use crate::op_graph::Role;
use crate::region::MAX_DIMS;
use crate::task_graph::{Operand, Place, Space, Task, TensorEntry};
use crate::trust::{RowShares, Trust, share_of_tiles};
use crate::verify::boxes::{Scattered, boxes, end_of, is_symbolic};

/// The reason why a trust does not fit its operand.
fn trusted(tensor: &TensorEntry, operand: &Operand, active: u32) -> Option<String> {
    let name = &tensor.name;
    let dims = &tensor.dims[..];
    match operand.trust {
        None => None,
        Some(Trust::PagesOfSlot | Trust::PagesOfRows) => {
            if !is_symbolic(tensor) {
                Some(format!(
                    "of '{name}' declares pages of a slot, but the tensor is not a cache with its own index space"
                ))
            } else {
                // An empty region would hide the access.
                operand
                    .region
                    .is_empty()
                    .then(|| format!("of '{name}' declares pages, but its region is empty"))
            }
        }
        Some(
            trust @ (Trust::RowsOfSlot { slot, of, in_tiles }
            | Trust::RowsOfUnits { task: slot, of, in_tiles }),
        ) => {
            let rows = dims.first().copied().unwrap_or(0);
            let share = |a: u32| (u64::from(rows) * u64::from(a) / u64::from(of.max(1))) as u32;
            let region = &operand.region;
            let mut rest = operand.offset / tensor.dtype.size();
            let all_rows = usize::from(operand.ndim) == dims.len()
                && operand.strides.get(..dims.len()) == Some(&tensor.strides[..])
                && operand.dims[0] == rows;
            let in_view = (0..dims.len()).all(|d| {
                let stride = u64::from(tensor.strides[d]).max(1);
                let lo = rest / stride;
                rest %= stride;
                u64::from(region.lo[d]) >= lo && u64::from(region.hi[d]) <= lo + u64::from(operand.dims[d])
            });
            let fits = slot < of
                && (of == active || matches!(trust, Trust::RowsOfUnits { .. }))
                && all_rows
                && in_view
                // An empty share would hide the access.
                && !region.is_empty()
                && match (in_tiles, dims) {
                    (false, _) => (region.lo[0], region.hi[0]) == (share(slot), share(slot + 1)),
                    (true, &[tiles, _, rows_of_tile, _]) => {
                        let range = |d: usize| region.lo[d]..region.hi[d];
                        (range(0), range(2)) == share_of_tiles(tiles, rows_of_tile, slot, of)
                    }
                    (true, _) => false,
                };
            (is_symbolic(tensor) || !fits).then(|| {
                format!(
                    "of '{name}' names {trust}, the graph has {active} active slots: its view must have all rows and \
                     its region, {region}, those rows' share, which must not be empty"
                )
            })
        }
    }
}

impl RankCheck<'_> {
    pub(super) fn operand(&self, task: &Task, operand: &Operand, input: bool) -> Option<String> {
        let graph = self.graph();
        let Some(tensor) = graph.tensors.get(operand.tensor as usize) else {
            return Some("refers to a tensor that does not exist".into());
        };
        let name = &tensor.name;
        let ndim = usize::from(operand.ndim);
        if ndim > MAX_DIMS {
            return Some(format!("of '{name}' has {ndim} dimensions, more than {MAX_DIMS}"));
        }
        let region = &operand.region;
        for d in 0..MAX_DIMS {
            let limit = tensor.region_dims.get(d).copied().unwrap_or(1);
            if region.lo[d] > region.hi[d] || region.hi[d] > limit {
                return Some(format!(
                    "of '{name}' accesses {region}, outside its index space {:?}",
                    tensor.region_dims
                ));
            }
        }
        let end = end_of(tensor, operand);
        // The offset of a share without elements means nothing.
        let empty = operand.dims[..ndim].contains(&0);
        if !empty && end > tensor.bytes {
            return Some(format!(
                "of '{name}' ends at byte {end}, but the tensor has {} bytes",
                tensor.bytes
            ));
        }
        // Strides of such a tensor may be 0.
        if !empty && tensor.dims.contains(&0) {
            return Some(format!("of '{name}' has elements, but the tensor {:?} has none", tensor.dims));
        }
        if !operand.offset.is_multiple_of(tensor.dtype.size()) {
            return Some(format!("of '{name}' starts at byte {}, inside an element", operand.offset));
        }
        if let Some(message) = trusted(tensor, operand, graph.capacity.active) {
            return Some(message);
        }
        let constant = matches!(tensor.role, Role::Weight { .. } | Role::Constant);
        if operand.trust.is_none() && !constant && !tensor.tiled && !is_symbolic(tensor) {
            let view = || {
                format!(
                    "offset {} bytes, dims {:?}, strides {:?}",
                    operand.offset,
                    &operand.dims[..ndim],
                    &operand.strides[..ndim]
                )
            };
            match boxes(tensor, operand, RowShares::default()) {
                Err(Scattered) => {
                    return Some(format!(
                        "of '{name}' has a view ({}) that takes its elements in too many pieces; use the tensor's own strides",
                        view()
                    ));
                }
                Ok(found) if !found.iter().all(|b| region.contains(b)) => {
                    return Some(format!(
                        "of '{name}' has a view ({}) that leaves its region {region}",
                        view()
                    ));
                }
                Ok(_) => {}
            }
        }
        let is_copy = task.task_type == COPY;
        match operand.place {
            Place::Own if is_copy && !input && task.trigger.is_some_and(|e| e.is_nvshmem()) => {
                Some(format!("of '{name}' lies in its own memory, but the trigger's owner is a peer"))
            }
            Place::Own => None,
            _ if input => Some(format!("of '{name}' is on another rank, but no task may load from a peer")),
            _ if tensor.space != Space::Symmetric => {
                Some(format!("of '{name}' is on another rank, but the tensor is not symmetric"))
            }
            Place::Peer(peer) if usize::from(peer) >= self.graphs.len() => {
                Some(format!("of '{name}' is on rank {peer}, which does not exist"))
            }
            // Kernels push flagged words to every rank, whatever the place.
            Place::Peer(_) if !is_copy && tensor.dtype == DType::F32Flagged => {
                Some(format!("of '{name}' is on one other rank, but flagged words go to every rank"))
            }
            Place::Peer(peer) if task.trigger.is_none_or(|e| e.owner() != peer) => Some(format!(
                "of '{name}' is on rank {peer}, which is not the owner of the event that the task triggers"
            )),
            Place::Peer(_) => None,
            Place::All if tensor.dtype != DType::F32Flagged => {
                Some(format!("of '{name}' goes to every rank, but the tensor is not flagged"))
            }
            Place::All => None,
        }
    }
}
