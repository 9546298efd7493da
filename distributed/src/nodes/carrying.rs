//! The thread that sends data between this rank and those of other nodes: puts of the kernel's loops, and signs of life.
//!
//! Each message is a word for its kind, a number, and its payload:
//! - frames of a launch: applied to this rank's heap at once, in order;
//! - the end of a launch: the sender's loops have ended and all their frames have arrived. A launch is over on a rank when it has
//!   received this from all ranks. Then none of its frames is still on its way, and memory may be prepared for the next
//!   launch;
//! - the state of the sender, for the watch;
//! - a ring: there is a message of the sender's host for this rank's host, which may sleep;
//! - goodbye: nothing else will arrive. It comes after an abort, and after the frames in the ring.

use super::link::{Failed, Link};
use super::ring::{Applied, FRAME_BYTES, abort_frame, end_with_data, is_abort};
use super::shared::Shared;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use taskgraph::words::counted;

const FRAMES: u32 = 1;
const END: u32 = 2;
const LIFE: u32 = 3;
const GOODBYE: u32 = 4;
const RING: u32 = 5;

/// How many times data waits for its signal, a fraction of a microsecond each time.
const PATIENCE: u32 = 8;
/// Minimum time between messages to one peer. Puts that a kernel's workers make at about the same time are sent together, because a
/// message costs more than this gap on both sides.
const GAP: Duration = Duration::from_micros(5);
/// How often other nodes get a sign of life.
const BEAT: Duration = Duration::from_millis(100);
/// After the stop, frames in the ring are sent for no longer than this. A peer may accept nothing more.
const DRAIN: Duration = Duration::from_secs(1);
/// After goodbye, the others' goodbye must arrive within this time, or they are gone.
const PARTING: Duration = Duration::from_secs(5);

/// The proxy's state for a peer.
#[derive(Clone, Default)]
struct Peer {
    /// Number of launches whose end it has reported.
    ended: u32,
    goodbye: bool,
    /// Number of rings that its host has been sent.
    rung: u32,
    /// Time of the last frames to it.
    sent: Option<Instant>,
}

pub(super) struct Thread<L> {
    shared: Arc<Shared>,
    carrier: L,
    peers: Vec<Peer>,
    /// Number of launches whose end this rank has reported.
    told_end: u32,
    /// The launch whose abort this rank has reported.
    told_abort: u32,
    told_life: Instant,
    told_ended: bool,
    /// When the stop was seen.
    stops: Option<Instant>,
    goodbye: Option<Instant>,
    /// The last turn has been taken.
    over: bool,
    /// Number of messages with frames in this launch, and their bytes.
    sent: (u64, u64),
    /// Frames for which the GPU has no room yet, in order.
    waiting: VecDeque<Vec<u8>>,
}

fn message(mut buffer: Vec<u8>, kind: u32, number: u32) -> Vec<u8> {
    buffer.extend_from_slice(&kind.to_ne_bytes());
    buffer.extend_from_slice(&number.to_ne_bytes());
    buffer
}

impl<L: Link> Thread<L> {
    pub fn new(shared: Arc<Shared>, carrier: L) -> Thread<L> {
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
            stops: None,
            goodbye: None,
            over: false,
            sent: (0, 0),
            waiting: VecDeque::new(),
        }
    }

    /// Takes one turn, unless the last one has been taken. Returns true if something was done. A problem is reported to the watch, and is
    /// the end.
    pub fn take_turn(&mut self) -> bool {
        if self.over {
            return false;
        }
        let worked = self.turn().unwrap_or_else(|problem| {
            self.shared.watch.fail(format!("the proxy between the nodes: {problem}"));
            self.over = true;
            false
        });
        if let Some(since) = self.goodbye
            && self.carrier.is_idle()
            && (self.peers.iter().all(|peer| peer.goodbye) || since.elapsed() > PARTING)
        {
            self.shared.watch.note_last_turn();
            self.over = true;
        }
        worked
    }

    /// True after the last turn.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Checks everything once. Returns true if something was done.
    fn turn(&mut self) -> std::result::Result<bool, Failed> {
        // Before MPI, which takes longer: a put does not wait for it.
        let mut worked = self.goodbye.is_none() && self.send_frames()?;
        let came = self.take()?;
        worked |= came;
        // Sent messages are checked only if there is nothing else to do, because each check is another turn of MPI.
        if !worked || self.carrier.is_crowded() {
            worked |= self.carrier.sent()?;
        }
        if self.goodbye.is_some() {
            return Ok(worked);
        }
        // Read before the ring: if the ring is empty after that, nothing else will be added.
        let ended = self.shared.ended.load(Ordering::Acquire);
        worked |= self.send_frames()?;
        if ended != self.told_end && self.shared.ring.next().is_none() {
            self.told_end = ended;
            let (messages, bytes) = std::mem::take(&mut self.sent);
            tracing::debug!(
                "the proxy has sent {} with {} of frames in this launch",
                counted(messages, "message"),
                counted(bytes, "byte")
            );
            self.tell_all(END, ended, &[])?;
            worked = true;
        }
        // Read before the abort, the rings and the ring of frames. Acquire: pairs with `Shared::stop`. So what this rank wanted to be sent
        // before that is sent before goodbye.
        let stops = self.shared.stop.load(Ordering::Acquire);
        self.send_abort()?;
        self.send_rings(stops)?;
        self.send_life()?;
        if stops && self.is_drained() {
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

    /// Sends as much of the ring as its receivers accept.
    fn send_frames(&mut self) -> std::result::Result<bool, Failed> {
        let mut any = false;
        while let Some(to) = self.shared.ring.next() {
            let Some(peer) = self.carrier.peers().iter().position(|&peer| peer == to) else {
                return Err(format!(
                    "a put to rank {to}, which shares this rank's memory; this is a bug; please report it"
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
            // One message for data and the signal that follows at once, because nobody reads the data before.
            let mut patience = PATIENCE;
            while patience > 0 && bytes.len() < head + FRAME_BYTES / 2 && end_with_data(&bytes[head..]) {
                patience -= 1;
                match self.shared.ring.next() {
                    Some(next) if next == to => {
                        let room = head + FRAME_BYTES - bytes.len();
                        self.shared.ring.take(&mut bytes, room);
                    }
                    Some(_) => break,
                    // The thread that writes it may need this very core.
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

    /// After the stop: true if the ring of frames is empty, or has been sent for long enough.
    fn is_drained(&mut self) -> bool {
        let since = *self.stops.get_or_insert_with(Instant::now);
        self.shared.ring.next().is_none() || since.elapsed() >= DRAIN
    }

    /// An abort overtakes the content of the ring, which may be full. That of a launch that has ended is sent too: its other ranks may wait
    /// without a limit.
    fn send_abort(&mut self) -> std::result::Result<(), Failed> {
        // Relaxed: if another launch begins meanwhile, nobody needs this one's abort any more, and its number tells receivers so.
        let launch = self.shared.begun.load(Ordering::Relaxed);
        if self.told_abort == launch {
            return Ok(());
        }
        let word = self.shared.abort();
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

    /// Sends the rings that the host has asked for. Several may be sent as one. The last rings and the goodbye do not
    /// wait for room.
    fn send_rings(&mut self, last: bool) -> std::result::Result<(), Failed> {
        // Acquire: pairs with `Ringer::ring`.
        let rings = self.shared.rings.load(Ordering::Acquire);
        for peer in 0..self.peers.len() {
            if self.peers[peer].rung != rings && (last || self.carrier.has_room(peer)) {
                self.peers[peer].rung = rings;
                let bytes = message(self.carrier.buffer(), RING, 0);
                self.carrier.send(peer, bytes)?;
            }
        }
        Ok(())
    }

    /// Sends this rank's state now and then, and at once if it has given up.
    fn send_life(&mut self) -> std::result::Result<(), Failed> {
        let gives_up = self.shared.watch.has_given_up() && !self.told_ended;
        if !gives_up && self.told_life.elapsed() < BEAT {
            return Ok(());
        }
        self.told_ended |= gives_up;
        self.told_life = Instant::now();
        let words = self.shared.watch.own_words();
        for peer in 0..self.peers.len() {
            // A link that accepts nothing gets no more.
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

    /// Handles incoming messages.
    fn take(&mut self) -> std::result::Result<bool, Failed> {
        let Thread { shared, carrier, peers, waiting, .. } = self;
        let mut brought = false;
        while let Some(frames) = waiting.front() {
            // Frames of a launch that is over are not needed any more.
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
                problem = Some(format!("rank {rank} has sent a message of {} bytes, which is too short; this is a bug; please report it", bytes.len()));
                return true;
            };
            let kind = u32::from_ne_bytes([head[0], head[1], head[2], head[3]]);
            let number = u32::from_ne_bytes([head[4], head[5], head[6], head[7]]);
            match kind {
                FRAMES => {
                    // Frames of a launch that has been aborted here are not needed any more.
                    let target = shared.target();
                    if let Some(target) = *target
                        && number == shared.begun.load(Ordering::Relaxed)
                    {
                        // Only an abort overtakes waiting frames.
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
                                    "rank {rank} has sent an invalid frame; this is a bug; please report it"
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
                RING => shared.bell().iter().for_each(|bell| bell.ring()),
                GOODBYE => {
                    peers[peer].goodbye = true;
                    shared.watch.hear_goodbye(rank);
                    return false;
                }
                _ => problem = Some(format!("rank {rank} has sent a message of unknown kind; this is a bug; please report it")),
            }
            true
        })?;
        problem.map_or(Ok(came || brought), Err)
    }

    /// Records the launches that are over everywhere.
    fn note_over(&self) {
        let everywhere = self.peers.iter().map(|peer| peer.ended).min().unwrap_or(u32::MAX);
        let over = everywhere.min(self.told_end);
        if self.waiting.is_empty() && over != self.shared.over.load(Ordering::Relaxed) {
            // Release: pairs with `Carried::is_over`; earlier frames were applied before.
            self.shared.over.store(over, Ordering::Release);
        }
    }
}

#[cfg(test)]
#[path = "carrying_test.rs"]
pub(super) mod tests;
