//! `mpk-serve` from arguments to exit status.

use crate::cli::console::tell;
use crate::cli::logging::is_first_rank;
use crate::cli::options::in_options;
use crate::cli::program::prepare;
use crate::cli::serve_args::ServeArgs;
use crate::engine::{Engine, RunConfig};
use crate::model::app_error::AppError;
use crate::model::chat_template::ChatTemplate;
use crate::model::prompts::Limits;
use crate::serve::state::{App, Phase};
use crate::serve::{Outcome, Server, of_engine};
use kernels_cu::signals::{Next, Watched};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How long streams have to send an error before a process that has lost a rank ends.
const LAST_WORDS: Duration = Duration::from_millis(800);
/// How long `/health` then keeps answering that the engine is lost.
const LOST: Duration = Duration::from_millis(250);
/// How long the engine has to end once no request is left.
const END_OF_ENGINE: Duration = Duration::from_secs(5);

/// The server, which is told the reason when the job ends.
static APP: OnceLock<App> = OnceLock::new();

/// Set once the engine has been loaded.
static LOADED: AtomicBool = AtomicBool::new(false);

/// Serves until a signal arrives. Returns the exit status.
pub fn run(args: &ServeArgs, signals: Watched) -> i32 {
    match args.contradiction() {
        Some(problem) => failed(&AppError::input(problem)),
        None => prepare(&args.runtime)
            .map_err(|error| failed(&error))
            .map_or_else(|status| status, |()| load(args, signals)),
    }
}

/// Raises the limit of open files as far as the system allows. It is often 1024, and each connection is an open file.
fn allow_many_connections() {
    let limit = getrlimit(Resource::Nofile);
    // If this fails, the server only takes fewer connections.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Loads the model on every rank and serves it on rank 0.
fn load(args: &ServeArgs, signals: Watched) -> i32 {
    allow_many_connections();
    let server = match is_first_rank().then(|| listen(args)).transpose() {
        Ok(server) => server,
        Err(error) => return failed(&error),
    };
    match &server {
        // Until the model is loaded, nothing needs an orderly end.
        Some(server) => {
            let app = APP.get_or_init(|| server.app());
            signals.watch(|| begin_to_drain(app));
        }
        // Once the model is loaded, rank 0 decides when the job ends. A signal here that counted as the first one would make the next
        // one, which may come hours later with that of rank 0, end the process at once.
        None => signals.watch_each(|| match LOADED.load(Ordering::Relaxed) {
            true => {
                tracing::info!("a signal has no effect on this rank; rank 0 ends serving when it gets one");
                Next::Handled
            }
            false => Next::ByDefault,
        }),
    }
    let template = Arc::new(Mutex::new(None));
    let of_engine = Arc::clone(&template);
    let config = RunConfig { tell: tell_the_end, ..args.run_config() };
    let engine = Engine::load_with(args.model_spec(), config, move |opened| {
        check_room(&opened.limits)?;
        let folder = opened.model.checkpoint_folder();
        let found = folder.as_deref().map(ChatTemplate::open).transpose()?.flatten();
        *of_engine.lock().unwrap_or_else(PoisonError::into_inner) = found;
        Ok(())
    });
    let engine = match engine {
        Ok(engine) => Arc::new(engine),
        // The engine has reported the error.
        Err(error) => return error.exit_status(),
    };
    LOADED.store(true, Ordering::Relaxed);
    let Some(server) = server else {
        return engine.serve().map_or_else(|error| error.exit_status(), |()| 0);
    };
    let name = args
        .served_model_name
        .clone()
        .or_else(|| engine.info().model.shown_name())
        .unwrap_or_else(|| "model".into());
    let template = template.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(loaded) = of_engine::serve(&engine, name, template, args.logprobs) else {
        let error = AppError::input(
            "the model is a user graph, which has no tokens to serve; give a model with a checkpoint or a config",
        );
        let status = failed(&error);
        let _ = engine.shutdown_with_status(END_OF_ENGINE, status);
        return status;
    };
    server.set_ready(loaded);
    watch_engine(&engine, server.app());
    // A signal may have closed the port meanwhile.
    if *server.app().phase.borrow() == Phase::Serving {
        tell(format_args!("listening on http://{}", server.address()));
    }
    end(server.wait(args.patience()), &engine)
}

/// Refuses limits that would refuse every request.
fn check_room(limits: &Limits) -> Result<(), AppError> {
    const LEAST: u32 = 2;
    if limits.longest() >= LEAST {
        return Ok(());
    }
    let fix = match limits.is_limited_by_pages() {
        true => "raise runtime.kv_pages or page_size in model.json, or leave them out",
        false => "set --max-seq-len, or max_seq_len in model.json, to at least 2",
    };
    let problem = format!(
        "{}: no request has room, because the shortest has one token of the prompt and a new one",
        limits.longest_in_words()
    );
    Err(AppError::input(problem).with_help(fix))
}

/// Binds the port before the model is loaded, because loading may take minutes.
fn listen(args: &ServeArgs) -> Result<Server, AppError> {
    let key = args.key().map_err(AppError::input)?;
    let open = key.is_none();
    let place = format!("{}:{}", args.host, args.port);
    let server =
        Server::start(&args.host, args.port, key, args.limits()).map_err(|error| match error.kind() {
            ErrorKind::AddrInUse => AppError::environment(format!("{place} is already in use"))
                .with_help("choose another --port, or 0 for a free one"),
            ErrorKind::PermissionDenied => {
                AppError::environment(format!("{place}: {error}")).with_help("choose a --port from 1024 on")
            }
            ErrorKind::AddrNotAvailable => AppError::environment(format!("{place}: {error}"))
                .with_help("choose a --host of this machine, such as 127.0.0.1"),
            _ => AppError::input(format!("cannot listen at {place}: {error}"))
                .with_help("give --host a name or an address of this machine, such as 127.0.0.1 or ::1"),
        })?;
    if open && !server.address().ip().is_loopback() {
        tracing::warn!("anyone who reaches {place} can use the server: no API key is set; set MPK_API_KEY");
    }
    Ok(server)
}

/// Starts to drain at the first signal. Returns false while the model is still loading.
fn begin_to_drain(app: &App) -> bool {
    if *app.phase.borrow() == Phase::Loading {
        tracing::info!("the model is still loading, so this signal ends the process at once");
        return false;
    }
    tracing::info!("draining: no new requests are accepted; a second signal ends the process at once");
    app.go_on(Phase::Draining);
    true
}

/// Tells the server when the engine has ended.
fn watch_engine(engine: &Arc<Engine>, app: App) {
    let engine = Arc::clone(engine);
    let body = move || {
        if let Err(error) = engine.serve() {
            app.go_on(Phase::Lost(first_line(&in_options(&error.to_string()))));
        }
    };
    // Without this thread, only requests notice that the engine is lost.
    if let Err(error) = std::thread::Builder::new().name("engine's end".into()).spawn(body) {
        tracing::warn!("cannot watch the engine: {error}");
    }
}

/// Reports why the job ends, first on standard error, then in every open stream. The process may end afterwards.
fn tell_the_end(message: &str) {
    tell(format_args!("mpk-serve: error: {message}"));
    let Some(app) = APP.get() else { return };
    app.go_on(Phase::Lost(first_line(&in_options(message))));
    let Some(ready) = app.ready.get() else { return };
    let begin = Instant::now();
    while ready.places.available_permits() < ready.all_places && begin.elapsed() < LAST_WORDS {
        std::thread::sleep(Duration::from_millis(5));
    }
    // Gives the sockets time to send the last events, and `/health` time to answer.
    std::thread::sleep(LOST);
}

/// Reports are long; a stream gets their first line.
fn first_line(message: &str) -> String {
    message.lines().next().unwrap_or_default().to_string()
}

/// Ends the engine after the server. Returns the exit status.
fn end(outcome: Outcome, engine: &Engine) -> i32 {
    match outcome {
        Outcome::Lost(_) => 4,
        Outcome::Drained | Outcome::CutOff(_) => {
            if let Outcome::CutOff(count) = outcome {
                tracing::warn!("{count} answers were cut off after --shutdown-timeout");
            }
            match (engine.shutdown(END_OF_ENGINE), engine.ended()) {
                // The engine has reported the error.
                (_, Some(Err(error))) => error.exit_status(),
                (Err(error), Some(Ok(()))) => {
                    tracing::warn!("{error}");
                    0
                }
                (Err(error), None) => failed(&error.into()),
                (Ok(()), _) => 0,
            }
        }
    }
}

/// Prints an error that concerns all ranks once. Returns its exit status.
fn failed(error: &AppError) -> i32 {
    if is_first_rank() {
        tell(format_args!("mpk-serve: error: {error}"));
    }
    error.status
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_without_room_for_a_request_are_refused() {
        let check = |max_seq_len, kv_tokens| {
            let limits = Limits { vocab_size: 10, max_seq_len, kv_tokens, max_new_tokens: 1 };
            check_room(&limits).map_err(|error| (error.status, error.to_string()))
        };
        assert_eq!(check(2, 2), Ok(()));
        let (status, message) = check(1, 64).unwrap_err();
        assert!(status == 2 && message.starts_with("max_seq_len = 1: no request has room"), "{message}");
        assert!(
            message.contains("set --max-seq-len, or max_seq_len in model.json, to at least 2"),
            "{message}"
        );
        let (_, message) = check(64, 1).unwrap_err();
        assert!(
            message.contains("the 1 token that runtime.kv_pages holds: no request has room"),
            "{message}"
        );
    }
}
