//! The state that all requests share.

use super::auth::ApiKey;
use super::backend::{Backend, Capabilities, ModelInfo};
use super::error::ApiError;
use super::limits::Limits;
use super::metrics::Metrics;
use super::pace::Pace;
use crate::model::chat_template::ChatTemplate;
use crate::model::tokenizer::Tokenizer;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// The phase of the server's life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The model is loading.
    Loading,
    /// Requests are accepted.
    Serving,
    /// New requests are refused; running ones continue.
    Draining,
    /// Running requests are ended now.
    Ending,
    /// The engine is lost, for this reason.
    Lost(String),
}

/// A loaded model with its engine.
pub struct Loaded {
    /// The engine.
    pub backend: Box<dyn Backend>,
    /// Requests are checked against it.
    pub model: ModelInfo,
    /// What the engine supports.
    pub capabilities: Capabilities,
    /// `None`: prompts can only be token ids, and answers have no text.
    pub tokenizer: Option<Tokenizer>,
    /// `None`: chats are not possible.
    pub template: Option<ChatTemplate>,
}

/// A [`Loaded`] model with the HTTP layer's state for it.
pub struct Ready {
    /// The model.
    pub loaded: Loaded,
    /// Metrics.
    pub metrics: Metrics,
    /// A permit for each request that runs or waits.
    pub places: Arc<Semaphore>,
    /// The total number of permits of `places`.
    pub all_places: usize,
    /// When it was loaded, in seconds since 1970.
    pub created: u64,
}

/// The state that all requests share.
pub struct Shared {
    /// The server's limits.
    pub limits: Limits,
    /// The key that requests must carry.
    pub key: Option<ApiKey>,
    /// Set when the model is loaded.
    pub ready: OnceLock<Ready>,
    /// The phase of the server's life.
    pub phase: watch::Sender<Phase>,
    /// KiB of bodies that may still be read, and of answers that may wait to be sent.
    pub bodies: Arc<Semaphore>,
    /// KiB of large parsed values that may still be made. Separate from `bodies`: a body waits for its values while it
    /// holds its own share, and bodies must not wait for each other.
    pub values: Arc<Semaphore>,
    /// Permits for the jobs that parse long bodies and encode their text.
    pub encoders: Arc<Semaphore>,
    /// One permit: for the job with a long body.
    pub long_bodies: Arc<Semaphore>,
    /// The pace of refusals.
    pub pace: Pace,
    /// Makes ids differ from those of other servers.
    seed: u64,
    next: AtomicU64,
}

/// A handle to the shared state.
pub type App = Arc<Shared>;

impl Shared {
    /// A server that is still loading.
    pub fn new(limits: Limits, key: Option<ApiKey>) -> App {
        Arc::new(Shared {
            limits,
            key,
            ready: OnceLock::new(),
            phase: watch::Sender::new(Phase::Loading),
            bodies: Arc::new(Semaphore::new(limits.all_bodies_bytes.div_ceil(1024))),
            values: Arc::new(Semaphore::new(limits.all_bodies_bytes.div_ceil(1024))),
            encoders: Arc::new(Semaphore::new(limits.encoders)),
            long_bodies: Arc::new(Semaphore::new(1)),
            pace: Pace::default(),
            seed: RandomState::new().build_hasher().finish(),
            next: AtomicU64::new(0),
        })
    }

    /// Accepts requests from now on.
    pub fn set_ready(&self, loaded: Loaded) {
        let all_places = loaded.model.max_batch as usize + self.limits.queued_requests;
        let ready = Ready {
            metrics: Metrics::new(&loaded.model.name),
            loaded,
            places: Arc::new(Semaphore::new(all_places)),
            all_places,
            created: now(),
        };
        if self.ready.set(ready).is_ok() {
            self.phase.send_if_modified(|phase| {
                let loading = *phase == Phase::Loading;
                if loading {
                    *phase = Phase::Serving;
                }
                loading
            });
        }
    }

    /// Moves on to phase `next`. A lost engine stays lost.
    pub fn go_on(&self, next: Phase) {
        self.phase.send_if_modified(|phase| {
            if matches!(phase, Phase::Lost(_)) {
                return false;
            }
            *phase = next;
            true
        });
    }

    /// The model, if requests are accepted now.
    ///
    /// # Errors
    /// The error for the client otherwise.
    pub fn serving(&self) -> Result<&Ready, ApiError> {
        match (&*self.phase.borrow(), self.ready.get()) {
            (Phase::Serving, Some(ready)) => Ok(ready),
            (Phase::Loading | Phase::Serving, _) => {
                Err(ApiError::unavailable("the model is loading", "loading"))
            }
            (Phase::Draining | Phase::Ending, _) => {
                Err(ApiError::unavailable("the server is shutting down", "shutting_down"))
            }
            (Phase::Lost(reason), _) => {
                Err(ApiError::failed(format!("the engine is lost: {reason}"), "engine_lost"))
            }
        }
    }

    /// A new id that starts with `prefix`.
    pub fn new_id(&self, prefix: &str) -> String {
        format!("{prefix}-{:016x}{:08x}", self.seed, self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Reserves places for `count` requests of the engine.
    ///
    /// # Errors
    /// There are not enough free places now.
    pub fn places(&self, ready: &Ready, count: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        Arc::clone(&ready.places).try_acquire_many_owned(count).map_err(|_| ApiError::busy(ready.patience()))
    }
}

impl Ready {
    /// Estimated seconds until a place is free: the time for the requests in the queue at the rate so far.
    pub fn patience(&self) -> u32 {
        let waiting = self.all_places.saturating_sub(self.loaded.model.max_batch as usize) as f64;
        let seconds = self.metrics.mean_seconds() * waiting / f64::from(self.loaded.model.max_batch.max(1));
        // The queue has room as soon as a part of it is done.
        (seconds / 4.0).ceil().clamp(1.0, 60.0) as u32
    }
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
