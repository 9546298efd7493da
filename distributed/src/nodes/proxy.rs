//! The thread that carries between this rank and those of other nodes: what the kernel's loops put, and signs of life.
//!
//! Each message is a word for its kind, a number, and what it brings:
//! - frames of a launch: done in this rank's heap at once, in order;
//! - the end of a launch: its sender's loops have ended and all of their frames have come. A launch is over on a rank when it has heard
//!   that of all: then nothing of it is on its way here any more, and memory may be made ready for the next;
//! - where the sender stands, for the watch;
//! - goodbye: nothing comes any more.

use super::carrier::{Carrier, Failed};
use super::ring::{Applied, FRAME_BYTES, Heap, Ring, Target, abort_frame, end_with_data, is_abort};
use crate::affinity::bind;
use crate::error::{Error, Result};
use crate::watch::Watch;
use kernels_cu::abi;
use mpi::ffi;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const FRAMES: u32 = 1;
const END: u32 = 2;
const LIFE: u32 = 3;
const GOODBYE: u32 = 4;

/// So often data waits for its signal, a fraction of a microsecond each time.
const PATIENCE: u32 = 8;
/// Messages to one peer follow each other no sooner: what a kernel's workers put at about the same time goes together, since a message costs
/// more than that on both sides.
const GAP: Duration = Duration::from_micros(5);
/// How often other nodes get a sign of life.
const BEAT: Duration = Duration::from_millis(100);
/// While a kernel runs, turns without work in which the thread only gives its core away, then pauses between turns.
const YIELDS: u32 = 2000;
/// The same where threads share cores: others need them.
const YIELDS_SHARED: u32 = 20;
const SHORTEST_PAUSE: Duration = Duration::from_micros(5);
const LONGEST_PAUSE: Duration = Duration::from_micros(100);
/// The pause where no kernel runs, or one that has been idle for long.
const IDLE_PAUSE: Duration = Duration::from_millis(1);
/// So many pauses in a row are long.
const IDLE_AFTER: u32 = 2000;
/// After goodbye: the others' comes within this, or they are gone.
const PARTING: Duration = Duration::from_secs(5);

/// What the rank's main thread and the proxy share.
struct Shared {
    ring: Ring,
    /// What frames of the launch that runs are for.
    target: Mutex<Option<Target>>,
    /// Launches that have begun here, ended here, and ended everywhere.
    begun: AtomicU32,
    ended: AtomicU32,
    over: AtomicU32,
    /// Threads share cores.
    shared_cores: AtomicBool,
    stop: AtomicBool,
    watch: Watch,
}

impl Shared {
    fn target(&self) -> MutexGuard<'_, Option<Target>> {
        self.target.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// This rank's proxy.
pub(crate) struct Proxy {
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

/// A launch whose puts the proxy carries, until this goes.
pub(crate) struct Carried<'a>(&'a Proxy, u32);

impl Carried<'_> {
    /// The loops of this rank have ended.
    pub fn end(&self) {
        // Release: pairs with the proxy's acquire; what the loops put lies in the ring.
        self.0.shared.ended.store(self.1, Ordering::Release);
    }

    /// The loops of all ranks have, and what they put has arrived.
    pub fn is_over(&self) -> bool {
        // Acquire: pairs with the proxy's release, after it has done the last frames.
        self.0.shared.over.load(Ordering::Acquire) >= self.1
    }
}

impl Drop for Carried<'_> {
    fn drop(&mut self) {
        *self.0.shared.target() = None;
    }
}

impl Proxy {
    /// Begins to carry between `rank` and `peers`, on a communicator that nobody else uses.
    /// Its thread takes turns on `cores`, whatever the launcher has bound this one to.
    pub fn begin(
        rank: u32,
        communicator: ffi::MPI_Comm,
        peers: Vec<u32>,
        cores: Vec<usize>,
        watch: &Watch,
    ) -> Result<Proxy> {
        let shared = Arc::new(Shared {
            ring: Ring::new(rank)?,
            target: Mutex::new(None),
            begun: AtomicU32::new(0),
            ended: AtomicU32::new(0),
            over: AtomicU32::new(0),
            shared_cores: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            watch: watch.clone(),
        });
        let carrier = Carrier::new(communicator, peers).map_err(Error::MpiInit)?;
        let of_thread = shared.clone();
        let body = move || {
            bind(&cores);
            Thread::new(of_thread, carrier).run();
        };
        let thread = std::thread::Builder::new()
            .name("proxy".into())
            .spawn(body)
            .map_err(|error| Error::Thread { rank, what: "the proxy".into(), reason: error.to_string() })?;
        Ok(Proxy { shared, thread })
    }

    /// For the kernel's loops.
    pub fn ring(&self) -> *mut abi::mpk_proxy {
        self.shared.ring.as_ptr()
    }

    /// From now on frames are done in this heap. All ranks do it, each before it tells the others that it is ready.
    ///
    /// # Safety
    /// The heap is this rank's, and lives until the result goes.
    pub unsafe fn carry(&self, base: *mut u8, bytes: u64, shared_cores: bool) -> Carried<'_> {
        self.shared.shared_cores.store(shared_cores, Ordering::Relaxed);
        *self.shared.target() = Some(Target::Host(Heap { base, bytes }));
        let launch = self.shared.begun.fetch_add(1, Ordering::Relaxed) + 1;
        Carried(self, launch)
    }

    /// The same for a heap of so many bytes in a GPU's memory, whose kernel aborts by the word `host_abort`.
    ///
    /// # Safety
    /// The word, and the GPU's way to [`Proxy::memory`], live until the result goes; one kernel reads the inbox.
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

    /// What a GPU's kernel needs to know of the rings.
    pub fn ring_for_device(&self) -> abi::mpk_proxy {
        self.shared.ring.for_device(0, std::ptr::null_mut()).0
    }

    /// The memory of the rings, which a GPU has to reach.
    pub fn memory(&self) -> (*mut u8, usize) {
        self.shared.ring.memory()
    }

    /// After a launch is over everywhere: the next frame for this rank that its GPU's kernel has not read.
    pub fn brought(&self) -> Option<Vec<u8>> {
        self.shared.ring.brought()
    }

    /// Collective: ends, when all peers have said goodbye.
    pub fn stop(self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        // It has told the watch of what went wrong, if anything did.
        let _ = self.thread.join();
    }
}

/// What the proxy knows of a peer.
#[derive(Clone, Default)]
struct Peer {
    /// Launches whose end it has told.
    ended: u32,
    goodbye: bool,
    /// When frames went to it last.
    sent: Option<Instant>,
}

struct Thread {
    shared: Arc<Shared>,
    carrier: Carrier,
    peers: Vec<Peer>,
    /// Launches whose end this rank has told.
    told_end: u32,
    /// The launch of whose abort it has told.
    told_abort: u32,
    told_life: Instant,
    told_ended: bool,
    goodbye: Option<Instant>,
    /// Messages with frames in this launch, and the bytes of these.
    sent: (u64, u64),
    /// Frames that the GPU has no room for yet, in order.
    waiting: VecDeque<Vec<u8>>,
}

fn message(mut buffer: Vec<u8>, kind: u32, number: u32) -> Vec<u8> {
    buffer.extend_from_slice(&kind.to_ne_bytes());
    buffer.extend_from_slice(&number.to_ne_bytes());
    buffer
}

impl Thread {
    fn new(shared: Arc<Shared>, carrier: Carrier) -> Thread {
        let peers = vec![Peer::default(); carrier.peers().len()];
        let long_ago = Instant::now().checked_sub(BEAT).unwrap_or_else(Instant::now);
        Thread {
            shared,
            carrier,
            peers,
            told_end: 0,
            told_abort: 0,
            told_life: long_ago,
            told_ended: false,
            goodbye: None,
            sent: (0, 0),
            waiting: VecDeque::new(),
        }
    }

    fn run(&mut self) {
        // SAFETY: a call without pointers. Short pauses are as short as they say.
        unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1000_u64) };
        let mut idle = 0_u32;
        loop {
            self.shared.watch.note_turn();
            match self.turn() {
                Ok(true) => idle = 0,
                Ok(false) => idle = idle.saturating_add(1),
                Err(problem) => {
                    self.shared.watch.fail(format!("the proxy between the nodes: {problem}"));
                    return;
                }
            }
            if let Some(since) = self.goodbye
                && self.carrier.is_idle()
                && (self.peers.iter().all(|peer| peer.goodbye) || since.elapsed() > PARTING)
            {
                self.shared.watch.note_last_turn();
                return;
            }
            self.pause(idle);
        }
    }

    fn pause(&self, idle: u32) {
        let runs = self.shared.begun.load(Ordering::Relaxed) != self.shared.over.load(Ordering::Relaxed);
        let yields = if self.shared.shared_cores.load(Ordering::Relaxed) { YIELDS_SHARED } else { YIELDS };
        if idle == 0 {
            return;
        }
        if !runs || idle > yields + IDLE_AFTER {
            std::thread::sleep(IDLE_PAUSE);
        } else if idle <= yields {
            std::thread::yield_now();
        } else {
            std::thread::sleep((SHORTEST_PAUSE * (idle - yields)).min(LONGEST_PAUSE));
        }
    }

    /// One look at everything; true where something was done.
    fn turn(&mut self) -> std::result::Result<bool, Failed> {
        // Before MPI, whose turn takes longer: a put does not wait for it.
        let mut worked = self.goodbye.is_none() && self.send_frames()?;
        let came = self.take()?;
        worked |= came;
        // What was sent is looked at where nothing else is to be done: each look is another turn of MPI.
        if !worked || self.carrier.is_crowded() {
            worked |= self.carrier.sent()?;
        }
        if came {
            // The thread that waits for it may need this very core.
            std::thread::yield_now();
        }
        if self.goodbye.is_some() {
            return Ok(worked);
        }
        // Before the ring is looked at: it is empty after that only if nothing comes any more.
        let ended = self.shared.ended.load(Ordering::Acquire);
        worked |= self.send_frames()?;
        if ended != self.told_end && self.shared.ring.next().is_none() {
            self.told_end = ended;
            let (messages, bytes) = std::mem::take(&mut self.sent);
            tracing::debug!(
                "the proxy has sent {messages} messages with {bytes} bytes of frames in this launch"
            );
            self.tell_all(END, ended, &[])?;
            worked = true;
        }
        self.send_abort()?;
        self.send_life()?;
        if self.shared.stop.load(Ordering::Relaxed) {
            self.tell_all(GOODBYE, 0, &[])?;
            self.goodbye = Some(Instant::now());
        }
        self.note_over();
        Ok(worked)
    }

    fn tell_all(&mut self, kind: u32, number: u32, what: &[u8]) -> std::result::Result<(), Failed> {
        for peer in 0..self.peers.len() {
            let mut bytes = message(self.carrier.buffer(), kind, number);
            bytes.extend_from_slice(what);
            self.carrier.send(peer, bytes)?;
        }
        Ok(())
    }

    /// Sends what lies in the ring, as far as its receivers take it.
    fn send_frames(&mut self) -> std::result::Result<bool, Failed> {
        let mut any = false;
        while let Some(to) = self.shared.ring.next() {
            let Some(peer) = self.carrier.peers().iter().position(|&peer| peer == to) else {
                return Err(format!(
                    "a put to rank {to}, which shares this rank's memory; please report this"
                ));
            };
            if !self.carrier.has_room(peer) || self.peers[peer].sent.is_some_and(|sent| sent.elapsed() < GAP)
            {
                break;
            }
            let launch = self.shared.begun.load(Ordering::Relaxed);
            let mut bytes = message(self.carrier.buffer(), FRAMES, launch);
            let head = bytes.len();
            self.shared.ring.take(&mut bytes, FRAME_BYTES);
            // One message for data and its signal, which follows at once: nobody reads the data before.
            let mut patience = PATIENCE;
            while patience > 0 && bytes.len() < head + FRAME_BYTES / 2 && end_with_data(&bytes[head..]) {
                patience -= 1;
                match self.shared.ring.next() {
                    Some(next) if next == to => {
                        let room = head + FRAME_BYTES - bytes.len();
                        self.shared.ring.take(&mut bytes, room);
                    }
                    Some(_) => break,
                    // Whoever writes it may need this very core.
                    None => std::thread::yield_now(),
                }
            }
            self.sent = (self.sent.0 + 1, self.sent.1 + (bytes.len() - head) as u64);
            self.carrier.send(peer, bytes)?;
            self.peers[peer].sent = Some(Instant::now());
            any = true;
        }
        Ok(any)
    }

    /// An abort overtakes what is in the ring, which may be full.
    fn send_abort(&mut self) -> std::result::Result<(), Failed> {
        let launch = self.shared.begun.load(Ordering::Relaxed);
        if self.told_abort == launch {
            return Ok(());
        }
        let word = self.shared.target().map_or(0, |target| target.abort());
        if word == 0 {
            return Ok(());
        }
        self.told_abort = launch;
        for peer in 0..self.peers.len() {
            let mut bytes = message(self.carrier.buffer(), FRAMES, launch);
            bytes.extend_from_slice(&abort_frame(self.carrier.peers()[peer], word));
            self.carrier.send(peer, bytes)?;
        }
        Ok(())
    }

    /// Where this rank stands, now and then, and at once where it has given up.
    fn send_life(&mut self) -> std::result::Result<(), Failed> {
        let gives_up = self.shared.watch.has_given_up() && !self.told_ended;
        if !gives_up && self.told_life.elapsed() < BEAT {
            return Ok(());
        }
        self.told_ended |= gives_up;
        self.told_life = Instant::now();
        let words = self.shared.watch.own_words();
        for peer in 0..self.peers.len() {
            // A link that takes nothing gets no more.
            if self.carrier.has_room(peer) {
                let mut bytes = message(self.carrier.buffer(), LIFE, 0);
                words.iter().for_each(|word| bytes.extend_from_slice(&word.to_ne_bytes()));
                self.carrier.send(peer, bytes)?;
            }
        }
        if gives_up {
            self.shared.watch.note_told();
        }
        Ok(())
    }

    /// Does what has come.
    fn take(&mut self) -> std::result::Result<bool, Failed> {
        let Thread { shared, carrier, peers, waiting, .. } = self;
        let mut brought = false;
        while let Some(frames) = waiting.front() {
            // Of a launch that is over nothing is wanted any more.
            let applied = shared.target().map_or(Applied::Yes, |target| target.apply(frames));
            if applied == Applied::Later {
                break;
            }
            waiting.pop_front();
            brought = true;
        }
        let ranks: Vec<u32> = carrier.peers().to_vec();
        let mut problem = None;
        let came = carrier.take(|peer, bytes| {
            let rank = ranks[peer];
            let Some((head, rest)) = bytes.split_first_chunk::<8>() else {
                problem = Some(format!("rank {rank} has sent {} bytes; please report this", bytes.len()));
                return true;
            };
            let kind = u32::from_ne_bytes([head[0], head[1], head[2], head[3]]);
            let number = u32::from_ne_bytes([head[4], head[5], head[6], head[7]]);
            match kind {
                FRAMES => {
                    // Of a launch that has been aborted here nothing is wanted any more.
                    let target = shared.target();
                    if let Some(target) = *target
                        && number == shared.begun.load(Ordering::Relaxed)
                    {
                        // Nothing but an abort overtakes what waits.
                        let applied = if waiting.is_empty() || is_abort(rest) {
                            target.apply(rest)
                        } else {
                            Applied::Later
                        };
                        match applied {
                            Applied::Yes => {}
                            Applied::Later => waiting.push_back(rest.to_vec()),
                            Applied::No => {
                                problem = Some(format!(
                                    "rank {rank} has sent what is no frame; please report this"
                                ));
                            }
                        }
                    }
                }
                END => peers[peer].ended = number,
                LIFE => {
                    let words: Vec<u64> =
                        rest.as_chunks().0.iter().map(|bytes| u64::from_ne_bytes(*bytes)).collect();
                    shared.watch.hear(rank, &words);
                }
                GOODBYE => {
                    peers[peer].goodbye = true;
                    shared.watch.hear_goodbye(rank);
                    return false;
                }
                _ => problem = Some(format!("rank {rank} has sent a message of no kind; please report this")),
            }
            true
        })?;
        problem.map_or(Ok(came || brought), Err)
    }

    /// Notes the launches that are over everywhere.
    fn note_over(&self) {
        let everywhere = self.peers.iter().map(|peer| peer.ended).min().unwrap_or(u32::MAX);
        let over = everywhere.min(self.told_end);
        if self.waiting.is_empty() && over != self.shared.over.load(Ordering::Relaxed) {
            // Release: pairs with `Carried::is_over`; frames that came before were done before.
            self.shared.over.store(over, Ordering::Release);
        }
    }
}
