//! A server, from its socket to its end.

use super::auth::ApiKey;
use super::connections;
use super::limits::Limits;
use super::router::router;
use super::state::{App, Loaded, Phase, Shared};
use crate::engine::Reader;
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// How long a server whose engine is lost keeps reporting that after its streams have ended.
const LOST: Duration = Duration::from_millis(250);
/// Maximum number of threads that serve connections. They parse and format; the engine has its own threads.
const THREADS: usize = 2;
/// Number of cores per thread. A token wakes one thread. With several threads, that thread wakes another one to look for more work, and
/// on a machine with few cores each of them interrupts a worker.
const CORES_EACH: usize = 4;

/// A server that accepts connections as soon as it is created, and requests once it has an engine.
pub struct Server {
    address: SocketAddr,
    app: App,
    runtime: Runtime,
    /// Ends when no more connections are accepted. Returns the open ones.
    accepting: JoinHandle<Arc<Semaphore>>,
}

/// How a server has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All requests were answered.
    Drained,
    /// The time was over; this many answers were cut off.
    CutOff(usize),
    /// The engine was lost, for this reason.
    Lost(String),
}

impl Server {
    /// Listens at `host`:`port`. Port 0 picks a free port.
    ///
    /// # Errors
    /// `host` has no address, or the port is in use.
    pub fn start(host: &str, port: u16, key: Option<ApiKey>, limits: Limits) -> io::Result<Server> {
        let addresses: Vec<SocketAddr> = (host, port).to_socket_addrs()?.collect();
        let listener = TcpListener::bind(addresses.as_slice())?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let threads = (distributed::affinity::allowed() / CORES_EACH).clamp(1, THREADS);
        // A token passes through them on its way to the client.
        let started = AtomicUsize::new(0);
        let runtime = Builder::new_multi_thread()
            .worker_threads(threads)
            .thread_name("http")
            .on_thread_start(move || {
                // The launcher may have bound the process to the core of a worker.
                distributed::affinity::unbind();
                // The first threads serve connections. Any others run long jobs.
                if started.fetch_add(1, Ordering::Relaxed) < threads {
                    distributed::urgency::urgent();
                }
            })
            .enable_all()
            .build()?;
        let app = Shared::new(limits, key);
        let router = router(App::clone(&app));
        let listener = {
            let _inside = runtime.enter();
            tokio::net::TcpListener::from_std(listener)?
        };
        let accepting = runtime.spawn(connections::accept(listener, App::clone(&app), router));
        Ok(Server { address, app, runtime, accepting })
    }

    /// The address that the server listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The state that requests share, for threads that report signals and losses.
    pub fn app(&self) -> App {
        App::clone(&self.app)
    }

    /// Accepts requests from now on.
    pub fn set_ready(&self, loaded: Loaded) {
        if let Some(reader) = loaded.backend.reader() {
            self.runtime.spawn(pass_on(reader));
        }
        self.app.set_ready(loaded);
    }

    /// Waits until [`Shared::go_on`] tells the server to drain or that the engine is lost. Then waits up to `patience` until its clients
    /// have their answers, and ends.
    pub fn wait(self, patience: Duration) -> Outcome {
        let Server { app, runtime, accepting, .. } = self;
        let outcome = runtime.block_on(drain(&app, patience));
        let last_words = app.limits.last_words;
        runtime.block_on(async {
            if matches!(outcome, Outcome::Lost(_)) {
                // Gives the sockets time to send the last events. The port stays open, and `/health` reports what happened.
                return tokio::time::sleep(last_words.min(LOST)).await;
            }
            // Clients read their last events. Idle connections are closed already.
            if let Ok(Ok(open)) = timeout(last_words, accepting).await {
                let _ = timeout(last_words, open.acquire_many(app.limits.connections as u32)).await;
            }
        });
        runtime.shutdown_timeout(last_words);
        outcome
    }
}

/// Takes tokens as they arrive. The thread that the kernel wakes is then the one that sends them. With the engine's thread in
/// between, a token would wake two threads.
async fn pass_on(reader: Reader) {
    // SAFETY: a reader has the same event all its life, and it stays open.
    let registered = unsafe { AsyncFd::register_with_interest(reader, Interest::READABLE) };
    // Otherwise the engine's thread takes the tokens.
    let Ok(reader) = registered else { return };
    while let Ok(mut ready) = reader.readable().await {
        // Cleared first, so that tokens that arrive during the call cause another one.
        ready.clear_ready();
        reader.get_ref().take();
    }
}

async fn drain(app: &App, patience: Duration) -> Outcome {
    let mut phase = app.phase.subscribe();
    // The sender lives as long as `app`.
    let _ = phase.wait_for(|phase| !matches!(phase, Phase::Loading | Phase::Serving)).await;
    let lost = |phase: &Phase| match phase {
        Phase::Lost(reason) => Some(Outcome::Lost(reason.clone())),
        _ => None,
    };
    let Some(ready) = app.ready.get() else {
        return lost(&phase.borrow()).unwrap_or(Outcome::Drained);
    };
    let all = ready.all_places as u32;
    tokio::select! {
        biased;
        ended = phase.wait_for(|phase| matches!(phase, Phase::Ending | Phase::Lost(_))) => {
            if let Some(outcome) = ended.ok().and_then(|phase| lost(&phase)) {
                // Streams tell their clients that the server ends.
                let _ = timeout(app.limits.last_words, ready.places.acquire_many(all)).await;
                return outcome;
            }
        }
        _ = ready.places.acquire_many(all) => return Outcome::Drained,
        () = tokio::time::sleep(patience) => {}
    }
    let open = ready.all_places - ready.places.available_permits();
    app.go_on(Phase::Ending);
    let _ = timeout(app.limits.last_words, ready.places.acquire_many(all)).await;
    if open == 0 { Outcome::Drained } else { Outcome::CutOff(open) }
}
