//! This rank's proxy, for its other threads: puts of the kernel's loops go through its ring, and rings for other nodes' hosts.

use super::carrier::Carrier;
use super::carrying::Thread;
use super::ring::{Heap, Target};
use super::shared::{Rung, Shared};
use super::turns::Turns;
use crate::affinity::bind;
use crate::bell::Bell;
use crate::error::{Error, Result};
use crate::watch::Watch;
use kernels_cu::abi;
use mpi::ffi;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

/// This rank's proxy.
pub(crate) struct Proxy {
    shared: Arc<Shared>,
    // The ring points to them.
    turns: Arc<Turns<Carrier>>,
    thread: JoinHandle<()>,
}

/// A launch whose incoming frames the proxy applies, until this value is dropped. The proxy still sends the launch's abort after that.
pub(crate) struct Carried<'a>(&'a Proxy, u32);

impl Carried<'_> {
    /// Tells the proxy that this rank's loops have ended.
    pub fn end(&self) {
        // Release: pairs with the proxy's acquire; the puts of the loops are in the ring.
        self.0.shared.ended.store(self.1, Ordering::Release);
    }

    /// True if the loops of all ranks have ended and their puts have arrived.
    pub fn is_over(&self) -> bool {
        // Acquire: pairs with the proxy's release, after it has applied the last frames.
        self.0.shared.over.load(Ordering::Acquire) >= self.1
    }
}

impl Drop for Carried<'_> {
    fn drop(&mut self) {
        self.0.shared.detach();
    }
}

/// Rings the bells of the peers' hosts.
pub(crate) struct Ringer(Arc<Shared>);

impl Ringer {
    /// Called after this rank's host has sent messages to the peers' hosts. A ring takes the same path as puts, so it arrives at
    /// once while kernels run, and within a few milliseconds otherwise.
    pub fn ring(&self) {
        self.0.ring_peers();
    }
}

impl Proxy {
    /// Starts to send between `rank` and `peers`, on a communicator that nobody else uses. The proxy's thread runs on
    /// `cores`, although the launcher may have bound this thread to others.
    pub fn begin(
        rank: u32,
        communicator: ffi::MPI_Comm,
        peers: Vec<u32>,
        cores: Vec<usize>,
        watch: &Watch,
    ) -> Result<Proxy> {
        let shared = Arc::new(Shared::new(rank, watch.clone())?);
        let carrier = Carrier::new(communicator, peers).map_err(Error::MpiInit)?;
        let turns = Arc::new(Turns::new(shared.clone(), Thread::new(shared.clone(), carrier)));
        // SAFETY: the turns live as long as the result, which nobody helps afterwards.
        unsafe { shared.ring.set_helper(Turns::<Carrier>::help_of, Arc::as_ptr(&turns).cast_mut().cast()) };
        let of_thread = turns.clone();
        let body = move || {
            bind(&cores);
            of_thread.run();
        };
        let thread = std::thread::Builder::new()
            .name("proxy".into())
            .spawn(body)
            .map_err(|error| Error::Thread { rank, what: "the proxy".into(), reason: error.to_string() })?;
        Ok(Proxy { shared, turns, thread })
    }

    /// The ring for the kernel's loops.
    pub fn ring(&self) -> *mut abi::mpk_proxy {
        self.shared.ring.as_ptr()
    }

    /// From now on, frames are applied to this heap. All ranks call this, each before it tells the others that it is ready.
    ///
    /// # Safety
    /// The heap is this rank's, and lives until the result is dropped.
    pub unsafe fn carry(&self, base: *mut u8, bytes: u64, shared_cores: bool) -> Carried<'_> {
        self.shared.shared_cores.store(shared_cores, Ordering::Relaxed);
        *self.shared.target() = Some(Target::Host(Heap { base, bytes }));
        let launch = self.shared.begun.fetch_add(1, Ordering::Relaxed) + 1;
        Carried(self, launch)
    }

    /// The same for a heap of `bytes` bytes in a GPU's memory, whose kernel aborts through the word `host_abort`.
    ///
    /// # Safety
    /// The word, and the GPU's access to [`Proxy::memory`], live until the result is dropped; one kernel reads the inbox.
    pub unsafe fn carry_to_device(
        &self,
        heap_bytes: u64,
        host_abort: *mut u64,
        shared_cores: bool,
    ) -> Carried<'_> {
        self.shared.shared_cores.store(shared_cores, Ordering::Relaxed);
        let (_, target) = self.shared.ring.for_device(heap_bytes, host_abort);
        *self.shared.target() = Some(target);
        let launch = self.shared.begun.fetch_add(1, Ordering::Relaxed) + 1;
        Carried(self, launch)
    }

    /// Takes one turn of the proxy, as a waiting worker does. False if another thread is taking one.
    pub fn help(&self) -> bool {
        self.turns.help()
    }

    /// The description of the rings for a GPU's kernel.
    pub fn ring_for_device(&self) -> abi::mpk_proxy {
        self.shared.ring.for_device(0, std::ptr::null_mut()).0
    }

    /// The memory of the rings, which a GPU must be able to access.
    pub fn memory(&self) -> (*mut u8, usize) {
        self.shared.ring.memory()
    }

    /// After a launch is over everywhere: the next frame for this rank that its GPU's kernel has not read.
    pub fn brought(&self) -> Option<Vec<u8>> {
        self.shared.ring.brought()
    }

    /// From now on, the peers' hosts can ring this bell.
    pub fn set_bell(&self, bell: Bell) -> Rung<'_> {
        self.shared.set_bell(bell)
    }

    /// For this rank's host, which rings those of the peers.
    pub fn ringer(&self) -> Ringer {
        Ringer(self.shared.clone())
    }

    /// Collective: stops after all peers have said goodbye. An abort, and what is left in the ring, are sent before.
    pub fn stop(self) {
        self.shared.stop();
        // The thread has reported to the watch if anything went wrong.
        let _ = self.thread.join();
    }
}
