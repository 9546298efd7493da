//! What the threads of a rank share with its proxy's thread.

use super::ring::{Ring, Target};
use crate::bell::Bell;
use crate::watch::Watch;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The state that the rank's main thread and the proxy share.
pub(super) struct Shared {
    pub ring: Ring,
    /// The destination of frames of the running launch.
    pub target: Mutex<Option<Target>>,
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

impl Shared {
    pub fn bell(&self) -> MutexGuard<'_, Option<Bell>> {
        self.bell.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn target(&self) -> MutexGuard<'_, Option<Target>> {
        self.target.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
