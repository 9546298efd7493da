//! Takes a model from files to memory, ready to run.

use crate::engine::agreement::together;
use crate::engine::backend::Backend;
use crate::engine::config::RunConfig;
use crate::engine::error::Error;
use crate::engine::graphs::{build_options, build_together, check_ranks};
use crate::engine::launch::{load, run_options};
use crate::engine::same::{same_model, same_options};
use crate::engine::sampling::SamplingParams;
use crate::engine::spec::ModelSpec;
use crate::engine::stats::Start;
use crate::engine::trace;
use crate::engine::tuning::{self, Place};
use crate::engine::user_graph::UserGraph;
use crate::model::app_error::AppError;
use crate::model::families::{self, GraphOptions};
use crate::model::fill::ModelValues;
use crate::model::model_json::{Kv, ModelJson, PrefixCache, Sizes};
use crate::model::model_source::{Model, ModelSource};
use crate::model::not_numbers::NotNumbers;
use crate::model::prompts::Limits;
use crate::model::sampling::{SamplingOptions, merge};
use crate::model::tokenizer::Tokenizer;
use distributed::cuda::WarmUp;
use distributed::online::{Client, Service, service};
use distributed::plan::{BatchPlan, Mode, ServePlan};
use distributed::{Rank, World};
use std::cell::Cell;
use std::time::Instant;
use taskgraph::Tuning;
use xxhash_rust::xxh3::xxh3_64;

/// The kernel has room for at least this many requests, so that it gets a usual list of prompts as a whole.
const LEAST_KNOWN: u32 = 64;

/// Maximum number of tokens of requests that are in the kernel before there are pages for them.
const MOST_AHEAD: u64 = 1 << 17;

/// A model whose files are open. Nothing has been built or loaded yet.
pub struct Opened<'a> {
    /// model.json after overrides.
    pub model: &'a ModelJson,
    /// This rank. Requests come from rank 0, so only rank 0 needs to look at them.
    pub rank: u32,
    /// Configuration, weights, and on rank 0 the tokenizer.
    pub source: &'a Model,
    /// The limits that requests are checked against.
    pub limits: Limits,
    /// Whether the graphs are built for sampling ([`RunConfig::sampling`]). A program that knows its requests may change this, in
    /// the same way on all ranks.
    pub sampling: Cell<bool>,
    /// Sampling values of requests that name none. A program that has merged those of the files with its own sets them. Otherwise the
    /// files decide.
    pub defaults: Cell<Option<SamplingParams>>,
}

/// Inspects a model before anything is built.
pub type Inspect = Box<dyn FnOnce(&Opened<'_>) -> Result<(), AppError> + Send>;

/// Public facts about a loaded model.
#[derive(Clone, Debug)]
pub struct Info {
    /// model.json after overrides.
    pub model: ModelJson,
    /// `cpu` or `cuda`.
    pub backend: &'static str,
    /// This rank.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// The key of a tuning table for this run. `None` for a user graph.
    pub place: Option<Place>,
    /// Tuning values in force that differ from the defaults.
    pub tuning: Tuning,
    /// Digest of this rank's graphs. Equal graphs run the same tasks.
    pub graphs_digest: u64,
    /// The limits that requests are checked against. `None` for a user graph.
    pub limits: Option<Limits>,
    /// Maximum number of rows in an iteration that holds prompts, and how many of them prompts may use while other requests
    /// generate. `None` for a user graph.
    pub prefill_rows: Option<(u32, u32)>,
    /// Requests may sample or use penalties.
    pub sampling: bool,
    /// The default sampling of a request, from model.json and the checkpoint's generation_config.json; greedy without `sampling`. A
    /// [`Request`](crate::engine::Request) does not use it by itself.
    pub defaults: SamplingParams,
    /// Ids that end a sequence.
    pub eos: Vec<u32>,
    /// On rank 0: the checkpoint's tokenizer, if it has one.
    pub tokenizer: Option<Tokenizer>,
    /// Times of the start.
    pub start: Start,
}

/// What the engine runs.
pub(crate) enum Work {
    /// Tokens from a model. Rank 0 has both ends of the service.
    Tokens(Option<(Client, Service)>),
    /// A user graph.
    Graph(Box<UserGraph>),
}

/// A rank that is ready to run.
pub(crate) struct Loaded {
    pub rank: Rank,
    pub work: Work,
    pub info: Info,
}

/// Collective: loads everything from files to memory.
pub(crate) fn load_all(
    world: &World,
    spec: &ModelSpec,
    config: &RunConfig,
    inspect: Inspect,
    warm_up: Option<WarmUp>,
) -> Result<Loaded, Error> {
    let begin = Instant::now();
    world.phase("options");
    same_options(world, config.to_compare())?;
    world.phase("the model's files");
    let (model, source) = together(world, open(world, spec, config))?;
    same_model(world, &model, &source)?;
    world.phase("the backend");
    let backend = Backend::choose(world, config, warm_up)?;
    match source {
        ModelSource::Model(source) => tokens(world, config, model, *source, backend, inspect, begin),
        ModelSource::Graph { graph, weights } => {
            let (graph, rank) = UserGraph::load(world, config, &model, &graph, weights.as_ref(), backend)?;
            let start = Start { load: begin.elapsed(), ..Start::default() };
            let info = Info {
                model,
                backend: rank.backend(),
                rank: world.rank(),
                ranks: world.size(),
                place: None,
                tuning: config.tuning.clone(),
                graphs_digest: 0,
                limits: None,
                prefill_rows: None,
                sampling: false,
                defaults: SamplingParams::default(),
                eos: Vec::new(),
                tokenizer: None,
                start,
            };
            Ok(Loaded { rank, work: Work::Graph(Box::new(graph)), info })
        }
    }
}

/// Reads and checks everything that needs no other rank.
fn open(world: &World, spec: &ModelSpec, config: &RunConfig) -> Result<(ModelJson, ModelSource), AppError> {
    let model = spec.open()?;
    let source = ModelSource::open_on(&model, world.rank())?;
    if let ModelSource::Model(model) = &source {
        check_ranks(model, world.size())?;
    }
    if world.rank() == 0 {
        trace::check(config.trace.as_deref())?;
    }
    Ok((model, source))
}

fn tokens(
    world: &World,
    config: &RunConfig,
    mut model: ModelJson,
    source: Model,
    backend: Backend,
    inspect: Inspect,
    begin: Instant,
) -> Result<Loaded, Error> {
    world.phase("requests");
    let inspected = model.sizes(&source.config).map_err(AppError::from).and_then(|sizes| {
        let limits = Limits::new(&sizes, source.config.vocab_size, model.max_new_tokens());
        let (rank, sampling) = (world.rank(), Cell::new(config.sampling));
        let opened =
            Opened { model: &model, rank, source: &source, limits, sampling, defaults: Cell::new(None) };
        inspect(&opened)?;
        let sampling = opened.sampling.get();
        let defaults = match opened.defaults.get() {
            // A greedy engine refuses requests that sample, so the files' values cannot be its defaults.
            _ if !sampling => SamplingParams::default(),
            Some(defaults) => defaults,
            None => defaults(&model, &source)?,
        };
        if rank == 0 && !source.config.generation.ignored.is_empty() {
            tracing::warn!(
                "generation_config.json: without effect here: {}",
                source.config.generation.ignored.join(", ")
            );
        }
        Ok((limits, sampling, defaults))
    });
    let (limits, sampling, defaults) = together(world, inspected)?;
    let mut target = backend.target(world, &model)?;
    let place = Place::new(&source.config, backend.device(), target.workers, world.size());
    tuning::apply(world, config, &place, &mut model, &mut target)?;
    let tuned = target.tuning.clone();
    let sizes = together(world, model.sizes_on(&source.config, &target).map_err(AppError::from))?;
    if sizes.prefill_chunk <= sizes.max_batch {
        tracing::info!(
            "runtime.prefill_chunk = {} is not more than max_batch: prompts run in the decode graphs",
            sizes.prefill_chunk
        );
    }
    let top_k = config.logprobs.min(source.config.vocab_size);
    world.phase("graphs");
    let building = Instant::now();
    let options = GraphOptions::new(&source.config, &model.runtime, top_k, world.size(), &target)
        .with_sampling(sampling);
    let ops = families::op_graphs(&source.config, &sizes, &options);
    let build = together(world, build_options(config, &model, world.nodes(), backend.reach(), target))?;
    let (graphs, digests) = build_together(world, &ops, &build)?;
    tracing::info!("graphs built and verified: {:.2} s", building.elapsed().as_secs_f64());

    let graphs_digest = xxh3_64(&digests.into_iter().flat_map(u64::to_le_bytes).collect::<Vec<u8>>());
    let names = graphs.last().map(|g| g.ops.clone()).unwrap_or_default();
    let run_options = together(world, run_options(config, &names))?;
    let plan = plan(config, &model, &sizes, top_k, &source.config.eos);
    let prompt_rows = match sizes.prompt_rows(model.runtime.prefill_share) {
        0 => sizes.prefill_chunk,
        rows => rows,
    };
    let threads = backend.readers();
    world.phase("memory");
    let service = if world.rank() == 0 { service(&plan, config.max_waiting) } else { None };
    let mut rank = backend.rank(world, config, &tuned, graphs, plan, &run_options)?;
    world.phase("weights");
    tracing::info!("ready for weights after {:.2} s", begin.elapsed().as_secs_f64());
    let not_numbers = NotNumbers::default();
    let values = ModelValues { config: &source.config, weights: &source.weights, not_numbers: &not_numbers };
    let reads = source.weights.reads(world.rank());
    let filled = load(world, &mut rank, threads, config, &values);
    drop(reads);
    let weights = together(world, filled)?;
    not_numbers.warn(world);
    let start = Start {
        load: begin.elapsed(),
        compile: rank.compile_time(),
        weights,
        weights_bytes: world.all_gather(rank.constant_bytes()).iter().sum(),
    };
    let info = Info {
        model,
        backend: rank.backend(),
        rank: world.rank(),
        ranks: world.size(),
        place: Some(place),
        tuning: tuned,
        graphs_digest,
        limits: Some(limits),
        prefill_rows: Some((sizes.prefill_chunk, prompt_rows)),
        sampling,
        defaults,
        eos: source.config.eos.clone(),
        tokenizer: source.tokenizer,
        start,
    };
    Ok(Loaded { rank, work: Work::Tokens(service), info })
}

/// The sampling values of model.json and generation_config.json.
fn defaults(model: &ModelJson, source: &Model) -> Result<SamplingParams, AppError> {
    let file = (&*model.file(), &model.generate.sampling());
    let config = &source.config;
    let in_force = merge(&SamplingOptions::default(), file, &config.generation, config.vocab_size)?;
    Ok(SamplingParams::new(in_force.sampling, in_force.seed))
}

/// What the batch step needs to know before the first launch.
fn plan(config: &RunConfig, model: &ModelJson, sizes: &Sizes, top_k: u32, eos: &[u32]) -> BatchPlan {
    let pool = u64::from(sizes.num_pages) * u64::from(sizes.page_size);
    BatchPlan {
        max_batch: sizes.max_batch,
        max_seq_len: sizes.max_seq_len,
        page_size: sizes.page_size,
        num_pages: sizes.num_pages,
        top_k,
        eos: eos.iter().map(|&id| id as i32).collect(),
        mode: Mode::Serve(ServePlan {
            // The requests in slots, and enough waiting ones to fill slots that become free before the host notices.
            requests: sizes.max_batch.saturating_mul(2).max(LEAST_KNOWN),
            tokens: (pool + pool.min(MOST_AHEAD)).min(i32::MAX as u64) as u32,
            idle_exit: config.idle_exit,
            prefill_rows: sizes.prompt_rows(model.runtime.prefill_share),
            kv_on_demand: model.runtime.kv == Kv::OnDemand,
            prefix_cache: model.runtime.prefix_cache == PrefixCache::On,
        }),
    }
}
