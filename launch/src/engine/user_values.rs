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
        Some(known) if !same_bits(known, &values) => Err(AppError::input(format!(
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
        if is_random {
            check_random(model, tensor)?;
        }
        if is_random && build.as_ref().is_some_and(|build| !build.contains(&(index as u32))) {
            continue;
        }
        let values = match source {
            Some(DataSource::Values { values }) => given_values(model, tensor, values)?,
            Some(DataSource::Random { random }) => {
                random_values(&RandomWeights::new(random.seed), tensor, rank)?
            }
            Some(DataSource::File { file, tensor: name }) => file_values(model, file, name, tensor)?,
            None => match random {
                Some(random) => random_values(random, tensor, rank)?,
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

/// Compares bits: values that are not numbers are unequal to themselves.
fn same_bits(one: &[f32], other: &[f32]) -> bool {
    bytemuck::cast_slice::<f32, u8>(one) == bytemuck::cast_slice::<f32, u8>(other)
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

/// The values that the graph lists.
fn given_values(model: &ModelJson, tensor: &Tensor, values: &[f64]) -> Result<Vec<f32>, AppError> {
    if let Some(problem) = misfit(tensor.dtype, values.iter().copied()) {
        let file = model.file();
        return Err(AppError::input(format!("{file}: `graph.tensors`: `{}`: {problem}", tensor.name)));
    }
    let mut narrow: Vec<f32> = room(&tensor.name, values.len())?;
    narrow.extend(values.iter().map(|&v| v as f32));
    Ok(narrow)
}

/// Why a tensor of type `dtype` cannot have these values, if it cannot. They are f32 on their way to the tensor, so an integer tensor
/// takes the whole numbers that f32 holds. A number must not become infinity: the results would not be numbers.
fn misfit(dtype: DType, mut values: impl Iterator<Item = f64>) -> Option<String> {
    let range = match dtype {
        DType::I32 => f64::from(i32::MIN)..=f64::from(i32::MAX),
        DType::U32 => 0.0..=f64::from(u32::MAX),
        _ => {
            let stored = |v: f64| match dtype {
                DType::F16 => half::f16::from_f64(v).to_f64(),
                DType::Bf16 => half::bf16::from_f64(v).to_f64(),
                _ => f64::from(v as f32),
            };
            let bad = values.find(|&v| v.is_finite() && stored(v).is_infinite())?;
            let fix = match dtype {
                DType::F16 => "use bf16 or f32, or smaller values",
                _ => "use smaller values",
            };
            return Some(format!("{bad:e} is too large for {dtype}; {fix}"));
        }
    };
    let fits = |v: f64| range.contains(&v) && v.fract() == 0.0 && f64::from(v as f32) == v;
    let bad = values.find(|&v| !fits(v))?;
    Some(format!(
        "{bad} is not a value of type {dtype}, which takes whole numbers (from 2^24 on, only those that f32 can represent)"
    ))
}

/// Memory for `count` elements of tensor `name`. Without it, the allocator would end the process without saying for what.
fn room<T>(name: &str, count: usize) -> Result<Vec<T>, AppError> {
    let mut elements = Vec::new();
    elements.try_reserve_exact(count).map_err(|_| {
        let bytes = count as u128 * size_of::<T>() as u128;
        AppError::environment(format!("cannot allocate {bytes} bytes of host memory for tensor `{name}`"))
            .with_help("make the tensor smaller, or use a machine with more memory")
    })?;
    Ok(elements)
}

/// Refuses random values for integers: all would be rounded to zero.
fn check_random(model: &ModelJson, tensor: &Tensor) -> Result<(), AppError> {
    if !matches!(tensor.dtype, DType::I32 | DType::U32) {
        return Ok(());
    }
    Err(AppError::input(format!(
        "{}: `graph.tensors`: `{}` has type {}, but random values are fractions",
        model.file(),
        tensor.name,
        tensor.dtype
    ))
    .with_help(r#"give it whole numbers: "data": {"values": [..]} or {"file": "..", "tensor": ".."}"#))
}

fn random_values(random: &RandomWeights, tensor: &Tensor, rank: u32) -> Result<Vec<f32>, AppError> {
    let shape: Vec<usize> = tensor.dims.iter().map(|&d| d as usize).collect();
    let name = match tensor.sharding {
        Sharding::Partial => format!("{}.{rank}", tensor.name),
        _ => tensor.name.clone(),
    };
    let source = random.tensor(&name, &shape);
    let count = shape.iter().product::<usize>();
    let mut values: Vec<f32> = room(&tensor.name, count)?;
    values.extend((0..count as u64).map(|index| source.value(index)));
    Ok(values)
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
    let count = view.data().len() / dtype.size();
    let mut values: Vec<f32> = room(&tensor.name, count)?;
    values.resize(count, 0.0);
    convert(dtype, view.data(), WeightDtype::F32, bytemuck::cast_slice_mut(&mut values));
    if let Some(problem) = misfit(tensor.dtype, values.iter().map(|&v| f64::from(v))) {
        return Err(error(format!("tensor `{name}`, the data of `{}`: {problem}", tensor.name)));
    }
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
    let count = (local.iter().product::<u64>() * tensor.dtype.size()) as usize;
    let mut bytes: Vec<u8> = room(&tensor.name, count)?;
    bytes.resize(count, 0);
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use taskgraph::Rows;
    use taskgraph::op_graph::WeightPart;

    fn tensor(name: &str, dtype: DType, role: Role, dims: &[u64]) -> Tensor {
        Tensor {
            name: name.into(),
            dtype,
            dims: dims.to_vec(),
            rows: Rows::Fixed,
            role,
            sharding: Sharding::Replicated,
            output: false,
        }
    }

    /// A folder whose `a.safetensors` has the tensor `t` with these f32 values, and the model.json beside it.
    fn folder(values: &[f32]) -> (tempfile::TempDir, ModelJson) {
        let folder = tempfile::tempdir().unwrap();
        let end = 4 * values.len();
        let header =
            format!(r#"{{"t":{{"dtype":"F32","shape":[{}],"data_offsets":[0,{end}]}}}}"#, values.len());
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        std::fs::write(folder.path().join("a.safetensors"), bytes).unwrap();
        let model = ModelJson::of_checkpoint(&folder.path().join("model.json"));
        (folder, model)
    }

    fn from_file(values: &[f32], dtype: DType) -> Result<Vec<f32>, AppError> {
        let (_folder, model) = folder(values);
        let tensor = tensor("x", dtype, Role::Input, &[values.len() as u64]);
        file_values(&model, "a.safetensors", "t", &tensor)
    }

    /// A file is held to what `values` is held to.
    #[test]
    fn a_file_must_have_values_of_the_tensors_type() {
        for (dtype, bad, words) in [
            (DType::I32, 1.5, "1.5 is not a value of type i32"),
            (DType::I32, 3e9, "3000000000 is not a value of type i32"),
            (DType::I32, f32::NAN, "NaN is not a value of type i32"),
            (DType::U32, -1.0, "-1 is not a value of type u32"),
            (DType::F16, 1e5, "1e5 is too large for f16; use bf16 or f32"),
            (DType::Bf16, f32::MAX, "is too large for bf16"),
        ] {
            let error = from_file(&[1.0, bad], dtype).unwrap_err();
            assert_eq!(error.status, 2);
            let message = error.to_string();
            assert!(message.contains("a.safetensors: tensor `t`, the data of `x`: "), "{message}");
            assert!(message.contains(words), "{message}");
        }
        assert_eq!(from_file(&[-3.0, 16_777_216.0], DType::I32).unwrap(), [-3.0, 16_777_216.0]);
        // These are infinite already.
        assert_eq!(from_file(&[f32::INFINITY, 65_504.0], DType::F16).unwrap(), [f32::INFINITY, 65_504.0]);
    }

    #[test]
    fn random_values_of_integers_are_refused() {
        let model = ModelJson::of_checkpoint(Path::new("model.json"));
        let random = RandomWeights::new(1);
        for dtype in [DType::I32, DType::U32] {
            let mut graph = OpGraph::new("g", taskgraph::Capacity { rows: 1, samples: 1, active: 1 });
            graph.tensors.push(tensor("ids", dtype, Role::Constant, &[2]));
            for wanted in [Wanted::All, Wanted::ToBuild] {
                let found = values(&model, &graph, &DataSources::new(), Some(&random), 0, wanted);
                let message = found.unwrap_err().to_string();
                let problem = format!("`ids` has type {dtype}, but random values are fractions");
                assert!(message.contains(&problem) && message.contains("give it whole numbers"), "{message}");
            }
        }
    }

    /// NaN is unequal to itself, but both weights read the same bytes.
    #[test]
    fn weights_that_share_a_part_may_lack_numbers() {
        let (_folder, model) = folder(&[1.0, f32::NAN]);
        let parts = vec![WeightPart { source: "s".into(), dims: vec![2] }];
        let mut graph = OpGraph::new("g", taskgraph::Capacity { rows: 1, samples: 1, active: 1 });
        let mut sources = DataSources::new();
        for name in ["v", "w"] {
            graph.tensors.push(tensor(name, DType::F32, Role::Weight { parts: parts.clone() }, &[2]));
            let file = DataSource::File { file: "a.safetensors".into(), tensor: "t".into() };
            sources.insert(name.into(), file);
        }
        let all = values(&model, &graph, &sources, None, 0, Wanted::All).unwrap();
        assert!(same_bits(&all["s"], &[1.0, f32::NAN]));
        sources.insert("w".into(), DataSource::Values { values: vec![1.0, 2.0] });
        let error = values(&model, &graph, &sources, None, 0, Wanted::All).unwrap_err();
        assert!(error.to_string().contains("different values to `s`"), "{error}");
    }

    /// 2^48 bytes are more than a process can address.
    #[test]
    fn a_tensor_that_does_not_fit_into_memory_is_named() {
        let large = tensor("large", DType::F32, Role::Input, &[1 << 23, 1 << 23]);
        let none = WeightSource::Values(Values::new());
        let random = random_values(&RandomWeights::new(1), &large, 0).map(drop);
        for found in [random, local_bytes(&large, &none, (0, 1)).map(drop)] {
            let error = found.unwrap_err();
            assert_eq!(error.status, 3);
            let problem = "cannot allocate 281474976710656 bytes of host memory for tensor `large`; make";
            assert!(error.to_string().starts_with(problem), "{error}");
        }
    }
}
