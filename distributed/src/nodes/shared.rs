//! What the threads of a rank share with its proxy's thread.

use super::ring::{Ring, Target};
use crate::bell::Bell;
use crate::error::Result;
use crate::watch::Watch;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The state that the rank's main thread and the proxy share.
pub(super) struct Shared {
    pub ring: Ring,
    /// The destination of frames of the running launch.
    pub target: Mutex<Option<Target>>,
    /// The abort word of the last launch whose destination was taken away; 0 if it was not aborted.
    last_abort: AtomicU64,
    /// Number of launches that have started here, ended here, and ended everywhere.
    pub begun: AtomicU32,
    pub ended: AtomicU32,
    pub over: AtomicU32,
    /// True if threads share cores.
    pub shared_cores: AtomicBool,
    pub stop: AtomicBool,
    /// How often this rank's host has asked to ring the hosts of the peers.
    pub rings: AtomicU32,
    /// The bell of this rank's host, while it serves.
    pub bell: Mutex<Option<Bell>>,
    pub watch: Watch,
}

/// The proxy rings a host's bell until this value is dropped.
pub(crate) struct Rung<'a>(&'a Shared);

impl Drop for Rung<'_> {
    fn drop(&mut self) {
        // Waits for a ring that is under way.
        *self.0.bell() = None;
    }
}

impl Shared {
    pub fn new(rank: u32, watch: Watch) -> Result<Shared> {
        Ok(Shared {
            ring: Ring::new(rank)?,
            target: Mutex::new(None),
            last_abort: AtomicU64::new(0),
            begun: AtomicU32::new(0),
            ended: AtomicU32::new(0),
            over: AtomicU32::new(0),
            shared_cores: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            rings: AtomicU32::new(0),
            bell: Mutex::new(None),
            watch,
        })
    }

    /// From now on, the peers' hosts can ring this bell.
    pub fn set_bell(&self, bell: Bell) -> Rung<'_> {
        *self.bell() = Some(bell);
        Rung(self)
    }

    /// Asks the proxy to ring the bells of the peers' hosts.
    pub fn ring_peers(&self) {
        // Release: pairs with `Thread::send_rings`; MPI has the messages.
        self.rings.fetch_add(1, Ordering::Release);
    }

    /// Takes away the destination of the launch that has ended. An abort may be the last thing that its kernel has written, so it is kept
    /// until the proxy has sent it.
    pub fn detach(&self) {
        let mut target = self.target();
        let word = target.as_ref().map_or(0, Target::abort);
        // Relaxed: pairs with `abort`; the lock orders them.
        self.last_abort.store(word, Ordering::Relaxed);
        *target = None;
    }

    /// The abort word of the running launch, otherwise that of the last one; 0 if there is no abort.
    pub fn abort(&self) -> u64 {
        let target = self.target();
        // Relaxed: pairs with `detach`, under the same lock.
        target.as_ref().map_or_else(|| self.last_abort.load(Ordering::Relaxed), Target::abort)
    }

    /// Tells the proxy to stop. It still sends an abort, the puts in the ring, and the rings that were asked for before.
    pub fn stop(&self) {
        // Release: pairs with `Thread::turn`, which looks for these after this.
        self.stop.store(true, Ordering::Release);
    }

    pub fn bell(&self) -> MutexGuard<'_, Option<Bell>> {
        self.bell.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn target(&self) -> MutexGuard<'_, Option<Target>> {
        self.target.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
