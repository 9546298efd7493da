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
use crate::engine::user_outputs::{Output, locals, outputs};
use crate::engine::user_places::Places;
pub use crate::engine::user_values::Wanted;
use crate::engine::user_values::{GivenValues, values, write_inputs};
use crate::model::app_error::AppError;
use crate::model::fold::{Values, fold};
use crate::model::model_json::ModelJson;
use crate::model::not_numbers::NotNumbers;
use crate::model::random_weights::RandomWeights;
use crate::model::weights::WeightSource;
use distributed::plan::{BatchPlan, Mode};
use distributed::{Rank, World};
use serde_json::Value;
use std::time::{Duration, Instant};
use taskgraph::json::{DataSources, op_graph_from_value};
use taskgraph::op_graph::Role;
use taskgraph::words::counted;
use taskgraph::{BuildError, BuildOptions, Builder, Capacity, OpGraph, Rows};

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
    check_outputs(model, &graph)?;
    check_input_rows(model, &graph)?;
    Ok(Parsed { graph, sources })
}

/// Checks that some tensor is an output: a run without one shows nothing.
fn check_outputs(model: &ModelJson, graph: &OpGraph) -> Result<(), AppError> {
    if graph.tensors.iter().any(|tensor| tensor.output) {
        return Ok(());
    }
    let last = graph.ops.last().and_then(|op| op.outputs.first()).map(|&t| &graph.tensors[t as usize].name);
    let example = last.map_or_else(String::new, |name| format!(", such as `{name}`"));
    Err(AppError::input(format!(
        "{}: `graph.outputs` names no tensor, so the run would show nothing; name at least one{example}",
        model.file()
    )))
}

/// Checks that tensors whose rows are those of the batch have exactly as many rows as the graph, because kernels count rows, not
/// bytes. Tensors of more dimensions are not matrices of rows; the operators check those.
fn check_input_rows(model: &ModelJson, graph: &OpGraph) -> Result<(), AppError> {
    for tensor in graph.tensors.iter().filter(|t| !matches!(t.role, Role::Weight { .. })) {
        let (wanted, of, field) = match tensor.rows {
            Rows::Tokens => (graph.capacity.rows, "rows", "tokens"),
            Rows::Samples => (graph.capacity.samples, "samples", "samples"),
            Rows::Fixed => continue,
        };
        let ([rows] | [rows, _]) = tensor.dims[..] else { continue };
        if rows != u64::from(wanted) {
            return Err(AppError::input(format!(
                "{}: `graph.tensors`: `{}` has {rows} rows, but `graph.{of}` is {wanted}",
                model.file(),
                tensor.name
            ))
            .with_help(format!(
                "a tensor with \"rows\": \"{field}\" has the rows of the graph; if `{}` has others, set it to \"fixed\"",
                tensor.name
            )));
        }
    }
    Ok(())
}

/// A graph that is ready to be built, and everything about it that is known without running it.
pub struct Prepared {
    /// The given graph, with constants folded.
    pub graph: OpGraph,
    /// The graph as the ranks hold it.
    sharded: OpGraph,
    values: Values,
    sequences: Sequences,
    /// Where its parts are in model.json.
    pub places: Places,
}

impl Prepared {
    /// Reads and checks `"graph"` for rank `rank`. `wanted` says of which tensors the values are kept.
    ///
    /// # Errors
    /// The graph cannot run: its shapes do not fit, values or tokens are missing or invalid, or an input has fewer rows than the
    /// batch. The verifier does not see the last: such rows are known by the batch.
    pub fn new(
        model: &ModelJson,
        graph: &Value,
        random: Option<&RandomWeights>,
        rank: u32,
        options: &BuildOptions,
        wanted: Wanted,
    ) -> Result<Prepared, AppError> {
        let Parsed { graph, sources } = parse(model, graph)?;
        let places = Places::new(model, &graph);
        let sequences = sequences(model, &graph, &places)?;
        let registry = kernels_cu::registry::registry();
        let builder = Builder::new(&graph, &registry, options).map_err(|error| places.error(error))?;
        check_batch_rows(builder.op_graph(), &places)?;
        let sharded = builder.op_graph().clone();
        // Memory is allocated only now, when the shapes are known to be consistent.
        let mut values = values(model, &graph, &sources, random, rank, wanted)?;
        let graph = fold(&graph, &mut values, &registry, options).map_err(|error| places.error(error))?;
        Ok(Prepared { graph, sharded, values, sequences, places })
    }
}

/// Some operators work on the rows of the batch, not on those of their input. Checks that their inputs have as many rows.
fn check_batch_rows(graph: &OpGraph, places: &Places) -> Result<(), AppError> {
    for op in &graph.ops {
        let (dim, wanted) = match op.op_type.as_str() {
            "attention" => (0, graph.capacity.rows),
            "argmax_partial" | "sample_partial" => (0, graph.capacity.samples),
            "argmax_reduce" | "sample_reduce" => (2, graph.capacity.samples),
            _ => continue,
        };
        let Some(tensor) = op.inputs.first().map(|&t| &graph.tensors[t as usize]) else { continue };
        if tensor.dims.get(dim).is_some_and(|&rows| rows < u64::from(wanted)) {
            let problem =
                format!("`{}` has dimensions {:?}, but {wanted} rows are in use", tensor.name, tensor.dims);
            return Err(places.error(BuildError::op(&op.name, problem)));
        }
    }
    Ok(())
}

/// What the graph's sequences need from the batch: the page size, pages per sequence, and the rows with their tokens.
struct Sequences {
    page_size: u32,
    pages: u32,
    rows: Vec<u32>,
    tokens: Vec<i32>,
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
    graph: OpGraph,
    sharded: OpGraph,
    values: WeightSource,
    sequences: Sequences,
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
        let mut target = backend.target(world, model)?;
        target.tuning = together(world, tuning::of_user_graph(config, target.backend))?;
        let mut options =
            together(world, build_options(config, model, world.nodes(), backend.reach(), target))?;
        let prepared = Prepared::new(model, graph, random, world.rank(), &options.decode, Wanted::All);
        let Prepared { graph, sharded, values, sequences, places } = together(world, prepared)?;
        options.places = Some(places);
        let ops = [graph];
        let (graphs, _) = build_together(world, &ops, &options)?;
        let run_options = together(world, run_options(config, &graphs[0].ops))?;
        let [graph] = ops;
        let loaded = UserGraph { graph, sharded, values: WeightSource::Values(values), sequences };
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
        let &Sequences { page_size, pages, ref rows, ref tokens } = &self.sequences;
        BatchPlan {
            max_batch: self.graph.capacity.active,
            max_seq_len: page_size * pages,
            page_size,
            num_pages: pages * rows.len() as u32,
            top_k: 0,
            eos: Vec::new(),
            mode: Mode::Fixed { iterations, sequences: rows.clone(), tokens: tokens.clone() },
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
        let place = (world.rank(), world.size());
        let locals = together(world, locals(rank, &self.sharded, &self.values, place))?;
        let (outputs, same_on_all_ranks) = outputs(world, locals, &self.sharded);
        Ok(GraphRun { outputs, took, same_on_all_ranks })
    }
}

/// The number of rows of each sequence. Several lists of tokens are several sequences; otherwise all rows are one.
fn rows_of_sequences(model: &ModelJson, graph: &OpGraph) -> Result<Vec<u32>, AppError> {
    let Capacity { rows, active, .. } = graph.capacity;
    let lists = &model.generate.prompt_tokens;
    if lists.len() <= 1 {
        return Ok(vec![rows]);
    }
    let all: usize = lists.iter().map(Vec::len).sum();
    if all != rows as usize || lists.len() > active as usize || lists.iter().any(Vec::is_empty) {
        return Err(AppError::input(format!(
            "{}: generate.prompt_tokens: {} with {}, but the graph has rows = {rows} and active = {active}",
            model.file(),
            counted(lists.len(), "sequence"),
            counted(all, "token")
        ))
        .with_help("give each sequence a list of at least one token, and all of them as many tokens as the graph has rows"));
    }
    Ok(lists.iter().map(|list| list.len() as u32).collect())
}

/// Checks what the kernels need from the sequences: KV pages, rope rows, tokens.
fn sequences(model: &ModelJson, graph: &OpGraph, places: &Places) -> Result<Sequences, AppError> {
    let error = |op: &str, problem: String| places.error(BuildError::op(op, problem));
    let rows = graph.capacity.rows;
    let of_sequences = rows_of_sequences(model, graph)?;
    let longest = of_sequences.iter().copied().max().unwrap_or(rows);
    let lists = match of_sequences.len() {
        1 => model.generate.prompt_tokens.get(..1).unwrap_or_default(),
        _ => &model.generate.prompt_tokens[..],
    };
    let tokens: Vec<i32> = lists.iter().flatten().map(|&token| token as i32).collect();
    let mut page_size = None;
    for op in &graph.ops {
        let input = |index: usize| op.inputs.get(index).map(|&t| &graph.tensors[t as usize]);
        match op.op_type.as_str() {
            "attention" => {
                let Some([pages, _, size, _]) = input(1).map(|t| &t.dims[..]) else { continue };
                if let Some(cache) = input(1).filter(|t| t.role == (Role::Persistent { region_dims: None })) {
                    let heads = cache.dims[1] / 2;
                    let problem = format!(
                        "`{}` needs `region_dims`, [active, key-value heads, splits], such as [{}, {heads}, 16]",
                        cache.name, graph.capacity.active
                    );
                    return Err(error(&op.name, problem));
                }
                if *page_size.get_or_insert(*size) != *size {
                    return Err(error(&op.name, "all KV caches of a graph have the same page size".into()));
                }
                if !size.is_power_of_two() {
                    return Err(error(&op.name, format!("page size {size} is not a power of two")));
                }
                let wanted = u64::from(longest).div_ceil(*size) * of_sequences.len() as u64;
                if *pages < wanted {
                    let of = counted(of_sequences.len(), "sequence");
                    let problem =
                        format!("{pages} KV pages of {size} do not hold {of} of up to {longest} rows");
                    return Err(error(&op.name, problem));
                }
                if let Some(rope) = input(2)
                    && rope.dims.first().is_some_and(|&n| n < u64::from(longest))
                {
                    return Err(error(
                        &op.name,
                        format!("the rope table has fewer than {longest} positions"),
                    ));
                }
            }
            "embedding" => {
                let vocabulary = input(0).and_then(|t| t.dims.first().copied()).unwrap_or(0);
                if tokens.len() != rows as usize {
                    let problem = format!(
                        "give the tokens of the graph's {} in generate.prompt_tokens[0], which has {}",
                        counted(rows, "row"),
                        tokens.len()
                    );
                    return Err(error(&op.name, problem));
                }
                if let Some(bad) = lists.iter().flatten().find(|&&t| u64::from(t) >= vocabulary) {
                    return Err(error(
                        &op.name,
                        format!("token {bad} is outside the table, which has {vocabulary} rows"),
                    ));
                }
            }
            _ => {}
        }
    }
    let page_size = page_size
        .map_or(rows.checked_next_power_of_two(), |size| u32::try_from(size).ok())
        .ok_or_else(|| AppError::input(format!("{}: the page size does not fit 32 bits", model.file())))?;
    Ok(Sequences { page_size, pages: longest.div_ceil(page_size), rows: of_sequences, tokens })
}
