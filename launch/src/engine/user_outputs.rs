//! The outputs of a user graph: each rank's parts, and the whole tensors.

use crate::engine::user_values::local_bytes;
use crate::model::app_error::AppError;
use crate::model::weights::WeightSource;
use distributed::{Rank, World};
use taskgraph::op_graph::{Role, Tensor};
use taskgraph::{DType, OpGraph, Sharding};

/// The final value of an output tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// Its name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Global dimensions.
    pub dims: Vec<u64>,
    /// Values, row-major.
    pub values: Vec<f64>,
}

/// This rank's parts of the output tensors, in the order of the graph's tensors. Given tensors, and those that no operator uses, have
/// the values that were given: the kernel never writes them, and weights are packed in its memory.
pub(super) fn locals(
    rank: &Rank,
    graph: &OpGraph,
    given: &WeightSource,
    place: (u32, u32),
) -> Result<Vec<Vec<f64>>, AppError> {
    let part = |tensor: &Tensor| {
        let written = matches!(tensor.role, Role::Activation | Role::Persistent { .. });
        let read = if written { rank.read(0, &tensor.name)? } else { None };
        Ok(match read {
            Some((entry, bytes)) => {
                as_f64(entry.dtype, &bytes, entry.dims.iter().map(|&d| d as usize).product())
            }
            None => {
                let bytes = local_bytes(tensor, given, place)?;
                as_f64(tensor.dtype, &bytes, bytes.len() / tensor.dtype.size() as usize)
            }
        })
    };
    graph.tensors.iter().filter(|t| t.output).map(part).collect()
}

/// Collective: rank 0 returns the complete outputs, and whether outputs that every rank holds completely are the same
/// everywhere.
pub(super) fn outputs(world: &World, locals: Vec<Vec<f64>>, graph: &OpGraph) -> (Vec<Output>, bool) {
    let (mut all, mut same) = (Vec::new(), true);
    for (tensor, local) in graph.tensors.iter().filter(|t| t.output).zip(locals) {
        let gathered = world.gather(bytemuck::cast_slice(&local).to_vec());
        same &= tensor.sharding != Sharding::Replicated || gathered.iter().all(|bytes| *bytes == gathered[0]);
        let ranks: Vec<Vec<f64>> = gathered
            .iter()
            .map(|bytes| bytes.as_chunks().0.iter().map(|word| f64::from_ne_bytes(*word)).collect())
            .collect();
        if world.rank() == 0 {
            all.push(Output {
                name: tensor.name.clone(),
                dtype: tensor.dtype,
                dims: tensor.dims.clone(),
                values: assemble(tensor, &ranks),
            });
        }
    }
    (all, same)
}

/// Assembles a tensor from the ranks' parts.
fn assemble(tensor: &Tensor, ranks: &[Vec<f64>]) -> Vec<f64> {
    match &tensor.sharding {
        Sharding::Replicated => ranks[0].clone(),
        Sharding::Partial => (0..ranks[0].len())
            .map(|i| ranks.iter().map(|r| r.get(i).copied().unwrap_or(0.0)).sum())
            .collect(),
        Sharding::Split { dim, parts } => {
            let inner: usize = tensor.dims[dim + 1..].iter().product::<u64>() as usize;
            let outer: usize = tensor.dims[..*dim].iter().product::<u64>() as usize;
            let length = tensor.dims[*dim] as usize;
            let world = ranks.len() as u32;
            let mut whole = vec![0.0; outer * length * inner];
            for (rank, values) in ranks.iter().enumerate() {
                let mut values = values.iter();
                for block in 0..outer {
                    let mut first = 0;
                    for part in parts {
                        let range = part.split.range(part.len, rank as u32, world);
                        let at = |index: u64| (block * length + first + index as usize) * inner;
                        let out = &mut whole[at(range.start)..at(range.end)];
                        out.iter_mut().zip(values.by_ref()).for_each(|(o, v)| *o = *v);
                        first += part.len as usize;
                    }
                }
            }
            whole
        }
    }
}

fn as_f64(dtype: DType, bytes: &[u8], count: usize) -> Vec<f64> {
    let words = |size: usize| bytes.chunks_exact(size).take(count);
    let four = |w: &[u8]| [w[0], w[1], w[2], w[3]];
    match dtype {
        DType::F32 => words(4).map(|w| f64::from(f32::from_le_bytes(four(w)))).collect(),
        DType::I32 => words(4).map(|w| f64::from(i32::from_le_bytes(four(w)))).collect(),
        DType::U32 => words(4).map(|w| f64::from(u32::from_le_bytes(four(w)))).collect(),
        DType::F16 => words(2).map(|w| half::f16::from_le_bytes([w[0], w[1]]).to_f64()).collect(),
        DType::Bf16 => words(2).map(|w| half::bf16::from_le_bytes([w[0], w[1]]).to_f64()).collect(),
        DType::U8 => words(1).map(|w| f64::from(w[0])).collect(),
        DType::F32Flagged => words(8).map(|w| f64::from(f32::from_le_bytes(four(w)))).collect(),
    }
}
