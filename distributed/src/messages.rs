//! Messages between ranks. No call here blocks: waits poll, and [`Watch`] ends the process if an awaited message does not arrive.

use crate::watch::Watch;
use mpi::Count;
use mpi::request::{Request, Scope, scope};
use mpi::topology::SimpleCommunicator;
use mpi::traits::*;
use std::time::{Duration, Instant};

const TAG: i32 = 1;
/// Longer messages are sent in pieces of this size, so that the watch sees progress. Must be the same on all ranks.
const PIECE: usize = 16 << 20;
/// A wait polls without pauses for this long, then with pauses, so that it does not take a core from a rank that works.
const BUSY: Duration = Duration::from_millis(2);
const SHORTEST_PAUSE: Duration = Duration::from_micros(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);
/// A wait of this length is for something slow, or the engine is idle.
const LONG_WAIT: Duration = Duration::from_secs(2);
/// Longest pause of such a wait.
const IDLE_PAUSE: Duration = Duration::from_millis(10);

/// Polls a request until it is done.
fn finish<'a, D: ?Sized, S: Scope<'a>>(mut request: Request<'a, D, S>) {
    let begin = Instant::now();
    let mut pause = SHORTEST_PAUSE;
    loop {
        match request.test() {
            Ok(_) => return,
            Err(pending) => request = pending,
        }
        if begin.elapsed() < BUSY {
            std::thread::yield_now();
        } else {
            std::thread::sleep(pause);
            let longest = if begin.elapsed() < LONG_WAIT { LONGEST_PAUSE } else { IDLE_PAUSE };
            pause = (pause * 2).min(longest);
        }
    }
}

/// Sends `bytes` to `rank` in step `step`.
pub(crate) fn send(ranks: &SimpleCommunicator, watch: &Watch, rank: u32, step: u64, bytes: &[u8]) {
    let process = ranks.process_at_rank(rank as Count);
    // The step, and the number of bytes that follow.
    let head = [step, bytes.len() as u64];
    scope(|scope| finish(process.immediate_send_with_tag(scope, &head[..], TAG)));
    for piece in bytes.chunks(PIECE) {
        scope(|scope| finish(process.immediate_send_with_tag(scope, piece, TAG)));
        watch.moved();
    }
}

/// Receives what `rank` sends in step `step`.
pub(crate) fn receive(ranks: &SimpleCommunicator, watch: &Watch, rank: u32, step: u64) -> Vec<u8> {
    let process = ranks.process_at_rank(rank as Count);
    let mut head = [0u64; 2];
    scope(|scope| finish(process.immediate_receive_into_with_tag(scope, &mut head[..], TAG)));
    let [its_step, length] = head;
    if its_step != step {
        watch.give_up(Some(format!(
            "the ranks are out of step: in `{}`, rank {rank} is at step {its_step}, but this rank is at step {step}; this is a bug; please report it",
            watch.phase_name()
        )));
    }
    let mut bytes = vec![0; length as usize];
    for piece in bytes.chunks_mut(PIECE) {
        scope(|scope| finish(process.immediate_receive_into_with_tag(scope, piece, TAG)));
        watch.moved();
    }
    watch.moved();
    bytes
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
