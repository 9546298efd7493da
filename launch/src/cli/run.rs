//! `mpk-run` from arguments to exit status.

use crate::cli::args::{Args, GivenPrompt};
use crate::cli::console::print_line;
use crate::cli::conversation::{Conversation, Interrupts};
use crate::cli::logging::is_first_rank;
use crate::cli::output::{self, json_object, print_outputs};
use crate::cli::program::{Failure, prepare, tell_once, with_console};
use crate::engine::{Engine, ModelSpec, Opened, Request, SamplingParams};
use crate::model::app_error::AppError;
use crate::model::chat_template::{ChatTemplate, Rendering};
use crate::model::model_json::ModelJson;
use crate::model::prompts::{self, PromptSource, parse_tokens, resolve};
use crate::model::sampling::describe;
use kernels_cu::signals::Watched;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use taskgraph::words::counted;

/// Runs or builds what `args` ask for. Returns the exit status. `signals` are those of a conversation, on rank 0.
pub fn run(args: &Args, signals: Option<Watched>) -> i32 {
    if let Some(contradiction) = args.contradiction() {
        return tell_once(&AppError::input(contradiction));
    }
    if args.builds_only() {
        // Under a launcher the first rank builds for all ranks.
        return match is_first_rank() {
            true => crate::cli::build_only::run(args).map_or_else(|error| tell_once(&error), |()| 0),
            false => 0,
        };
    }
    if let Err(error) = prepare(&args.runtime) {
        return tell_once(&error);
    }
    let spec = match model_spec(args) {
        Ok(spec) => spec,
        Err(error) => return tell_once(&error),
    };
    let interrupts = signals.map(Interrupts::watch).unwrap_or_default();
    // Rank 0 resolves the prompts now, so that errors in them are found before anything is built.
    let asked = Arc::new(Mutex::new(Asked::Requests(Vec::new())));
    let (of_engine, own_args) = (asked.clone(), args.clone());
    let inspect = move |opened: &Opened<'_>| {
        let found = Asked::find(&own_args, opened)?;
        *of_engine.lock().unwrap_or_else(PoisonError::into_inner) = found;
        Ok(())
    };
    let config = with_console(args.run_config());
    let engine = match Engine::load_with(spec, config, inspect) {
        Ok(engine) => engine,
        // The engine has reported the error.
        Err(error) => return error.exit_status(),
    };
    if engine.info().rank > 0 {
        return engine.serve().map_or_else(|error| error.exit_status(), |()| 0);
    }
    interrupts.ready();
    let asked = std::mem::replace(
        &mut *asked.lock().unwrap_or_else(PoisonError::into_inner),
        Asked::Requests(Vec::new()),
    );
    let done = match asked {
        _ if engine.info().limits.is_none() => run_graph(args, &engine),
        Asked::Requests(requests) => generate(args, &engine, requests),
        Asked::Conversation(conversation) => conversation.hold(&engine, &interrupts),
    };
    finish(&engine, done)
}

/// The model to run. An option that has no effect on a user graph is refused here, before the graph is built and compiled.
fn model_spec(args: &Args) -> Result<ModelSpec, AppError> {
    let spec = args.model_spec();
    // A file that cannot be read or is invalid, perhaps on one rank only, is reported by the engine.
    let Ok(read) = spec.read() else { return Ok(spec) };
    if read.open().is_ok_and(|model| model.graph.is_some()) {
        args.check_for_user_graph()?;
    }
    Ok(read)
}

/// Ends the engine on all ranks with the exit status of rank 0's work. Returns the exit status.
pub fn finish(engine: &Engine, done: Result<(), Failure>) -> i32 {
    let status = done.map_or_else(|failure| failure.tell(), |()| 0);
    let ended = engine.shutdown_with_status(Duration::MAX, status);
    if status != 0 { status } else { ended.map_or_else(|error| error.exit_status(), |()| 0) }
}

/// Generates tokens and prints them.
fn generate(args: &Args, engine: &Engine, requests: Vec<Request>) -> Result<(), Failure> {
    let handles = engine.submit_all(requests)?;
    if args.json {
        let answers: Vec<_> = handles
            .into_iter()
            .map(|handle| {
                let prompt = handle.prompt_tokens().to_vec();
                (prompt, handle.wait())
            })
            .collect();
        answers.iter().try_for_each(|(_, answer)| output::check(answer.error.as_ref()))?;
        engine.wait_idle();
        print_line(&json_object(engine.info(), &engine.stats(), &answers).to_string())?;
    } else {
        output::print_texts(engine.info(), handles, args.logprobs > 0)?;
        engine.wait_idle();
    }
    let (stats, start) = (engine.stats(), engine.info().start);
    if stats.decode_steps > 0 {
        tracing::info!(
            "loaded in {:.2} s, prefill {:.3} s, {} at {:.3} ms each",
            start.load.as_secs_f64(),
            stats.prefill.as_secs_f64(),
            counted(stats.decode_steps, "decode step"),
            1000.0 * stats.decode.as_secs_f64() / stats.decode_steps as f64
        );
    }
    Ok(())
}

/// Runs a user graph and prints its outputs.
fn run_graph(args: &Args, engine: &Engine) -> Result<(), Failure> {
    let iterations = args.iterations.unwrap_or(1);
    // On rank 0, an error of a graph's run ends the engine on all ranks.
    let run = engine.run_graph(iterations).map_err(Failure::told)?;
    Ok(print_outputs(args.json, engine.info(), &run)?)
}

/// The work for a model with tokens.
enum Asked {
    Requests(Vec<Request>),
    Conversation(Box<Conversation>),
}

impl Asked {
    /// Finds what the command line or model.json asks for.
    fn find(args: &Args, opened: &Opened<'_>) -> Result<Asked, AppError> {
        if args.iterations.is_some() {
            let message = "--iterations counts the runs of a graph of your own, but this is a model";
            return Err(AppError::input(message).with_help("use --max-new-tokens"));
        }
        let in_force = args.sampling.in_force(opened.model, opened.source)?;
        opened.sampling.set(!in_force.sampling.is_greedy());
        opened.defaults.set(Some(SamplingParams::new(in_force.sampling, in_force.seed)));
        if opened.rank > 0 {
            return Ok(Asked::Requests(Vec::new()));
        }
        if !opened.model.generate.stop.is_empty() && opened.source.tokenizer.is_none() {
            return Err(AppError::input(
                "--stop and generate.stop need a tokenizer, but the model has no tokenizer.json",
            )
            .with_help("use a checkpoint whose folder has one"));
        }
        let sampling = SamplingParams::new(in_force.sampling, in_force.seed).with_seed();
        tracing::info!("sampling: {}", describe(&sampling.into()));
        if args.is_conversation() {
            let template = chat_template(opened.model)?;
            return Ok(Asked::Conversation(Box::new(Conversation::new(args, opened, template, sampling)?)));
        }
        requests(args, opened, sampling).map(Asked::Requests)
    }
}

/// The requests of the command line, otherwise of model.json.
fn requests(args: &Args, opened: &Opened<'_>, sampling: SamplingParams) -> Result<Vec<Request>, AppError> {
    let model = opened.model;
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
    if sources.is_empty() {
        let help = "give --prompt or --prompt-tokens, or generate.prompts in model.json";
        return Err(AppError::input("no prompt was given").with_help(help));
    }
    if args.chat {
        sources = as_chats(args, model, sources)?;
    }
    let resolved = resolve(&sources, opened.source.tokenizer.as_ref(), &opened.limits)?;
    let requests = resolved.into_iter().map(|resolved| Request {
        sampling,
        ignore_eos: model.generate.ignore_eos,
        stop: model.generate.stop.clone(),
        logprobs: args.logprobs,
        whole: args.json,
        ..Request::tokens(resolved.prompt_tokens, resolved.max_new_tokens)
    });
    Ok(requests.collect())
}

/// Turns each text into the first message of a conversation (`--chat`).
fn as_chats(
    args: &Args,
    model: &ModelJson,
    sources: Vec<PromptSource>,
) -> Result<Vec<PromptSource>, AppError> {
    let template = chat_template(model)?;
    let rendering = Rendering { arguments: args.template_arguments()?, ..Rendering::default() };
    Ok(sources.into_iter().map(|source| source.as_chat(&template, &rendering)).collect::<Result<_, _>>()?)
}

fn chat_template(model: &ModelJson) -> Result<ChatTemplate, AppError> {
    let folder = model.checkpoint_folder();
    folder.as_deref().map(ChatTemplate::open).transpose()?.flatten().ok_or_else(|| {
        AppError::input(
            "--chat needs a chat template, but the checkpoint has none (chat_template.jinja, or `chat_template` in \
             tokenizer_config.json)",
        )
        .with_help("use an instruction-tuned checkpoint, which has one")
    })
}
