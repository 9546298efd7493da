//! The engine: a model in memory that accepts requests.

use crate::engine::config::{BackendChoice, RunConfig};
use crate::engine::error::{Error, ErrorKind};
use crate::engine::handle::{Channel, Ended, Handle};
use crate::engine::life::{GraphJob, Life, stopped};
use crate::engine::loaded::{Info, Inspect, Loaded, Opened, Work, load_all};
use crate::engine::request::Request;
use crate::engine::serving;
use crate::engine::spec::ModelSpec;
use crate::engine::stats::Stats;
use crate::engine::text::{RequestText, Wanted};
use crate::engine::user_graph::GraphRun;
use crate::model::app_error::AppError;
use crate::model::prompts::{Limits, PromptSource, resolve};
use distributed::cuda::Transport;
use distributed::cuda::WarmUp;
use distributed::online::{Client, Reader, Submission, SubmitError};
use distributed::plan;
use distributed::{WatchOptions, World};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Longer times are cut: the kernel counts nanoseconds in 64 bits, and times are added to points in time.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);
/// How long an engine that must stop at once may take beyond its deadline, for the kernel's end and the other ranks' reports.
const STOP_GRACE: Duration = Duration::from_secs(20);

/// A model in memory, ready for requests.
///
/// Every rank of a job calls [`Engine::load`]; without a launcher there is one rank. Rank 0 submits requests from any thread and
/// shuts the engine down. The other ranks call [`Engine::serve`].
///
/// # Threads
/// Each process has one thread that owns MPI, the heap, the device and the kernel, because MPI must be called from the thread that
/// initialised it. The thread starts in `load` and gets its work from a queue. So an `Engine` can be shared (`Arc<Engine>`), and its
/// calls never wait for the kernel. An idle engine sleeps, and checks a few times a second that the other ranks are still there.
///
/// MPI can be initialised only once per process, so under a launcher a process can load only one engine.
///
/// # Requests
/// The kernel runs as long as there is work. A request joins at the next iteration that has a free slot and pages for it. A request
/// that is cancelled or meets a stop string leaves one iteration later. Those requests of one [`Engine::submit_all`]
/// for which there is room start together. Without requests the kernel waits, and ends after [`RunConfig::idle_exit`].
/// The next request starts it again.
pub struct Engine {
    info: Info,
    life: Arc<Life>,
    /// On rank 0, if the model has tokens.
    client: Option<Client>,
    ended: Arc<Ended>,
    max_waiting: usize,
    logprobs: u32,
    deadline: Duration,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Engine {
    /// Loads a model. Collective: every rank of the job calls it with the same arguments.
    ///
    /// # Errors
    /// The model or the configuration is invalid, the machine lacks something, or a rank is lost. All ranks get the error of the
    /// first rank that failed.
    pub fn load(model: ModelSpec, config: RunConfig) -> Result<Engine, Error> {
        Engine::load_with(model, config, |_| Ok(()))
    }

    /// Like [`Engine::load`]. `inspect` sees the model's files before anything is built, so it can refuse early what could not run.
    /// It is not called for a user graph.
    ///
    /// # Errors
    /// Those of [`Engine::load`], and those of `inspect`.
    pub fn load_with(
        model: ModelSpec,
        mut config: RunConfig,
        inspect: impl FnOnce(&Opened<'_>) -> Result<(), AppError> + Send + 'static,
    ) -> Result<Engine, Error> {
        config.deadline = config.deadline.min(LONGEST);
        config.idle_exit = config.idle_exit.map(|time| time.min(LONGEST));
        let life = Arc::new(Life::default());
        let (logprobs, deadline, max_waiting) = (config.logprobs, config.deadline, config.max_waiting);
        let (ready, loaded) = mpsc::channel();
        let of_thread = life.clone();
        let body = move || engine_thread(&model, &config, Box::new(inspect), &of_thread, &ready);
        let thread = std::thread::Builder::new().name("engine".into()).spawn(body).map_err(|e| {
            Error::new(ErrorKind::Environment, format!("cannot start the engine's thread: {e}"))
        })?;
        let (info, client) = match loaded.recv().unwrap_or_else(|_| Err(panicked())) {
            Ok(loaded) => loaded,
            Err(error) => {
                drop(thread.join());
                return Err(error);
            }
        };
        let thread = Mutex::new(Some(thread));
        Ok(Engine { info, life, client, ended: Arc::default(), max_waiting, logprobs, deadline, thread })
    }

    /// Facts about the loaded model.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// Submits a request. On rank 0.
    ///
    /// # Errors
    /// The request can never run, the queue is full, or the engine has ended.
    pub fn submit(&self, request: Request) -> Result<Handle, Error> {
        let mut handles = self.submit_all(vec![request])?;
        handles.pop().ok_or_else(|| Error::new(ErrorKind::Failed, "a request without a handle"))
    }

    /// A request is about to be submitted. On GPUs, this wakes the hosts of an idle engine early, so that the first token comes sooner.
    /// The request may never come. Does nothing on ranks other than 0.
    pub fn expect(&self) {
        if let Some(client) = &self.client {
            client.expect();
        }
    }

    /// Submits several requests that start together: either all are accepted or none. On rank 0.
    ///
    /// # Errors
    /// Those of [`Engine::submit`], for any of the requests.
    pub fn submit_all(&self, requests: Vec<Request>) -> Result<Vec<Handle>, Error> {
        self.first_rank()?;
        let Some(limits) = self.info.limits else {
            return Err(Error::new(ErrorKind::Input, "the model is a user graph, without tokens")
                .with_help("run it with mpk-run, or call Engine::run_graph"));
        };
        let Some(client) = &self.client else { return Err(stopped()) };
        let mut parts = Vec::with_capacity(requests.len());
        let mut submissions = Vec::with_capacity(requests.len());
        for request in requests {
            let (submission, prompt, channel) = self.submission(request, limits)?;
            submissions.push(submission);
            parts.push((prompt, channel));
        }
        let ids = client.submit(submissions).map_err(|error| self.refusal(error))?;
        let handles = ids.into_iter().zip(parts);
        Ok(handles
            .map(|(id, (prompt, channel))| Handle::new(id, prompt, channel, Some(client.clone())))
            .collect())
    }

    /// A checked request, with its encoded prompt and the sink for its tokens.
    fn submission(
        &self,
        mut request: Request,
        limits: Limits,
    ) -> Result<(Submission, Vec<u32>, Arc<Channel>), Error> {
        request.sampling.check(self.info.sampling, limits.vocab_size)?;
        request.sampling = request.sampling.with_seed();
        if request.sampling.top_k >= limits.vocab_size {
            request.sampling.top_k = 0; // all of them
        }
        if !request.stop.is_empty() && self.info.tokenizer.is_none() {
            let message = "stop strings need a tokenizer, but the model has none";
            return Err(Error::new(ErrorKind::Unsupported, message).with_help("give stop_token_ids"));
        }
        if request.logprobs > self.logprobs {
            let message = format!(
                "{} log-probabilities per token, but the engine was loaded for at most {}",
                request.logprobs, self.logprobs
            );
            let help = "raise RunConfig::logprobs";
            return Err(Error::new(ErrorKind::Unsupported, message).with_help(help));
        }
        let source = PromptSource { place: "the request".into(), prompt: request.prompt };
        let limits = Limits { max_new_tokens: request.max_new_tokens, ..limits };
        let resolved = resolve(&[source], self.info.tokenizer.as_ref(), &limits)?;
        let resolved = resolved.into_iter().next();
        let resolved = resolved.ok_or_else(|| Error::new(ErrorKind::Input, "the request has no prompt"))?;
        let channel = Arc::new(Channel::new(self.ended.clone(), request.whole));
        // Only these require a look at every token as it arrives.
        let quiet = request.whole && request.stop.is_empty() && request.stop_token_ids.is_empty();
        let wanted = Wanted {
            stop: &request.stop,
            eos: if request.ignore_eos { Vec::new() } else { self.info.eos.clone() },
            stop_token_ids: request.stop_token_ids,
            min_new_tokens: request.min_new_tokens,
            logprobs: request.logprobs,
        };
        let text = RequestText::new(channel.clone(), self.info.tokenizer.as_ref(), wanted);
        let of_kernel = plan::Request {
            prompt: resolved.prompt_tokens.iter().map(|&token| token as i32).collect(),
            max_new_tokens: resolved.max_new_tokens,
            min_new_tokens: if request.ignore_eos { u32::MAX } else { request.min_new_tokens },
            sampling: request.sampling.into(),
            logprobs: request.logprobs,
            quiet,
        };
        Ok((Submission { request: of_kernel, sink: Box::new(text) }, resolved.prompt_tokens, channel))
    }

    fn refusal(&self, error: SubmitError) -> Error {
        match error {
            SubmitError::Full { .. } => Error::new(ErrorKind::Full, error.to_string())
                .with_help(format!("try again later, or raise the limit of {}", self.max_waiting)),
            SubmitError::TooLong { .. } | SubmitError::Empty => {
                Error::new(ErrorKind::Input, error.to_string())
            }
            SubmitError::Ending => stopped(),
            SubmitError::Lost(_) => match self.life.ended() {
                Some(Ok(())) => stopped(),
                Some(Err(error)) => error,
                None => Error::new(ErrorKind::Failed, error.to_string()),
            },
        }
    }

    /// Runs a user graph this many times in one launch, and waits for it. On rank 0.
    ///
    /// # Errors
    /// The model is not a user graph, or the run failed.
    pub fn run_graph(&self, iterations: u32) -> Result<GraphRun, Error> {
        self.first_rank()?;
        if self.info.limits.is_some() {
            return Err(Error::new(ErrorKind::Input, "the model is not a user graph")
                .with_help("call Engine::submit"));
        }
        let (reply, answer) = mpsc::channel();
        self.life.put_graph(GraphJob { iterations: iterations.max(1), reply })?;
        answer.recv().unwrap_or_else(|_| Err(self.wait_ended(None).err().unwrap_or_else(panicked)))
    }

    fn first_rank(&self) -> Result<(), Error> {
        match self.info.rank {
            0 => Ok(()),
            rank => Err(Error::new(ErrorKind::Input, format!("rank {rank} takes no requests"))
                .with_help("submit on rank 0; the others call Engine::serve")),
        }
    }

    /// The engine's current statistics.
    pub fn stats(&self) -> Stats {
        self.client.as_ref().map(|client| Stats::new(&client.stats(), &self.ended)).unwrap_or_default()
    }

    /// A reader that takes tokens in another thread than the engine's. `None` if there is one already, on ranks other than 0, and
    /// for user graphs.
    pub fn reader(&self) -> Option<Reader> {
        self.client.as_ref()?.reader()
    }

    /// Waits until all requests have ended. Then [`Engine::stats`] holds the times of all of them.
    pub fn wait_idle(&self) {
        if let Some(client) = &self.client {
            client.wait_idle();
        }
    }

    /// Serves rank 0 until it shuts the engine down. On the other ranks.
    ///
    /// # Errors
    /// The run failed, or rank 0 ended it with a status other than 0.
    pub fn serve(&self) -> Result<(), Error> {
        self.wait_ended(None)
    }

    /// Accepts no more requests, and ends once the accepted ones are done. Requests that are not done after `timeout` are cancelled;
    /// the other ranks end as after any other shutdown. A kernel that still runs after the deadline is told to end, and the job ends
    /// with an error.
    ///
    /// # Errors
    /// Requests had to be cancelled, or the run failed or had to be ended.
    pub fn shutdown(&self, timeout: Duration) -> Result<(), Error> {
        self.shutdown_with_status(timeout, 0)
    }

    /// Like [`Engine::shutdown`]. If `status` is not 0, [`Engine::serve`] on the other ranks returns an error with this exit status.
    /// So all ranks end with the status that the program on rank 0 ends with.
    ///
    /// # Errors
    /// As [`Engine::shutdown`].
    pub fn shutdown_with_status(&self, timeout: Duration, status: i32) -> Result<(), Error> {
        if self.info.rank == 0 {
            self.stop(status);
        }
        let limit = (timeout < Duration::MAX).then_some(timeout);
        if let Some(result) = self.life.wait_ended(limit) {
            self.join();
            return result;
        }
        if let Some(client) = &self.client {
            client.cancel_all();
        }
        let grace = self.deadline.saturating_add(STOP_GRACE);
        // A run of a user's graph cannot be cancelled, so its kernel is told to end at once. Other ranks wait for rank 0.
        let limit = match &self.client {
            Some(_) => Some(grace),
            None => (self.info.rank == 0).then_some(Duration::ZERO),
        };
        let result = match self.life.wait_ended(limit) {
            Some(result) => {
                self.join();
                result
            }
            None => {
                self.life.kernel.ask();
                self.wait_ended(Some(grace))
            }
        };
        result.and(Err(Error::new(
            ErrorKind::Failed,
            "running requests were ended because the shutdown timeout was over",
        )))
    }

    /// How the engine has ended on this rank. `None`: it has not.
    pub fn ended(&self) -> Option<Result<(), Error>> {
        self.life.ended()
    }

    /// Accepts no more requests.
    fn stop(&self, status: i32) {
        self.life.stop(status);
        if let Some(client) = &self.client {
            client.shutdown();
        }
    }

    fn wait_ended(&self, limit: Option<Duration>) -> Result<(), Error> {
        match self.life.wait_ended(limit) {
            Some(result) => {
                self.join();
                result
            }
            None => Err(Error::new(ErrorKind::Failed, "the engine did not end in time")),
        }
    }

    /// The thread has reported its result and is about to end.
    fn join(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            drop(thread.join());
        }
    }
}

impl Drop for Engine {
    /// Cancels all requests and shuts down. On other ranks, this happens after rank 0 has done so.
    fn drop(&mut self) {
        if self.info.rank == 0 {
            self.stop(0);
            if let Some(client) = &self.client {
                client.cancel_all();
            }
        }
        let _ = self.wait_ended(None);
    }
}

fn panicked() -> Error {
    Error::new(ErrorKind::Failed, "the engine's thread has panicked")
        .with_help("this is a bug; please report it")
}

/// Marks the thread as ended even if it panics.
struct Closes<'a>(&'a Life);

impl Drop for Closes<'_> {
    fn drop(&mut self) {
        self.0.close(Err(panicked()));
    }
}

/// The thread that owns everything that must stay on one thread.
fn engine_thread(
    spec: &ModelSpec,
    config: &RunConfig,
    inspect: Inspect,
    life: &Life,
    ready: &Sender<Result<(Info, Option<Client>), Error>>,
) {
    let closes = Closes(life);
    let watch = WatchOptions {
        deadline: config.deadline,
        tell: config.tell,
        fault: config.fault,
        carries_all: config.transport == Transport::Host && config.backend != BackendChoice::Cpu,
    };
    let result = match World::init(watch) {
        Ok(world) => {
            let world = world.stopped_by(life.kernel.clone());
            let result = engine_on(&world, spec, config, inspect, life, ready);
            world.finalize();
            result
        }
        Err(error) => {
            // Each process says it: they cannot send each other messages, and the launcher may end the others once one has ended.
            (config.tell)(&error.whole());
            Err(AppError::from(error).into())
        }
    };
    life.close(result.clone());
    drop(closes);
    if let Err(error) = result {
        // After a successful load, the other end of the channel is gone.
        let _ = ready.send(Err(error));
    }
}

fn engine_on(
    world: &World,
    spec: &ModelSpec,
    config: &RunConfig,
    inspect: Inspect,
    life: &Life,
    ready: &Sender<Result<(Info, Option<Client>), Error>>,
) -> Result<(), Error> {
    let warm_up = (config.backend != BackendChoice::Cpu).then(|| WarmUp::begin(world));
    let Loaded { mut rank, work, info } = load_all(world, spec, config, inspect, warm_up)?;
    let client = match &work {
        Work::Tokens(service) => service.as_ref().map(|(client, _)| client.clone()),
        Work::Graph(_) => None,
    };
    // `load` waits for this.
    let _ = ready.send(Ok((info, client)));
    let status = match work {
        Work::Tokens(service) => {
            serving::requests(world, config, &mut rank, service.map(|(_, service)| service), life)?
        }
        Work::Graph(graph) => serving::graphs(world, config, &mut rank, &graph, life)?,
    };
    world.phase("giving memory back");
    let freed = rank.free(world).map_err(AppError::from);
    crate::engine::agreement::together(world, freed)?;
    serving::end(world, status)
}
