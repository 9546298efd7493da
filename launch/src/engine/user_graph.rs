//! `"graph"` in model.json: an op graph of the user's own, called a user graph.
//!
//! Its rows are the positions 0, 1, ... of one sequence slot. Their tokens, for `embedding`, come from
//! `generate.prompt_tokens`. The values of a split tensor are those of the whole tensor. A `partial` input has the same
//! given values on every rank, so the sum is N times them; random values differ by rank.

use crate::engine::agreement::together;
use crate::engine::backend::Backend;
use crate::engine::config::RunConfig;
use crate::engine::error::Error;
use crate::engine::graphs::{build_options, build_together};
use crate::engine::launch::{launch, load, run_options};
use crate::engine::tuning;
use crate::model::app_error::AppError;
use crate::model::convert::convert;
use crate::model::files;
use crate::model::fill::{fill_weight, filled, read_piece, weight_dtype, weight_pieces};
use crate::model::fold::fold;
use crate::model::hf_config::WeightDtype;
use crate::model::model_json::ModelJson;
use crate::model::not_numbers::NotNumbers;
use crate::model::random_weights::RandomWeights;
use crate::model::weights::WeightSource;
use distributed::fill::{Piece, TensorSource};
use distributed::plan::{BatchPlan, Mode};
use distributed::{Rank, World};
use serde_json::Value;
use std::collections::HashMap;
use std::ops::Range;
use std::time::{Duration, Instant};
use taskgraph::json::{DataSource, DataSources, op_graph_from_value};
use taskgraph::op_graph::{Role, Tensor};
use taskgraph::task_graph::TensorEntry;
use taskgraph::{Builder, DType, OpGraph, Rows, Sharding};

/// A parsed user graph, with the sources of its values.
pub struct Parsed {
    /// The graph.
    pub graph: OpGraph,
    /// Sources by tensor name.
    pub sources: DataSources,
}

/// Reads `"graph"`.
pub fn parse(model: &ModelJson, graph: &Value) -> Result<Parsed, AppError> {
    let (graph, sources) =
        op_graph_from_value(graph, "graph").map_err(|e| AppError::input(format!("{}: {e}", model.file())))?;
    check_input_rows(model, &graph)?;
    Ok(Parsed { graph, sources })
}

/// Checks that inputs have exactly as many rows as the graph, because kernels count rows, not bytes.
fn check_input_rows(model: &ModelJson, graph: &OpGraph) -> Result<(), AppError> {
    for tensor in graph.tensors.iter().filter(|t| matches!(t.role, Role::Input | Role::Activation)) {
        let (wanted, of) = match tensor.rows {
            Rows::Tokens => (graph.capacity.rows, "rows"),
            Rows::Samples => (graph.capacity.samples, "samples"),
            Rows::Fixed => continue,
        };
        let Some(&rows) = tensor.dims.get(tensor.dims.len().saturating_sub(2)) else { continue };
        if rows != u64::from(wanted) {
            return Err(AppError::input(format!(
                "{}: `graph.tensors`: `{}` has {rows} rows, but `graph.{of}` is {wanted}",
                model.file(),
                tensor.name
            )));
        }
    }
    Ok(())
}

/// Some operators work on the rows of the batch, not on those of their input. Checks that their inputs have as many rows.
fn check_batch_rows(model: &ModelJson, graph: &OpGraph) -> Result<(), AppError> {
    for op in &graph.ops {
        let (dim, wanted) = match op.op_type.as_str() {
            "attention" => (0, graph.capacity.rows),
            "argmax_partial" => (0, graph.capacity.samples),
            "argmax_reduce" => (2, graph.capacity.samples),
            _ => continue,
        };
        let Some(tensor) = op.inputs.first().map(|&t| &graph.tensors[t as usize]) else { continue };
        if tensor.dims.get(dim).is_some_and(|&rows| rows < u64::from(wanted)) {
            return Err(AppError::input(format!(
                "{}: operator `{}`: `{}` has dimensions {:?}, but {wanted} rows are in use",
                model.file(),
                op.name,
                tensor.name,
                tensor.dims
            )));
        }
    }
    Ok(())
}

/// What the graph's sequence needs from the batch: the page size and the tokens of the rows.
struct Sequence {
    page_size: u32,
    pages: u32,
    tokens: Vec<i32>,
}

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

/// The result of running a graph.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct GraphRun {
    /// The complete outputs, in the order of the graph's tensors.
    pub outputs: Vec<Output>,
    /// How long the launch took.
    pub took: Duration,
    /// True if the outputs that every rank holds completely have the same bits on all ranks.
    pub same_on_all_ranks: bool,
}

/// A graph that has been loaded.
pub(crate) struct UserGraph {
    /// The given graph, with constants folded.
    graph: OpGraph,
    /// The graph as the ranks hold it.
    sharded: OpGraph,
    values: WeightSource,
    sequence: Sequence,
}

impl UserGraph {
    /// Collective: builds and verifies the graph, and fills its weights.
    pub fn load(
        world: &World,
        config: &RunConfig,
        model: &ModelJson,
        graph: &Value,
        random: Option<&RandomWeights>,
        backend: Backend,
    ) -> Result<(UserGraph, Rank), Error> {
        world.phase("graphs");
        let prepared = parse(model, graph).and_then(|parsed| {
            let sequence = sequence(model, &parsed.graph)?;
            Ok((parsed, sequence))
        });
        let (parsed, sequence) = together(world, prepared)?;
        let mut target = backend.target(world, model)?;
        let given = config.tuning.check(tuning::knobs(target.backend));
        together(world, given.map_err(|problem| AppError::input(format!("tuning: {problem}"))))?;
        target.tuning = config.tuning.clone();
        let options = together(world, build_options(config, model, world.nodes(), target))?;
        let Parsed { graph, sources } = parsed;
        let mut ops = [graph];
        let registry = kernels_cu::registry::registry();
        let sharded =
            Builder::new(&ops[0], &registry, &options.decode).map_err(AppError::from).and_then(|builder| {
                check_batch_rows(model, builder.op_graph())?;
                Ok(builder.op_graph().clone())
            });
        let sharded = together(world, sharded)?;
        // Memory is allocated only now, when the shapes are known to be consistent.
        let mut values = together(world, values(model, &ops[0], &sources, random, world.rank()))?;
        ops[0] = together(world, fold(&ops[0], &mut values, &registry, &options.decode))?;
        let graphs = build_together(world, &ops, &options)?;
        let run_options = together(world, run_options(config, &graphs[0].ops))?;
        let [graph] = ops;
        let loaded = UserGraph { graph, sharded, values: WeightSource::Values(values), sequence };
        let threads = backend.readers();
        world.phase("memory");
        let mut rank = backend.rank(world, config, &config.tuning, graphs, loaded.plan(1), &run_options)?;
        world.phase("weights");
        let place = (world.rank(), world.size());
        let not_numbers = NotNumbers::default();
        let source =
            GivenValues { graph: &loaded.graph, weights: &loaded.values, not_numbers: &not_numbers, place };
        let filled = load(world, &mut rank, threads, config, &source);
        together(world, filled)?;
        not_numbers.warn(world);
        Ok((loaded, rank))
    }

    fn plan(&self, iterations: u32) -> BatchPlan {
        BatchPlan {
            max_batch: self.graph.capacity.active,
            max_seq_len: self.sequence.page_size * self.sequence.pages,
            page_size: self.sequence.page_size,
            num_pages: self.sequence.pages,
            top_k: 0,
            eos: Vec::new(),
            mode: Mode::Fixed { iterations, tokens: self.sequence.tokens.clone() },
        }
    }

    /// Collective: runs the graph on its inputs this many times in one launch. Rank 0 returns the outputs.
    pub fn run(
        &self,
        world: &World,
        rank: &mut Rank,
        deadline: Duration,
        iterations: u32,
    ) -> Result<GraphRun, Error> {
        world.phase("inputs");
        together(world, rank.restart(&self.plan(iterations)).map_err(AppError::from))?;
        let written = write_inputs(rank, &self.graph, &self.values, world);
        together(world, written)?;
        let started = Instant::now();
        launch(world, rank, deadline)?;
        let took = started.elapsed();
        world.phase("results");
        let locals = together(world, locals(rank, &self.sharded))?;
        let (outputs, same_on_all_ranks) = outputs(world, locals, &self.sharded);
        Ok(GraphRun { outputs, took, same_on_all_ranks })
    }
}

/// The given values of weights and constants.
struct GivenValues<'a> {
    graph: &'a OpGraph,
    weights: &'a WeightSource,
    not_numbers: &'a NotNumbers,
    place: (u32, u32),
}

impl TensorSource for GivenValues<'_> {
    type Error = AppError;

    fn fill(&self, tensor: &TensorEntry, bytes: &mut [u8]) -> Result<(), AppError> {
        match tensor.role {
            Role::Constant => fill_local(self.graph, self.weights, &tensor.name, self.place, bytes),
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

/// Global values of every input, weight and constant by name. A weight is listed by the names of its parts.
fn values(
    model: &ModelJson,
    graph: &OpGraph,
    sources: &DataSources,
    random: Option<&RandomWeights>,
    rank: u32,
) -> Result<HashMap<String, Vec<f32>>, AppError> {
    let mut all = HashMap::new();
    for tensor in &graph.tensors {
        let needed = matches!(tensor.role, Role::Input | Role::Weight { .. } | Role::Constant);
        let source = sources.get(&tensor.name);
        if !needed && source.is_none() {
            continue;
        }
        let values = match source {
            Some(DataSource::Values { values }) => values.iter().map(|&v| v as f32).collect(),
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
                all.insert(part.source.clone(), own.to_vec());
                rest = others;
            }
        } else {
            all.insert(tensor.name.clone(), values);
        }
    }
    Ok(all)
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
    let file = safetensors::SafeTensors::deserialize(&bytes).map_err(|e| error(e.to_string()))?;
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

/// Checks what the kernels need from the sequence: KV pages, rope rows, tokens.
fn sequence(model: &ModelJson, graph: &OpGraph) -> Result<Sequence, AppError> {
    let error =
        |op: &str, problem: String| AppError::input(format!("{}: operator `{op}`: {problem}", model.file()));
    let rows = graph.capacity.rows;
    let tokens: Vec<i32> = model
        .generate
        .prompt_tokens
        .first()
        .map(|t| t.iter().map(|&t| t as i32).collect())
        .unwrap_or_default();
    let mut page_size = None;
    for op in &graph.ops {
        let input = |index: usize| op.inputs.get(index).map(|&t| &graph.tensors[t as usize]);
        match op.op_type.as_str() {
            "attention" => {
                let Some([pages, _, size, _]) = input(1).map(|t| &t.dims[..]) else { continue };
                if *page_size.get_or_insert(*size) != *size {
                    return Err(error(&op.name, "all KV caches of a graph have the same page size".into()));
                }
                if !size.is_power_of_two() {
                    return Err(error(&op.name, format!("page size {size} is not a power of two")));
                }
                if pages * size < u64::from(rows) {
                    return Err(error(
                        &op.name,
                        format!("{pages} KV pages of {size} do not hold {rows} rows"),
                    ));
                }
                if let Some(rope) = input(2)
                    && rope.dims.first().is_some_and(|&n| n < u64::from(rows))
                {
                    return Err(error(&op.name, format!("the rope table has fewer than {rows} positions")));
                }
            }
            "embedding" => {
                let vocabulary = input(0).and_then(|t| t.dims.first().copied()).unwrap_or(0);
                if tokens.len() < rows as usize {
                    let problem = format!("give the {rows} rows' tokens in generate.prompt_tokens[0]");
                    return Err(error(&op.name, problem));
                }
                if let Some(bad) = tokens.iter().find(|&&t| t < 0 || t as u64 >= vocabulary) {
                    return Err(error(
                        &op.name,
                        format!("token {bad} is not below the table's {vocabulary} rows"),
                    ));
                }
            }
            _ => {}
        }
    }
    let page_size = page_size
        .map_or(rows.checked_next_power_of_two(), |size| u32::try_from(size).ok())
        .ok_or_else(|| AppError::input(format!("{}: the page size does not fit 32 bits", model.file())))?;
    Ok(Sequence { page_size, pages: rows.div_ceil(page_size), tokens })
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

/// Writes this rank's part of a given tensor in the tensor's type.
fn fill_local(
    graph: &OpGraph,
    weights: &WeightSource,
    name: &str,
    place: (u32, u32),
    bytes: &mut [u8],
) -> Result<(), AppError> {
    let WeightSource::Values(values) = weights else { return Ok(()) };
    let tensor = graph.tensors.iter().find(|t| t.name == name);
    let (Some(tensor), Some(values)) = (tensor, values.get(name)) else { return Ok(()) };
    let local = local_values(values, tensor, place);
    match tensor.dtype {
        DType::I32 | DType::U32 => {
            for (out, v) in bytes.chunks_exact_mut(4).zip(&local) {
                out.copy_from_slice(&(*v as i64 as u32).to_le_bytes());
            }
        }
        _ => {
            let dtype = weight_dtype(tensor.dtype).ok_or_else(|| {
                AppError::input(format!("tensor {name}: values of type {} can't be given", tensor.dtype))
            })?;
            let size = local.len() * dtype.size();
            convert(WeightDtype::F32, bytemuck::cast_slice(&local), dtype, &mut bytes[..size]);
        }
    }
    Ok(())
}

fn write_inputs(
    rank: &mut Rank,
    graph: &OpGraph,
    weights: &WeightSource,
    world: &World,
) -> Result<(), AppError> {
    for tensor in graph.tensors.iter().filter(|t| matches!(t.role, Role::Input)) {
        let local = tensor.sharding.local_dims(&tensor.dims, world.rank(), world.size());
        let mut bytes = vec![0u8; (local.iter().product::<u64>() * tensor.dtype.size()) as usize];
        fill_local(graph, weights, &tensor.name, (world.rank(), world.size()), &mut bytes)?;
        rank.write_input(&tensor.name, &bytes)?;
    }
    Ok(())
}

/// This rank's parts of the output tensors, in the order of the graph's tensors.
fn locals(rank: &Rank, graph: &OpGraph) -> Result<Vec<Vec<f64>>, AppError> {
    graph
        .tensors
        .iter()
        .filter(|t| t.output)
        .map(|tensor| {
            let read = rank.read(0, &tensor.name)?;
            Ok(read.map_or_else(Vec::new, |(entry, bytes)| {
                let count = entry.dims.iter().map(|&d| d as usize).product::<usize>();
                as_f64(entry.dtype, &bytes, count)
            }))
        })
        .collect()
}

/// Collective: rank 0 returns the complete outputs, and whether outputs that every rank holds completely are the same
/// everywhere.
fn outputs(world: &World, locals: Vec<Vec<f64>>, graph: &OpGraph) -> (Vec<Output>, bool) {
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
