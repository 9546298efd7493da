//! Tensors of the finished graph: layout, size and origin of each block of memory.

use super::memory::Memory;
use super::plan::Plan;
use super::types::{Dims, NONE};
use crate::dtype::DType;
use crate::op_graph::{Role, Rows, Tensor};
use crate::region::MAX_DIMS;
use crate::split::Sharding;
use crate::task_graph::{LocalPart, Overlay, Space, TILE_ROWS, TensorEntry};
use rustc_hash::FxHashSet;

/// The entries of one rank, and the entry of each tensor of the plan ([`NONE`] if it has none).
pub(crate) struct Entries {
    pub list: Vec<TensorEntry>,
    pub of: Vec<u32>,
    /// The strides of each entry, padded to four dimensions.
    pub strides: Vec<[u32; MAX_DIMS]>,
    /// Packed matrices are padded to a multiple of this depth.
    tile_k: u32,
}

pub(crate) fn entries(plan: &Plan, memory: &Memory, rank: u32) -> Entries {
    let world = plan.options.world;
    let mut entries = Entries {
        list: Vec::new(),
        of: vec![NONE; plan.tensors.len()],
        strides: Vec::new(),
        tile_k: plan.options.target.backend.tile_k(),
    };
    // A temporary may have the same name as a tensor of the user's.
    let mut names: FxHashSet<String> = FxHashSet::default();
    for (index, tensor) in plan.tensors.iter().enumerate() {
        if !memory.used[index] || tensor.alias.is_some() {
            continue;
        }
        let mut name = tensor.name.clone();
        while !names.insert(name.clone()) {
            name.push('~');
        }
        let dims = tensor.dims[rank as usize];
        let source = tensor.source.map(|s| &plan.graph.tensors[s as usize]);
        let role = source.map_or(Role::Activation, |s| s.role.clone());
        let tiled = matches!(role, Role::Weight { .. }) && dims.n == 2;
        let parts = source.map(|s| local_parts(s, rank, world)).unwrap_or_default();
        let region = tensor.region_dims.unwrap_or(dims);
        entries.of[index] = entries.list.len() as u32;
        entries.push(Described {
            name,
            dtype: tensor.dtype,
            dims,
            space: tensor.space,
            role,
            parts,
            region,
            tiled,
            paired: tensor.paired,
            output: tensor.output,
            rows: tensor.rows,
            overlay: memory.overlay[index],
        });
    }
    entries
}

struct Described {
    name: String,
    dtype: DType,
    dims: Dims,
    space: Space,
    role: Role,
    parts: Vec<LocalPart>,
    region: Dims,
    tiled: bool,
    paired: bool,
    output: bool,
    rows: Rows,
    overlay: Option<Overlay>,
}

impl Entries {
    fn push(&mut self, d: Described) {
        let n = d.dims.n as usize;
        let mut strides = [1u32; MAX_DIMS];
        let mut bytes = d.dtype.size();
        if d.tiled {
            strides[0] = d.dims.d[1].next_multiple_of(self.tile_k);
            bytes *= u64::from(d.dims.d[0].next_multiple_of(TILE_ROWS)) * u64::from(strides[0]);
        } else {
            for dim in (0..n.saturating_sub(1)).rev() {
                strides[dim] = strides[dim + 1] * d.dims.d[dim + 1].max(1);
            }
            bytes *= d.dims.volume();
        }
        self.list.push(TensorEntry {
            name: d.name,
            dtype: d.dtype,
            dims: d.dims.as_slice().to_vec(),
            strides: strides[..n].to_vec(),
            space: d.space,
            bytes,
            role: d.role,
            parts: d.parts,
            region_dims: d.region.as_slice().to_vec(),
            tiled: d.tiled,
            paired: d.paired,
            output: d.output,
            rows: d.rows,
            overlay: d.overlay,
        });
        self.strides.push(strides);
    }
}

/// The part of each piece of a weight that `rank` holds, in the order of its own rows.
fn local_parts(tensor: &Tensor, rank: u32, world: u32) -> Vec<LocalPart> {
    let Role::Weight { parts } = &tensor.role else { return Vec::new() };
    match &tensor.sharding {
        Sharding::Replicated | Sharding::Partial => parts
            .iter()
            .map(|p| LocalPart { source: p.source.clone(), dims: p.dims.clone(), range: None })
            .collect(),
        Sharding::Split { dim: 0, parts: pieces } => {
            let mut local = Vec::new();
            let mut start = 0;
            for (piece, range) in pieces.iter().zip(tensor.sharding.ranges(rank, world)) {
                let held = start + range.start..start + range.end;
                let mut first = 0;
                for part in parts {
                    let rows = part.dims[0];
                    let (lo, hi) = (held.start.max(first), held.end.min(first + rows));
                    if lo < hi {
                        local.push(LocalPart {
                            source: part.source.clone(),
                            dims: part.dims.clone(),
                            range: Some((0, lo - first..hi - first)),
                        });
                    }
                    first += rows;
                }
                start += piece.len;
            }
            local
        }
        Sharding::Split { dim, .. } => {
            let range = tensor.sharding.ranges(rank, world).into_iter().next().unwrap_or(0..0);
            parts
                .iter()
                .map(|p| LocalPart {
                    source: p.source.clone(),
                    dims: p.dims.clone(),
                    range: Some((*dim, range.clone())),
                })
                .collect()
        }
    }
}
