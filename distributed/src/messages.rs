//! Messages between ranks. No call here blocks: waits poll, and [`Watch`] ends the process if an awaited message does not arrive.

use crate::bell::Bell;
use crate::watch::Watch;
use mpi::Count;
use mpi::ffi;
use mpi::request::{Request, Scope, scope};
use mpi::topology::SimpleCommunicator;
use mpi::traits::*;
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

const TAG: i32 = 1;
/// Longer messages are sent in pieces of this size, so that the watch sees progress. Must be the same on all ranks.
const PIECE: usize = 16 << 20;
/// Longest content that goes with the head of a message.
const SHORT_BYTES: usize = 496;
const HEAD_BYTES: usize = 16;
/// A wait polls without pauses for this long, then with pauses, so that it does not take a core from a rank that works.
const BUSY: Duration = Duration::from_millis(2);
/// The same time where ranks share cores. There a rank that polls keeps another one from working.
const BUSY_SHARED: Duration = Duration::from_micros(50);
const SHORTEST_PAUSE: Duration = Duration::from_micros(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);
/// A wait this long is for something slow, or the engine is idle.
const LONG_WAIT: Duration = Duration::from_secs(2);
/// Longest pause of such a wait.
const IDLE_PAUSE: Duration = Duration::from_millis(10);

/// A rank's messages to and from other ranks.
#[derive(Clone, Copy)]
pub(crate) struct Messages<'a> {
    pub ranks: &'a SimpleCommunicator,
    pub watch: &'a Watch,
    /// Ranks share cores.
    pub shared_cores: bool,
}

impl Messages<'_> {
    /// Polls a request until it is done. In a pause, this rank's bell wakes it: a rank of the same node rings it after each message.
    fn finish<'a, D: ?Sized, S: Scope<'a>>(&self, mut request: Request<'a, D, S>) {
        let begin = Instant::now();
        let busy = if self.shared_cores { BUSY_SHARED } else { BUSY };
        let bell = self.watch.bell().map(Bell::of_hosts);
        let mut pause = SHORTEST_PAUSE;
        loop {
            // Before the test, so that a ring that comes after it ends the pause at once.
            let heard = bell.map(Bell::listen);
            match request.test() {
                Ok(_) => return,
                Err(pending) => request = pending,
            }
            if begin.elapsed() < busy {
                std::thread::yield_now();
                continue;
            }
            match (bell, heard) {
                (Some(bell), Some(heard)) => bell.sleep(heard, pause),
                _ => std::thread::sleep(pause),
            }
            let longest = if begin.elapsed() < LONG_WAIT { LONGEST_PAUSE } else { IDLE_PAUSE };
            pause = (pause * 2).min(longest);
        }
    }

    /// Sends `bytes` to `rank` in step `step`.
    pub fn send(&self, rank: u32, step: u64, bytes: &[u8]) {
        let process = self.ranks.process_at_rank(rank as Count);
        let bell = self.watch.bell_of(rank).map(Bell::of_hosts);
        let send = |message: &[u8]| {
            scope(|scope| {
                let request = process.immediate_send_with_tag(scope, message, TAG);
                // A rank on another node has no bell here, and looks for the message itself.
                bell.iter().for_each(|bell| bell.ring());
                self.finish(request);
            });
        };
        let (short, long) = bytes.split_at(bytes.len().min(SHORT_BYTES));
        let head = [step, bytes.len() as u64].map(u64::to_ne_bytes).concat();
        send(&[&head, short].concat());
        for piece in long.chunks(PIECE) {
            send(piece);
            self.watch.moved();
        }
    }

    /// Receives what `rank` sends in step `step`.
    pub fn receive(&self, rank: u32, step: u64) -> Vec<u8> {
        let process = self.ranks.process_at_rank(rank as Count);
        let receive = |place: &mut [u8]| {
            scope(|scope| self.finish(process.immediate_receive_into_with_tag(scope, place, TAG)));
        };
        let mut first = [0; HEAD_BYTES + SHORT_BYTES];
        receive(&mut first);
        let (head, short) = first.split_at(HEAD_BYTES);
        let word = |place: usize| u64::from_ne_bytes(std::array::from_fn(|i| head[8 * place + i]));
        let (its_step, length) = (word(0), word(1) as usize);
        if its_step != step {
            self.watch.give_up(Some(format!(
                "the ranks are out of step: in `{}`, rank {rank} is at step {its_step}, but this rank is at step {step}; this is a bug; please report it",
                self.watch.phase_name()
            )));
        }
        let mut bytes = vec![0; length];
        let (begin, long) = bytes.split_at_mut(length.min(SHORT_BYTES));
        begin.copy_from_slice(&short[..begin.len()]);
        for piece in long.chunks_mut(PIECE) {
            receive(piece);
            self.watch.moved();
        }
        self.watch.moved();
        bytes
    }
}

/// Starts to send `bytes` to `rank`, for threads that call MPI directly because they must not wait. The error is MPI's code.
///
/// # Safety
/// A live communicator. The bytes neither move nor change until the request is done.
pub(crate) unsafe fn start_to_send(
    communicator: ffi::MPI_Comm,
    rank: u32,
    tag: i32,
    bytes: &[u8],
) -> Result<ffi::MPI_Request, i32> {
    let mut request = MaybeUninit::uninit();
    // SAFETY: the caller's.
    let code = unsafe {
        ffi::MPI_Isend(
            bytes.as_ptr().cast(),
            bytes.len() as i32,
            ffi::RSMPI_UINT8_T,
            rank as i32,
            tag,
            communicator,
            request.as_mut_ptr(),
        )
    };
    // SAFETY: set by the call if it succeeded.
    if code == 0 { Ok(unsafe { request.assume_init() }) } else { Err(code) }
}

/// Packs several messages into one.
pub(crate) fn pack(all: &[Vec<u8>]) -> Vec<u8> {
    let mut packed = Vec::with_capacity(all.iter().map(|bytes| bytes.len() + 8).sum());
    for bytes in all {
        packed.extend_from_slice(&(bytes.len() as u64).to_ne_bytes());
        packed.extend_from_slice(bytes);
    }
    packed
}

/// The messages that [`pack`] packed.
pub(crate) fn unpack(mut packed: &[u8]) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    while let Some((length, rest)) = packed.split_first_chunk::<8>() {
        let (bytes, rest) = rest.split_at((u64::from_ne_bytes(*length) as usize).min(rest.len()));
        all.push(bytes.to_vec());
        packed = rest;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_messages_come_out_again() {
        for all in [vec![], vec![vec![]], vec![vec![1, 2], vec![], vec![3; 1000]]] {
            assert_eq!(unpack(&pack(&all)), all);
        }
    }
}
