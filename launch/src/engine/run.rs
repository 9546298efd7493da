//! The engine: a model in memory that takes requests.

use crate::engine::config::{BackendChoice, RunConfig};
use crate::engine::error::{Error, ErrorKind};
use crate::engine::handle::{Channel, Handle};
use crate::engine::loaded::{Info, Inspect, Opened, load_all};
use crate::engine::queue::{GraphJob, Pending, Queue};
use crate::engine::request::Request;
use crate::engine::rounds;
use crate::engine::spec::ModelSpec;
use crate::engine::stats::{Finished, Stats};
use crate::engine::text;
use crate::engine::user_graph::GraphRun;
use crate::model::app_error::AppError;
use crate::model::prompts::{Limits, PromptSource, resolve};
use distributed::cuda::WarmUp;
use distributed::{WatchOptions, World};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Longest that an engine which was told to stop at once takes for it, beside its deadline: the kernel's end, the other
/// ranks' reports.
const STOP_GRACE: Duration = Duration::from_secs(20);

/// A model in memory, ready for requests.
///
/// Every rank of a job calls [`Engine::load`]; without a launcher there is one rank. Rank 0 submits requests, from any
/// thread, and shuts the engine down. The others call [`Engine::serve`].
///
/// # Threads
/// Each process has one thread that owns MPI, the heap, the device and the kernel: MPI wants all calls from the thread that
/// initialised it, and callers may come from any. It begins in `load` and is fed by a queue, so an `Engine` can be shared
/// (`Arc<Engine>`) and its calls never wait for the kernel. On rank 0, another thread turns tokens into text. An idle engine
/// sleeps. It looks a few times a second whether the other ranks are still there.
///
/// MPI can be initialised once a process, so under a launcher a process has one engine in its life.
///
/// # Rounds
/// Requests run in rounds: a round takes what waits when it begins, and later requests wait for the next one. Requests of
/// one [`Engine::submit_all`] run in the same round, if they agree in `ignore_eos`. A request that is cancelled, or ends at
/// a stop string, leaves its slot at the end of its round.
pub struct Engine {
    info: Info,
    queue: Arc<Queue>,
    logprobs: u32,
    deadline: Duration,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Engine {
    /// Loads a model. Collective: every rank of the job calls it with the same arguments.
    ///
    /// # Errors
    /// The model or the configuration is wrong, the machine lacks something, or a rank is lost. All ranks get the error of
    /// the first one that failed.
    pub fn load(model: ModelSpec, config: RunConfig) -> Result<Engine, Error> {
        Engine::load_with(model, config, |_| Ok(()))
    }

    /// As [`Engine::load`], and `inspect` sees the model's files before anything is built: it can refuse, early, what could
    /// not run. It is not called for a graph of one's own.
    ///
    /// # Errors
    /// As [`Engine::load`], and those of `inspect`.
    pub fn load_with(
        model: ModelSpec,
        config: RunConfig,
        inspect: impl FnOnce(&Opened<'_>) -> Result<(), AppError> + Send + 'static,
    ) -> Result<Engine, Error> {
        let queue = Arc::new(Queue::new(config.max_waiting));
        let (logprobs, deadline) = (config.logprobs, config.deadline);
        let (ready, loaded) = mpsc::channel();
        let of_thread = queue.clone();
        let body = move || engine_thread(&model, &config, Box::new(inspect), &of_thread, &ready);
        let thread = std::thread::Builder::new().name("engine".into()).spawn(body).map_err(|e| {
            Error::new(ErrorKind::Environment, format!("cannot start the engine's thread: {e}"))
        })?;
        let info = loaded.recv().unwrap_or_else(|_| Err(panicked()));
        let info = match info {
            Ok(info) => info,
            Err(error) => {
                drop(thread.join());
                return Err(error);
            }
        };
        Ok(Engine { info, queue, logprobs, deadline, thread: Mutex::new(Some(thread)) })
    }

    /// What is known of the loaded model.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// Hands over a request. On rank 0.
    ///
    /// # Errors
    /// The request can never run, the queue is full, or the engine has ended.
    pub fn submit(&self, request: Request) -> Result<Handle, Error> {
        let mut handles = self.submit_all(vec![request])?;
        handles.pop().ok_or_else(|| Error::new(ErrorKind::Failed, "a request without a handle"))
    }

    /// Hands over several requests that begin together, all or none. On rank 0.
    ///
    /// # Errors
    /// As [`Engine::submit`], for any of them.
    pub fn submit_all(&self, requests: Vec<Request>) -> Result<Vec<Handle>, Error> {
        self.first_rank()?;
        let Some(limits) = self.info.limits else {
            return Err(Error::new(ErrorKind::Input, "the model is a graph of one's own, without tokens")
                .with_help("call Engine::run_graph"));
        };
        let requests: Vec<Pending> =
            requests.into_iter().map(|request| self.pending(request, limits)).collect::<Result<_, _>>()?;
        let parts: Vec<_> = requests.iter().map(|p| (p.prompt.clone(), p.channel.clone())).collect();
        let ids = self.queue.put(requests)?;
        let handles = ids.into_iter().zip(parts);
        Ok(handles.map(|(id, (prompt, channel))| Handle::new(id, prompt, channel)).collect())
    }

    fn pending(&self, mut request: Request, limits: Limits) -> Result<Pending, Error> {
        request.sampling.check(self.info.sampling, limits.vocab_size)?;
        request.sampling = request.sampling.with_seed();
        if request.sampling.top_k >= limits.vocab_size {
            request.sampling.top_k = 0; // all of them
        }
        if request.logprobs > self.logprobs {
            let message =
                format!("{} log-probabilities, but the engine gives {}", request.logprobs, self.logprobs);
            let help = "load it with more of them (RunConfig::logprobs)";
            return Err(Error::new(ErrorKind::Unsupported, message).with_help(help));
        }
        let source = PromptSource { place: "the request".into(), prompt: request.prompt.clone() };
        let limits = Limits { max_new_tokens: request.max_new_tokens, ..limits };
        let resolved = resolve(&[source], self.info.tokenizer.as_ref(), &limits)?;
        let resolved = resolved.into_iter().next();
        let resolved = resolved.ok_or_else(|| Error::new(ErrorKind::Input, "the request has no prompt"))?;
        let channel = Arc::new(Channel::new(self.queue.ended.clone()));
        let (prompt, max_new_tokens) = (resolved.prompt_tokens, resolved.max_new_tokens);
        Ok(Pending { id: 0, prompt, max_new_tokens, request, channel })
    }

    /// Runs a graph of one's own this many times in one launch, and waits for it. On rank 0.
    ///
    /// # Errors
    /// The model is no such graph; the run failed.
    pub fn run_graph(&self, iterations: u32) -> Result<GraphRun, Error> {
        self.first_rank()?;
        if self.info.limits.is_some() {
            return Err(Error::new(ErrorKind::Input, "the model is not a graph of one's own")
                .with_help("call Engine::submit"));
        }
        let (reply, answer) = mpsc::channel();
        self.queue.put_graph(GraphJob { iterations: iterations.max(1), reply })?;
        answer.recv().unwrap_or_else(|_| Err(self.wait_ended(None).err().unwrap_or_else(panicked)))
    }

    fn first_rank(&self) -> Result<(), Error> {
        match self.info.rank {
            0 => Ok(()),
            rank => Err(Error::new(ErrorKind::Input, format!("rank {rank} takes no requests"))
                .with_help("submit on rank 0; the others call Engine::serve")),
        }
    }

    /// Figures, as they are now.
    pub fn stats(&self) -> Stats {
        let (waiting, running) = self.queue.lengths();
        Stats {
            waiting: waiting as u64,
            running: running as u64,
            finished: Finished::of(&self.queue.ended),
            ..self.queue.counters.now()
        }
    }

    /// Waits until nothing waits and nothing runs. Then [`Engine::stats`] holds the times of all rounds.
    pub fn wait_idle(&self) {
        self.queue.wait_idle();
    }

    /// Does what rank 0 asks for until it shuts the engine down. On the other ranks.
    ///
    /// # Errors
    /// The run failed, or rank 0 ended it with another status than 0.
    pub fn serve(&self) -> Result<(), Error> {
        self.wait_ended(None)
    }

    /// Takes no more requests, and ends when those that it has are done. Those that are not done after `timeout` are
    /// cancelled, and a kernel that still runs then is told to end, which ends the job with an error.
    ///
    /// # Errors
    /// The run failed or had to be ended.
    pub fn shutdown(&self, timeout: Duration) -> Result<(), Error> {
        self.shutdown_with_status(timeout, 0)
    }

    /// As [`Engine::shutdown`], and [`Engine::serve`] of the other ranks gives an error with this exit status, if it is not 0:
    /// what the program has found on rank 0 is the end of all of them.
    ///
    /// # Errors
    /// As [`Engine::shutdown`].
    pub fn shutdown_with_status(&self, timeout: Duration, status: i32) -> Result<(), Error> {
        if self.info.rank == 0 {
            self.queue.stop(status);
        }
        let limit = (timeout < Duration::MAX).then_some(timeout);
        if let Some(result) = self.queue.wait_ended(limit) {
            self.join();
            return result;
        }
        self.queue.cancel_all();
        distributed::stop_kernel();
        let result = self.wait_ended(Some(self.deadline.saturating_add(STOP_GRACE)));
        result.and(Err(Error::new(
            ErrorKind::Failed,
            "requests that ran were ended: the time for them was over",
        )))
    }

    fn wait_ended(&self, limit: Option<Duration>) -> Result<(), Error> {
        match self.queue.wait_ended(limit) {
            Some(result) => {
                self.join();
                result
            }
            None => Err(Error::new(ErrorKind::Failed, "the engine did not end in time")),
        }
    }

    /// The thread has closed the queue: it is about to end.
    fn join(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            drop(thread.join());
        }
    }
}

impl Drop for Engine {
    /// Cancels what waits, lets the round end, and shuts down; on ranks other than 0 after rank 0 has.
    fn drop(&mut self) {
        if self.info.rank == 0 {
            self.queue.stop(0);
            self.queue.cancel_all();
        }
        let _ = self.wait_ended(None);
    }
}

fn panicked() -> Error {
    Error::new(ErrorKind::Failed, "the engine's thread has panicked")
        .with_help("this is a mistake in the program, please report it")
}

/// Closes the queue even if the thread panics.
struct Closes<'a>(&'a Queue);

impl Drop for Closes<'_> {
    fn drop(&mut self) {
        self.0.close(Err(panicked()));
    }
}

/// The thread that owns everything that belongs to one thread.
fn engine_thread(
    spec: &ModelSpec,
    config: &RunConfig,
    inspect: Inspect,
    queue: &Queue,
    ready: &Sender<Result<Info, Error>>,
) {
    let closes = Closes(queue);
    let watch = WatchOptions { deadline: config.deadline, tell: config.tell, fault: config.fault };
    let result = match World::init(watch) {
        Ok(world) => {
            let result = engine_on(&world, spec, config, inspect, queue, ready);
            world.finalize();
            result
        }
        Err(error) => {
            (config.tell)(&error.to_string());
            Err(AppError::from(error).into())
        }
    };
    queue.close(result.clone());
    drop(closes);
    if let Err(error) = result {
        // After a load that went well nobody listens.
        let _ = ready.send(Err(error));
    }
}

fn engine_on(
    world: &World,
    spec: &ModelSpec,
    config: &RunConfig,
    inspect: Inspect,
    queue: &Queue,
    ready: &Sender<Result<Info, Error>>,
) -> Result<(), Error> {
    let warm_up = (config.backend != BackendChoice::Cpu).then(|| WarmUp::begin(world));
    let mut loaded = load_all(world, spec, config, inspect, warm_up)?;
    // `load` waits for it.
    let _ = ready.send(Ok(loaded.info.clone()));
    let (produced, events) = mpsc::channel();
    // Here, so that it runs on this rank's cores, not on those that a launcher has bound the process to.
    let texts = std::thread::Builder::new().name("text".into()).spawn(move || text::serve(&events));
    let texts = texts.map_err(|e| AppError::environment(format!("cannot start a thread for texts: {e}")));
    let served = match texts {
        Ok(texts) => {
            let served = rounds::serve(world, config, &mut loaded, queue, &produced);
            drop(produced);
            // What it has goes to the handles before the queue fails those that have not ended.
            drop(texts.join());
            served
        }
        Err(error) => Err(error.into()),
    };
    served?;
    world.phase("giving memory back");
    let freed = loaded.rank.free(world).map_err(AppError::from);
    crate::engine::agreement::together(world, freed)
}
