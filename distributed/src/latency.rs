//! Measures the time of a put with its signal to a rank on another node, and of MPI's own messages. For
//! `examples/proxy_latency.rs`.

use crate::affinity::bind;
use crate::error::{Error, Result};
use crate::memory::HugeBuffer;
use crate::messages::start_to_send;
use crate::nodes::mpk_put_with_signal;
use crate::world::World;
use kernels_cu::abi;
use mpi::ffi;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Words before the data: those of the control block and of the signal.
const DATA: usize = 512;
const SIGNAL: usize = 256;
/// A message that does not arrive within this time is lost.
const LIMIT: Duration = Duration::from_secs(10);
const TAG: i32 = 4;

/// One-way times, the medians of all rounds, and the time of an exchange.
#[derive(Clone, Copy, Debug)]
pub struct Latency {
    /// Time of a put of data, followed by a signal.
    pub put_with_signal: Duration,
    /// Time of one MPI message of the same size, whose receiver only waits for it.
    pub message: Duration,
    /// Mean time of an exchange: both ranks put data with a signal at once, and each waits for the other's. The exchanges follow each
    /// other, as the allreduces of a token do. Not a median: two exchanges may arrive together.
    pub exchange: Duration,
}

/// Collective: measures between rank 0 and the first rank of another node. Returns `None` on all other ranks, and if there is only
/// one node.
///
/// # Errors
/// A message does not arrive.
pub fn latency(world: &World, bytes: usize, rounds: u32) -> Result<Option<Latency>> {
    let peers = [0, world.nodes().elsewhere(0).first().copied().unwrap_or(0)];
    let place = peers.iter().position(|&rank| rank == world.rank());
    let (Some(place), Some(proxy), true) = (place, world.proxy(), peers[0] != peers[1]) else {
        world.barrier();
        world.barrier();
        return Ok(None);
    };
    let (me, peer) = (world.rank(), peers[1 - place]);
    let words = bytes.div_ceil(8);
    let heap = HugeBuffer::new(me, "the heap of a measurement", (DATA + words) * 8)?;
    let own = heap.as_ptr().cast::<u64>();
    let mut sym: Vec<*mut u8> = vec![std::ptr::null_mut(); world.size() as usize];
    sym[me as usize] = heap.as_ptr();
    // Runs on the cores that a worker has, although the launcher may have bound this thread to others. If a rank has
    // one core, the proxy shares it.
    let cores = world.cores().own;
    bind(&cores[..cores.len().min(1)]);
    let rank = abi::mpk_rank {
        rank: me,
        world: world.size(),
        deadline_ns: LIMIT.as_nanos() as u64,
        sym: sym.as_mut_ptr(),
        control: heap.as_ptr().cast(),
        proxy: proxy.ring(),
        ..Default::default()
    };
    // SAFETY: the heap lives until the end of this function, and `carried` is dropped before it.
    let carried = unsafe { proxy.carry(heap.as_ptr(), heap.len() as u64, false) };
    world.barrier();
    let values = vec![7u64; words];
    // The signal counts the puts of both measurements.
    let put = |_: u64| -> Result<()> {
        // SAFETY: places in this rank's heap with room for the words; a live rank.
        let reached = unsafe {
            let (to, from) = (own.add(DATA).cast(), values.as_ptr().cast());
            mpk_put_with_signal(&rank, peer, to, from, words as u64 * 8, own.add(SIGNAL), 1)
        };
        if reached { Ok(()) } else { Err(Error::Aborted("the proxy takes nothing".into())) }
    };
    // As a worker that shares its core with the proxy.
    let shares = world.cores().own.len() == 1;
    let help = || shares && proxy.help();
    let wait = |round: u64| -> Result<()> {
        let begin = Instant::now();
        // SAFETY: a word of the live heap that is only accessed atomically.
        while unsafe { AtomicU64::from_ptr(own.add(SIGNAL)) }.load(Ordering::Acquire) < round {
            if begin.elapsed() > LIMIT {
                return Err(Error::Aborted("no signal within 10 s".into()));
            }
            help();
            std::thread::yield_now();
        }
        Ok(())
    };
    let put_with_signal = ping_pong(place, rounds, put, wait)?;
    let exchange = exchanges(rounds, |round| {
        put(round)?;
        // As a worker does before its next operator (make_way_for_proxy).
        help();
        wait(u64::from(rounds) + round)
    })?;
    carried.end();
    world.barrier();
    drop(carried);
    let message = messages(world, peer, place, bytes, rounds)?;
    Ok(Some(Latency { put_with_signal, message, exchange }))
}

/// Half of the median time of a round.
fn ping_pong(
    place: usize,
    rounds: u32,
    mut send: impl FnMut(u64) -> Result<()>,
    mut receive: impl FnMut(u64) -> Result<()>,
) -> Result<Duration> {
    let mut times = Vec::new();
    for round in 1..=u64::from(rounds) {
        let begin = Instant::now();
        if place == 0 {
            send(round)?;
            receive(round)?;
        } else {
            receive(round)?;
            send(round)?;
        }
        times.push(begin.elapsed() / 2);
    }
    times.sort_unstable();
    Ok(times[times.len() / 2])
}

/// Mean time of a round in which both ranks do the same.
fn exchanges(rounds: u32, exchange: impl FnMut(u64) -> Result<()>) -> Result<Duration> {
    let begin = Instant::now();
    (1..=u64::from(rounds)).try_for_each(exchange)?;
    Ok(begin.elapsed() / rounds.max(1))
}

/// Measures the same with MPI's own messages.
fn messages(world: &World, peer: u32, place: usize, bytes: usize, rounds: u32) -> Result<Duration> {
    let Some(communicator) = world.communicator() else { return Ok(Duration::ZERO) };
    let (out, mut into) = (vec![1u8; bytes], vec![0u8; bytes]);
    let check = |code: i32| {
        if code == 0 { Ok(()) } else { Err(Error::Aborted(format!("MPI failed with {code}"))) }
    };
    // Polls, as the proxy does. A call that waits would leave MPI's progress to the next caller of MPI, which is the idle proxy.
    let finish = |mut request: ffi::MPI_Request| {
        let (begin, mut done) = (Instant::now(), 0);
        while done == 0 {
            // SAFETY: a live request and a valid out-pointer; the status is not requested.
            check(unsafe { ffi::MPI_Test(&mut request, &mut done, ffi::RSMPI_STATUS_IGNORE) })?;
            if done == 0 && begin.elapsed() > LIMIT {
                return Err(Error::Aborted("no message within 10 s".into()));
            }
            std::thread::yield_now();
        }
        Ok(())
    };
    // SAFETY: a predefined MPI handle.
    let (bytes, peer, kind) = (bytes as i32, peer as i32, unsafe { ffi::RSMPI_UINT8_T });
    let send = |_| {
        // SAFETY: a live buffer that nobody writes before the request is done.
        let request = unsafe { start_to_send(communicator, peer as u32, TAG, &out) };
        finish(request.map_err(|code| Error::Aborted(format!("MPI failed with {code}")))?)
    };
    let receive = |_| {
        let mut request = MaybeUninit::uninit();
        // SAFETY: as above; nobody reads the buffer.
        check(unsafe {
            ffi::MPI_Irecv(
                into.as_mut_ptr().cast(),
                bytes,
                kind,
                peer,
                TAG,
                communicator,
                request.as_mut_ptr(),
            )
        })?;
        // SAFETY: as above.
        finish(unsafe { request.assume_init() })
    };
    ping_pong(place, rounds, send, receive)
}
