//! The given values of a user graph: of its inputs, weights and constants.

use crate::model::app_error::AppError;
use crate::model::checkpoint;
use crate::model::convert::convert;
use crate::model::files;
use crate::model::fill::{fill_weight, filled, read_piece, weight_dtype, weight_pieces};
use crate::model::fold::{Values, whole};
use crate::model::hf_config::WeightDtype;
use crate::model::model_json::ModelJson;
use crate::model::not_numbers::NotNumbers;
use crate::model::random_weights::RandomWeights;
use crate::model::weights::WeightSource;
use distributed::fill::{Piece, TensorSource};
use distributed::{Rank, World};
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use taskgraph::json::{DataSource, DataSources};
use taskgraph::op_graph::{Role, Tensor};
use taskgraph::task_graph::TensorEntry;
use taskgraph::{DType, OpGraph, Sharding};

/// The given values of weights and constants.
pub(super) struct GivenValues<'a> {
    pub graph: &'a OpGraph,
    pub weights: &'a WeightSource,
    pub not_numbers: &'a NotNumbers,
    pub place: (u32, u32),
}

impl TensorSource for GivenValues<'_> {
    type Error = AppError;

    fn fill(&self, tensor: &TensorEntry, bytes: &mut [u8]) -> Result<(), AppError> {
        match tensor.role {
            Role::Constant => match self.graph.tensors.iter().find(|t| t.name == tensor.name) {
                Some(constant) => fill_local(constant, self.weights, self.place, bytes),
                None => Ok(()),
            },
            _ => fill_weight(self.weights, self.not_numbers, tensor, bytes),
        }
    }

    fn pieces(&self, tensor: &TensorEntry) -> Result<Vec<Piece>, AppError> {
        match tensor.role {
            Role::Constant => Ok(vec![filled(tensor, |bytes| self.fill(tensor, bytes))?]),
            _ => weight_pieces(self.weights, tensor),
        }
    }

    fn read(&self, piece: &Piece, rows: Range<u64>, out: &mut [u8]) -> Result<(), AppError> {
        read_piece(self.weights, self.not_numbers, piece, rows, out)
    }
}

/// Of which tensors the values are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Of all tensors.
    All,
    /// Of those that decide how the graph is built. Given values are checked all the same, but random ones are not made.
    ToBuild,
}

/// Global values of inputs, weights and constants by name. A weight is listed by the names of its parts.
pub(super) fn values(
    model: &ModelJson,
    graph: &OpGraph,
    sources: &DataSources,
    random: Option<&RandomWeights>,
    rank: u32,
    wanted: Wanted,
) -> Result<Values, AppError> {
    let build = (wanted == Wanted::ToBuild).then(|| needed_to_build(graph));
    let mut all = Values::new();
    // Weights may share a part, such as the embedding and the head, but not with different values.
    let mut insert = |name: &str, values: Vec<f32>| match all.get(name) {
        Some(known) if *known != values => Err(AppError::input(format!(
            "{}: `graph.tensors`: two tensors give different values to `{name}`; give the parts of weights different sources",
            model.file()
        ))),
        _ => {
            all.insert(name.to_string(), values);
            Ok(())
        }
    };
    for (index, tensor) in graph.tensors.iter().enumerate() {
        let needed = matches!(tensor.role, Role::Input | Role::Weight { .. } | Role::Constant);
        let source = sources.get(&tensor.name);
        if !needed && source.is_none() {
            continue;
        }
        let is_random = match source {
            None => random.is_some(),
            Some(source) => matches!(source, DataSource::Random { .. }),
        };
        if is_random && build.as_ref().is_some_and(|build| !build.contains(&(index as u32))) {
            continue;
        }
        let values = match source {
            Some(DataSource::Values { values }) => given_values(model, tensor, values)?,
            Some(DataSource::Random { random }) => {
                random_values(&RandomWeights::new(random.seed), tensor, rank)
            }
            Some(DataSource::File { file, tensor: name }) => file_values(model, file, name, tensor)?,
            None => match random {
                Some(random) => random_values(random, tensor, rank),
                None => {
                    return Err(AppError::input(format!(
                        "{}: `graph.tensors`: `{}` has no values; give it `data`, or the model `weights`",
                        model.file(),
                        tensor.name
                    )));
                }
            },
        };
        if let Role::Weight { parts } = &tensor.role {
            let mut rest = values.as_slice();
            for part in parts {
                let (own, others) =
                    rest.split_at((part.dims.iter().product::<u64>() as usize).min(rest.len()));
                insert(&part.source, own.to_vec())?;
                rest = others;
            }
        } else {
            insert(&tensor.name, values)?;
        }
    }
    Ok(all)
}

/// The tensors whose values decide how the graph is built: those of operators with constant inputs, which are folded, and weights
/// that share a part, whose values must agree.
fn needed_to_build(graph: &OpGraph) -> HashSet<u32> {
    let mut needed = HashSet::new();
    let mut constant = HashSet::new();
    let mut holders: HashMap<&str, Vec<u32>> = HashMap::new();
    for (index, tensor) in (0..).zip(&graph.tensors) {
        if let Role::Weight { parts } = &tensor.role {
            parts.iter().for_each(|part| holders.entry(&part.source).or_default().push(index));
        }
        if matches!(tensor.role, Role::Weight { .. } | Role::Constant) {
            constant.insert(index);
        }
    }
    needed.extend(holders.values().filter(|holders| holders.len() > 1).flatten());
    for op in &graph.ops {
        if op.inputs.iter().all(|input| constant.contains(input)) {
            needed.extend(&op.inputs);
            constant.extend(&op.outputs);
        }
    }
    needed
}

/// The values that the graph lists. They are f32 on their way to the tensor, so an integer tensor takes the whole numbers that f32 holds.
fn given_values(model: &ModelJson, tensor: &Tensor, values: &[f64]) -> Result<Vec<f32>, AppError> {
    let range = match tensor.dtype {
        DType::I32 => f64::from(i32::MIN)..=f64::from(i32::MAX),
        DType::U32 => 0.0..=f64::from(u32::MAX),
        dtype => return given_floats(model, tensor, dtype, values),
    };
    let fits = |v: f64| range.contains(&v) && v.fract() == 0.0 && f64::from(v as f32) == v;
    if let Some(bad) = values.iter().find(|&&v| !fits(v)) {
        return Err(AppError::input(format!(
            "{}: `graph.tensors`: `{}`: {bad} is not a value of type {}, which takes whole numbers (from 2^24 on, only those that f32 can represent)",
            model.file(),
            tensor.name,
            tensor.dtype
        )));
    }
    Ok(values.iter().map(|&v| v as f32).collect())
}

/// A listed number must not become infinity in the tensor's type: the results would not be numbers.
fn given_floats(
    model: &ModelJson,
    tensor: &Tensor,
    dtype: DType,
    values: &[f64],
) -> Result<Vec<f32>, AppError> {
    let stored = |v: f64| match dtype {
        DType::F16 => half::f16::from_f64(v).to_f64(),
        DType::Bf16 => half::bf16::from_f64(v).to_f64(),
        _ => f64::from(v as f32),
    };
    if let Some(bad) = values.iter().find(|&&v| stored(v).is_infinite()) {
        return Err(AppError::input(format!(
            "{}: `graph.tensors`: `{}`: {bad:e} is too large for {dtype}",
            model.file(),
            tensor.name
        )));
    }
    Ok(values.iter().map(|&v| v as f32).collect())
}

fn random_values(random: &RandomWeights, tensor: &Tensor, rank: u32) -> Vec<f32> {
    let shape: Vec<usize> = tensor.dims.iter().map(|&d| d as usize).collect();
    let name = match tensor.sharding {
        Sharding::Partial => format!("{}.{rank}", tensor.name),
        _ => tensor.name.clone(),
    };
    let source = random.tensor(&name, &shape);
    (0..shape.iter().product::<usize>() as u64).map(|index| source.value(index)).collect()
}

fn file_values(model: &ModelJson, file: &str, name: &str, tensor: &Tensor) -> Result<Vec<f32>, AppError> {
    let path = model.path.parent().unwrap_or(std::path::Path::new("")).join(file);
    let error = |problem: String| AppError::input(format!("{}: {problem}", path.display()));
    let bytes = files::read(&path)?;
    let file = safetensors::SafeTensors::deserialize(&bytes)
        .map_err(|e| error(checkpoint::header_problem(&e, &bytes)))?;
    let view = file.tensor(name).map_err(|e| error(e.to_string()))?;
    let dims: Vec<u64> = view.shape().iter().map(|&d| d as u64).collect();
    if dims != tensor.dims {
        return Err(error(format!("tensor `{name}` has shape {dims:?}, the graph says {:?}", tensor.dims)));
    }
    let dtype = match view.dtype() {
        safetensors::Dtype::F32 => WeightDtype::F32,
        safetensors::Dtype::F16 => WeightDtype::F16,
        safetensors::Dtype::BF16 => WeightDtype::Bf16,
        other => {
            return Err(error(format!("tensor `{name}` has type {other:?}; F32, F16 and BF16 are possible")));
        }
    };
    let mut values = vec![0f32; view.data().len() / dtype.size()];
    convert(dtype, view.data(), WeightDtype::F32, bytemuck::cast_slice_mut(&mut values));
    Ok(values)
}

/// This rank's part of a tensor that is given as a whole.
fn local_values(values: &[f32], tensor: &Tensor, (rank, world): (u32, u32)) -> Vec<f32> {
    let Sharding::Split { dim, parts } = &tensor.sharding else { return values.to_vec() };
    let inner: usize = tensor.dims[dim + 1..].iter().product::<u64>() as usize;
    let outer: usize = tensor.dims[..*dim].iter().product::<u64>() as usize;
    let length = tensor.dims[*dim] as usize;
    let mut local = Vec::new();
    for block in 0..outer {
        let mut first = 0;
        for part in parts {
            let range = part.split.range(part.len, rank, world);
            let at = |index: u64| (block * length + first + index as usize) * inner;
            local.extend_from_slice(&values[at(range.start)..at(range.end)]);
            first += part.len as usize;
        }
    }
    local
}

/// Writes this rank's part of a given tensor in the tensor's type, row by row. Without values, nothing is written.
fn fill_local(
    tensor: &Tensor,
    weights: &WeightSource,
    place: (u32, u32),
    bytes: &mut [u8],
) -> Result<(), AppError> {
    let WeightSource::Values(values) = weights else { return Ok(()) };
    let Some(values) = whole(values, tensor) else { return Ok(()) };
    let local = local_values(&values, tensor, place);
    match tensor.dtype {
        DType::I32 => {
            for (out, v) in bytes.chunks_exact_mut(4).zip(&local) {
                out.copy_from_slice(&(*v as i32).to_le_bytes());
            }
        }
        DType::U32 => {
            for (out, v) in bytes.chunks_exact_mut(4).zip(&local) {
                out.copy_from_slice(&(*v as u32).to_le_bytes());
            }
        }
        _ => {
            let dtype = weight_dtype(tensor.dtype).ok_or_else(|| {
                AppError::input(format!(
                    "tensor {}: values of type {} cannot be given",
                    tensor.name, tensor.dtype
                ))
            })?;
            let size = local.len() * dtype.size();
            convert(WeightDtype::F32, bytemuck::cast_slice(&local), dtype, &mut bytes[..size]);
        }
    }
    Ok(())
}

/// This rank's part of a given tensor in the tensor's type; zeros if it has no values.
pub(super) fn local_bytes(
    tensor: &Tensor,
    weights: &WeightSource,
    place: (u32, u32),
) -> Result<Vec<u8>, AppError> {
    let local = tensor.sharding.local_dims(&tensor.dims, place.0, place.1);
    let mut bytes = vec![0u8; (local.iter().product::<u64>() * tensor.dtype.size()) as usize];
    fill_local(tensor, weights, place, &mut bytes)?;
    Ok(bytes)
}

/// Writes this rank's parts of the graph's inputs.
pub(super) fn write_inputs(
    rank: &mut Rank,
    graph: &OpGraph,
    weights: &WeightSource,
    world: &World,
) -> Result<(), AppError> {
    for tensor in graph.tensors.iter().filter(|t| matches!(t.role, Role::Input)) {
        let bytes = local_bytes(tensor, weights, (world.rank(), world.size()))?;
        rank.write_input(&tensor.name, &bytes)?;
    }
    Ok(())
}
