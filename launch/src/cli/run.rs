//! `mpk-run` from arguments to exit status: what every rank does, in order.

use crate::cli::args::{Args, GivenPrompt};
use crate::cli::console::{keep_stdout_for_results, print_line, tell};
use crate::cli::logging::is_first_rank;
use crate::cli::output::{Start, Streamer, json_object, print_outputs};
use crate::cli::process_limits;
use crate::engine::agreement::{Exit, together};
use crate::engine::backend::Backend;
use crate::engine::config::{BackendChoice, RunConfig};
use crate::engine::graphs::{build_options, build_together, check_ranks};
use crate::engine::launch::{launch, load, run_options};
use crate::engine::same::{same_model, same_options, same_requests};
use crate::engine::trace;
use crate::engine::user_graph;
use crate::model::app_error::AppError;
use crate::model::chat_template::{ChatTemplate, Rendering};
use crate::model::families::{self, GraphOptions};
use crate::model::fill::ModelValues;
use crate::model::model_json::{ModelJson, Sizes};
use crate::model::model_path;
use crate::model::model_source::{Model, ModelSource};
use crate::model::not_numbers::NotNumbers;
use crate::model::prompts::{self, Limits, PromptSource, Request, parse_tokens, resolve};
use crate::model::tokenizer::Tokenizer;
use distributed::cuda::WarmUp;
use distributed::launcher::launched_by_mpi;
use distributed::plan::{BatchPlan, Mode};
use distributed::{Fault, Rank, WatchOptions, World};
use std::hash::{Hash, Hasher};
use std::io::Write;
use std::time::Instant;

/// What a run of a model has yielded, on one rank.
pub struct Finished<'a> {
    /// The rank, with outputs and timing.
    pub rank: &'a Rank,
    /// Number of ranks.
    pub ranks: u32,
    /// The requests.
    pub requests: &'a [Request],
    /// What the start took.
    pub start: Start,
}

/// Makes the line that is printed instead of text or the JSON object of `--json`.
pub type Report<'a> = &'a dyn Fn(&Finished<'_>) -> Result<String, AppError>;

/// Runs or builds what `args` ask for; gives the exit status. MPI is initialised and finalised inside.
pub fn run(args: &Args) -> i32 {
    run_and_report(args, None)
}

/// [`run`], with another report than the usual one.
pub fn run_and_report(args: &Args, report: Option<Report<'_>>) -> i32 {
    if args.builds_only() {
        // Under a launcher the first rank builds for all.
        if !is_first_rank() {
            return 0;
        }
        return match crate::cli::build_only::run(args) {
            Ok(()) => 0,
            Err(error) => {
                tell(format_args!("mpk-run: error: {}", error.message));
                error.status
            }
        };
    }
    if let Err(error) = process_limits::check(process_limits::ranks_here()) {
        if is_first_rank() {
            tell(format_args!("mpk-run: error: {}", error.message));
        }
        return error.status;
    }
    let config = args.run_config();
    let gpu_possible = config.backend != BackendChoice::Cpu;
    if gpu_possible {
        keep_stdout_for_results();
    }
    let world = match World::init(watch_options(args, &config)) {
        Ok(world) => world,
        Err(error) => {
            tell(format_args!("mpk-run: error: {error}"));
            return error.exit_status();
        }
    };
    let warm_up = gpu_possible.then(|| WarmUp::begin(&world));
    let status = match run_on(&world, args, &config, warm_up, report) {
        Ok(()) => 0,
        Err(Exit(status)) => status,
    };
    world.finalize();
    status
}

/// How this rank watches the others. What is wrong with the options is told later, by all ranks together.
fn watch_options(args: &Args, config: &RunConfig) -> WatchOptions {
    WatchOptions {
        deadline: config.deadline,
        tell: |message| tell(format_args!("mpk-run: error: {message}")),
        fault: args.debug_fault.as_deref().and_then(Fault::parse),
    }
}

/// Ends the process. After a failed run on GPUs, and where other ranks have ended already, the exit handlers of libraries
/// are left out: they might wait.
pub fn exit(status: i32) -> ! {
    if launched_by_mpi() || distributed::cuda::must_leave_at_once() {
        let _ = std::io::stdout().flush();
        // SAFETY: ends the process at once; nothing of it is used any more.
        unsafe { libc::_exit(status) };
    }
    std::process::exit(status)
}

/// A launch, ready to be set up.
struct Prepared {
    model: ModelJson,
    source: ModelSource,
}

fn run_on(
    world: &World,
    args: &Args,
    config: &RunConfig,
    warm_up: Option<WarmUp>,
    report: Option<Report<'_>>,
) -> Result<(), Exit> {
    let begin = Instant::now();
    world.phase("options");
    same_options(world, args.to_compare())?;
    world.phase("the model's files");
    let prepared = together(world, prepare(args, world))?;
    same_model(world, &prepared.model, &prepared.source)?;
    world.phase("the backend");
    let backend = Backend::choose(world, config, warm_up)?;
    match &prepared.source {
        ModelSource::Model(source) => {
            generate(world, args, config, &prepared.model, source, backend, begin, report)
        }
        ModelSource::Graph { graph, weights } => {
            let (model, weights) = (&prepared.model, weights.as_ref());
            let trace = args.trace.as_deref();
            let mut report = |backend, outputs, loaded, took| {
                print_outputs(args.json, (backend, world.size()), outputs, loaded, took)
            };
            user_graph::run(
                world,
                config,
                args.iterations,
                model,
                graph,
                weights,
                backend,
                begin,
                trace,
                &mut report,
            )
        }
    }
}

/// Reads and checks everything that needs no other rank.
fn prepare(args: &Args, world: &World) -> Result<Prepared, AppError> {
    if let Some(contradiction) = args.contradiction() {
        return Err(AppError::input(contradiction));
    }
    if let Some(text) = args.debug_fault.as_ref().filter(|text| Fault::parse(text).is_none()) {
        return Err(AppError::input(format!("--debug-fault {text}: expected RANK:STEP:KIND")));
    }
    let (model, source) = open(args)?;
    if let ModelSource::Model(model) = &source {
        check_ranks(model, world.size())?;
    }
    if world.rank() == 0 {
        trace::check(args.trace.as_deref())?;
    }
    Ok(Prepared { model, source })
}

/// Opens model.json with the command line's overrides, and what it names.
pub fn open(args: &Args) -> Result<(ModelJson, ModelSource), AppError> {
    let mut model = model_path::open(&args.model)?;
    if let Some(placement) = args.placement {
        model.runtime.placement = placement.into();
    }
    if let Some(allreduce) = args.allreduce {
        model.runtime.allreduce = allreduce.into();
    }
    if let Some(workers) = args.workers {
        model.runtime.workers = Some(workers);
    }
    if let Some(tokens) = args.max_new_tokens {
        model.generate.max_new_tokens = Some(tokens);
    }
    if let Some(slots) = args.max_batch {
        model.max_batch = Some(slots);
    }
    if let Some(tokens) = args.max_seq_len {
        model.max_seq_len = Some(tokens);
    }
    model.generate.ignore_eos |= args.ignore_eos;
    model.check()?;
    let source = ModelSource::open(&model)?;
    Ok((model, source))
}

/// The requests that the command line or model.json asks for.
fn requests(args: &Args, model: &ModelJson, source: &Model) -> Result<Vec<Request>, AppError> {
    let sizes = model.sizes(&source.config)?;
    let mut sources: Vec<PromptSource> = Vec::new();
    for given in &args.prompts {
        sources.push(match *given {
            GivenPrompt::Text(index) => {
                PromptSource::text(format!("--prompt {}", index + 1), args.prompt[index].clone())
            }
            GivenPrompt::Tokens(index) => {
                let place = format!("--prompt-tokens {}", index + 1);
                let tokens = parse_tokens(&place, &args.prompt_tokens[index])?;
                PromptSource::tokens(place, tokens)
            }
        });
    }
    if sources.is_empty() {
        sources = prompts::of_model_json(model);
    }
    if args.chat {
        sources = as_chats(args, model, sources)?;
    }
    let limits = Limits::new(&sizes, source.config.vocab_size, model.max_new_tokens());
    Ok(resolve(&sources, source.tokenizer.as_ref(), &limits)?)
}

/// Each text as the first message of a conversation (`--chat`).
fn as_chats(
    args: &Args,
    model: &ModelJson,
    sources: Vec<PromptSource>,
) -> Result<Vec<PromptSource>, AppError> {
    let folder = model.checkpoint_folder();
    let template = folder.as_deref().map(ChatTemplate::open).transpose()?.flatten().ok_or_else(|| {
        AppError::input(
            "--chat: the checkpoint has no chat template (chat_template.jinja, or `chat_template` in \
             tokenizer_config.json); an instruction-tuned checkpoint has one",
        )
    })?;
    let rendering = Rendering { arguments: args.template_arguments()?, ..Rendering::default() };
    Ok(sources.into_iter().map(|source| source.as_chat(&template, &rendering)).collect::<Result<_, _>>()?)
}

/// What the batch step is told.
fn batch_plan(
    model: &ModelJson,
    source: &Model,
    sizes: &Sizes,
    top_k: u32,
    requests: &[Request],
) -> BatchPlan {
    let ids = |tokens: &[u32]| tokens.iter().map(|&t| t as i32).collect::<Vec<i32>>();
    BatchPlan {
        max_batch: sizes.max_batch,
        max_seq_len: sizes.max_seq_len,
        page_size: sizes.page_size,
        num_pages: sizes.num_pages,
        top_k,
        eos: if model.generate.ignore_eos { Vec::new() } else { ids(&source.config.eos) },
        requests: requests
            .iter()
            .map(|r| distributed::plan::Request {
                prompt: ids(&r.prompt_tokens),
                max_new_tokens: r.max_new_tokens,
                sampling: distributed::plan::Sampling::default(),
            })
            .collect(),
        mode: Mode::Generate,
    }
}

/// Collective: every rank has computed the same tokens and the same bits of their log-probabilities.
fn same_on_all_ranks(world: &World, rank: &Rank, requests: usize) -> Result<(), AppError> {
    let mut hash = std::hash::DefaultHasher::new();
    for index in 0..requests {
        let output = rank.request_output(index);
        output.tokens.hash(&mut hash);
        for &(token, logprob) in output.logprobs.iter().flatten() {
            (token, logprob.to_bits()).hash(&mut hash);
        }
    }
    let hashes = world.all_gather(hash.finish());
    match hashes.iter().position(|h| *h != hashes[0]) {
        None => Ok(()),
        Some(other) => Err(AppError::failed(format!("ranks 0 and {other} computed different results"))),
    }
}

/// The main job: tokens from a model.
#[expect(clippy::too_many_arguments, reason = "what a run is made of")]
fn generate(
    world: &World,
    args: &Args,
    config: &RunConfig,
    model: &ModelJson,
    source: &Model,
    backend: Backend,
    begin: Instant,
    report: Option<Report<'_>>,
) -> Result<(), Exit> {
    world.phase("requests");
    let requests = together(world, requests(args, model, source))?;
    same_requests(world, &requests)?;
    let target = backend.target(world, model)?;
    let sizes = together(world, model.sizes_on(&source.config, &target).map_err(AppError::from))?;
    let top_k = args.logprobs.min(source.config.vocab_size);
    world.phase("graphs");
    let building = Instant::now();
    let options = GraphOptions::new(&source.config, model.runtime.embedding, top_k, world.size(), &target);
    let ops = families::op_graphs(&source.config, &sizes, &options);
    let graphs = build_together(world, &ops, &build_options(config, model, world.size(), target))?;
    tracing::info!("graphs built and verified: {:.2} s", building.elapsed().as_secs_f64());

    let names = graphs.last().map(|g| g.ops.clone()).unwrap_or_default();
    let run_options = together(world, run_options(config, &names))?;
    let plan = batch_plan(model, source, &sizes, top_k, &requests);
    let eos = plan.eos.clone();
    let threads = backend.readers();
    world.phase("memory");
    let mut rank = backend.rank(world, config, graphs, plan, &run_options)?;
    world.phase("weights");
    tracing::info!("ready for weights after {:.2} s", begin.elapsed().as_secs_f64());
    let not_numbers = NotNumbers::default();
    let values = ModelValues { config: &source.config, weights: &source.weights, not_numbers: &not_numbers };
    let reads = source.weights.reads(world.rank());
    let filled = load(world, &mut rank, threads, &values);
    drop(reads);
    let weights = together(world, filled)?;
    not_numbers.warn(world);
    let start = Start {
        load: begin.elapsed(),
        compile: rank.compile_time(),
        weights,
        weights_bytes: world.all_gather(rank.constant_bytes()).iter().sum(),
    };

    let mut streamer = (world.rank() == 0 && !args.json && report.is_none())
        .then(|| Streamer::new(source.tokenizer.as_ref(), requests.len(), &eos));
    launch(world, &mut rank, run_options.deadline, |rank| {
        if let Some(streamer) = &mut streamer {
            streamer.look(rank);
        }
    })?;
    world.phase("results");
    together(world, same_on_all_ranks(world, &rank, requests.len()))?;
    let done = Finished { rank: &rank, ranks: world.size(), requests: &requests, start };
    let finished = match (streamer.and_then(Streamer::error), report) {
        (Some(error), _) => Err(error),
        (None, Some(report)) if world.rank() == 0 => report(&done).and_then(|line| print_line(&line)),
        (None, None) if world.rank() == 0 && args.json => {
            json_report(&done, source.tokenizer.as_ref()).and_then(|line| print_line(&line))
        }
        _ => Ok(()),
    };
    together(world, finished)?;
    if world.rank() == 0 {
        let timing = rank.timing();
        let steps = timing.decode_steps;
        if steps > 0 {
            tracing::info!(
                "loaded in {:.2} s, prefill {:.3} s, {steps} decode steps at {:.3} ms",
                start.load.as_secs_f64(),
                timing.prefill.as_secs_f64(),
                1000.0 * timing.decode.as_secs_f64() / steps as f64
            );
        }
    }
    trace::write(world, args.trace.as_deref(), &rank)?;
    world.phase("giving memory back");
    together(world, rank.free(world).map_err(AppError::from))
}

/// The object of `--json`.
fn json_report(done: &Finished<'_>, tokenizer: Option<&Tokenizer>) -> Result<String, AppError> {
    let rank = done.rank;
    let outputs: Vec<_> = (0..done.requests.len()).map(|index| rank.request_output(index)).collect();
    let (backend, timing) = (rank.backend(), rank.timing());
    let object = json_object(backend, done.ranks, done.requests, &outputs, tokenizer, &done.start, timing)?;
    Ok(object.to_string())
}
