//! Two proxies over a link in memory: the rings between hosts, and what is sent at the end.

use super::*;
use crate::bell::Bell;
use crate::launcher::Place;
use crate::memory::HugeBuffer;
use crate::nodes::mpk_put_with_signal;
use crate::nodes::ring::{Heap, Target};
use crate::watch::{Watch, WatchOptions};
use kernels_cu::abi;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Mutex, MutexGuard, OnceLock};

/// Far more than a message takes, even if the machine is busy.
const LOST: Duration = Duration::from_secs(5);

/// Numbers that look random.
struct Dice(u64);

impl Dice {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % most
    }
}

/// Messages on their way, each with the time at which it arrives.
type Way = Arc<Mutex<VecDeque<(Instant, Vec<u8>)>>>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no test thread has panicked with it")
}

/// One end of a link between two ranks. Messages take up to `delay`, and at most `room` are on their way.
pub(in crate::nodes) struct Memory {
    peer: [u32; 1],
    out: Way,
    come: Way,
    delay: Duration,
    room: usize,
    dice: Dice,
    expects: bool,
}

impl Link for Memory {
    fn peers(&self) -> &[u32] {
        &self.peer
    }

    fn has_room(&self, _: usize) -> bool {
        lock(&self.out).len() < self.room
    }

    fn is_crowded(&self) -> bool {
        false
    }

    fn is_idle(&self) -> bool {
        true
    }

    fn buffer(&mut self) -> Vec<u8> {
        Vec::new()
    }

    fn send(&mut self, _: usize, bytes: Vec<u8>) -> std::result::Result<(), Failed> {
        let late = self.delay * self.dice.below(1000) as u32 / 1000;
        lock(&self.out).push_back((Instant::now() + late, bytes));
        Ok(())
    }

    fn sent(&mut self) -> std::result::Result<bool, Failed> {
        Ok(false)
    }

    fn take(&mut self, mut take: impl FnMut(usize, &[u8]) -> bool) -> std::result::Result<bool, Failed> {
        let mut any = false;
        while self.expects {
            // In order: a late message delays those after it.
            let mut come = lock(&self.come);
            if come.front().is_none_or(|(due, _)| *due > Instant::now()) {
                break;
            }
            let bytes = come.pop_front().map(|(_, bytes)| bytes).unwrap_or_default();
            drop(come);
            self.expects = take(0, &bytes);
            any = true;
        }
        Ok(any)
    }
}

/// A watch that knows no other rank. One is enough for all tests, since it has a thread.
fn watch() -> Watch {
    static WATCH: OnceLock<Watch> = OnceLock::new();
    let begin = || {
        let place =
            Place { rank: 0, size: 2, local_rank: None, local_size: None, job: "carrying test".into() };
        let deadline = Duration::from_secs(60);
        Watch::begin(place, WatchOptions { deadline, tell: |_| {}, fault: None, carries_all: false })
    };
    WATCH.get_or_init(begin).clone()
}

/// Two ranks on two nodes, the first one's link with this much delay and room.
pub(in crate::nodes) fn ranks(delay: Duration, room: usize) -> [(Arc<Shared>, Thread<Memory>); 2] {
    let ways = [Way::default(), Way::default()];
    [0, 1].map(|rank: usize| {
        let shared = Arc::new(Shared::new(rank as u32, watch()).expect("memory"));
        let link = Memory {
            peer: [1 - rank as u32],
            out: ways[rank].clone(),
            come: ways[1 - rank].clone(),
            delay,
            room,
            dice: Dice(rank as u64 + 7),
            expects: true,
        };
        (shared.clone(), Thread::new(shared, link))
    })
}

/// Runs the proxy as [`Thread::run`] does, but delayed at random for up to `pause` microseconds between turns.
fn run_held_up(mut thread: Thread<Memory>, pause: u64) {
    let mut dice = Dice(pause);
    while thread.goodbye.is_none() || thread.peers.iter().any(|peer| !peer.goodbye) {
        thread.turn().expect("the link in memory does not fail");
        match dice.below(4) {
            0 => {}
            1 => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(dice.below(pause.max(1)))),
        }
    }
}

/// A host that sends `count` messages, each with a ring, and one that sleeps until it is rung. Returns how often it slept until it had all.
fn messages(delay: Duration, room: usize, pause: u64, count: u32) -> u32 {
    let [(first, one), (second, two)] = ranks(delay, room);
    let (sent, word) = (AtomicU32::new(0), AtomicU32::new(0));
    // SAFETY: the word outlives the threads below and is only accessed atomically.
    let bell = unsafe { Bell::new(NonNull::from(&word).cast(), false) };
    std::thread::scope(|scope| {
        scope.spawn(|| run_held_up(one, pause));
        scope.spawn(|| run_held_up(two, pause));
        scope.spawn(|| {
            let mut dice = Dice(count.into());
            for _ in 0..count {
                // Relaxed: the rings order it for the host that is woken.
                sent.fetch_add(1, Ordering::Relaxed);
                first.ring_peers();
                match dice.below(8) {
                    0 => std::thread::sleep(Duration::from_micros(dice.below(3000))),
                    1..4 => std::thread::yield_now(),
                    _ => {}
                }
            }
        });
        let rung = second.set_bell(bell);
        let (mut sleeps, mut lost) = (0, false);
        loop {
            let heard = bell.listen();
            if sent.load(Ordering::Relaxed) == count || lost {
                break;
            }
            let begin = Instant::now();
            bell.sleep(heard, LOST);
            lost = begin.elapsed() >= LOST;
            sleeps += 1;
        }
        drop(rung);
        // Both proxies end even if a ring was lost, so that the test fails and does not hang.
        first.stop();
        second.stop();
        assert!(!lost, "the host slept on, with {} of {count} messages", sent.load(Ordering::Relaxed));
        sleeps
    })
}

#[test]
fn every_message_wakes_a_sleeping_host_however_late_the_proxies_are() {
    for (delay, room, pause) in [(0, 16, 0), (0, 16, 200), (2000, 16, 50), (2000, 1, 3000), (300, 2, 700)] {
        let sleeps = messages(Duration::from_micros(delay), room, pause, 3000);
        assert!(
            sleeps > 0,
            "delay {delay}, room {room}, pause {pause}: the host never slept, so nothing was tested"
        );
    }
}

#[test]
fn a_ring_that_was_asked_for_before_the_stop_arrives() {
    for round in 0..300 {
        // Without room, as if the peer had stopped reading.
        let [(first, one), (second, two)] =
            ranks(Duration::from_micros(round % 50), (round % 2) as usize * 16);
        let word = AtomicU32::new(0);
        // SAFETY: as above.
        let _rung = second.set_bell(unsafe { Bell::new(NonNull::from(&word).cast(), false) });
        std::thread::scope(|scope| {
            scope.spawn(|| run_held_up(one, 20));
            scope.spawn(|| run_held_up(two, 20));
            (0..round * 20).for_each(|_| std::hint::spin_loop());
            first.ring_peers();
            first.stop();
            second.stop();
        });
        assert_eq!(word.load(Ordering::Relaxed), 1, "round {round}");
    }
}

#[test]
fn a_bell_that_was_taken_down_is_not_rung() {
    let [(first, one), (second, two)] = ranks(Duration::from_micros(30), 16);
    let mut rings = 0;
    let mut late = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| run_held_up(one, 10));
        scope.spawn(|| run_held_up(two, 10));
        for round in 0..2000 {
            // A leaked word would hide a ring that comes too late, and a freed one might crash. So the test checks this word
            // afterwards.
            let word = Box::new(AtomicU32::new(0));
            // SAFETY: the word outlives `rung` and is only accessed atomically.
            let bell = unsafe { Bell::new(NonNull::from(&*word).cast(), false) };
            let rung = second.set_bell(bell);
            first.ring_peers();
            (0..round % 3000).for_each(|_| std::hint::spin_loop());
            drop(rung);
            let counted = word.load(Ordering::Relaxed);
            (0..2000).for_each(|_| std::hint::spin_loop());
            if word.load(Ordering::Relaxed) != counted {
                late.push(round);
            }
            rings += counted;
        }
        first.stop();
        second.stop();
    });
    assert!(late.is_empty(), "rung after it was taken down, in rounds {late:?}");
    assert!(rings > 0, "no ring arrived, so nothing was tested");
}

/// Bytes of a rank's heap, and places in it: after the control block.
const HEAP_BYTES: usize = 1 << 20;
const SIGNAL: usize = 4096;
const DATA: usize = 8192;

/// Begins a launch with a new heap.
fn begin_launch(shared: &Shared) -> HugeBuffer {
    let heap = HugeBuffer::new(0, "a heap", HEAP_BYTES).expect("memory");
    *shared.target() = Some(Target::Host(Heap { base: heap.as_ptr(), bytes: heap.len() as u64 }));
    shared.begun.fetch_add(1, Ordering::Relaxed);
    heap
}

fn word(heap: &HugeBuffer, offset: usize) -> &AtomicU64 {
    // SAFETY: an aligned word of the live heap, which is only accessed atomically.
    unsafe { AtomicU64::from_ptr(heap.as_ptr().add(offset).cast()) }
}

/// A kernel that waits for requests puts nothing, so its proxy sleeps. The kernel writes its abort as its last act, and its host
/// goes on at once.
#[test]
fn an_abort_is_sent_even_if_the_launch_has_ended_before_the_proxys_next_turn() {
    for (on_gpu, stops) in [(false, false), (false, true), (true, false), (true, true)] {
        let [(first, mut one), (second, mut two)] = ranks(Duration::ZERO, 16);
        let heaps = [begin_launch(&first), begin_launch(&second)];
        let abort = 1_u64 << 32 | u64::from(abi::MPK_ABORT_INTERRUPT);
        if on_gpu {
            let (ring, target) = first.ring.for_device(HEAP_BYTES as u64, std::ptr::null_mut());
            *first.target() = Some(target);
            // SAFETY: the word is in the ring's memory, and is only accessed atomically.
            unsafe { AtomicU64::from_ptr(ring.abort) }.store(abort, Ordering::Relaxed);
        } else {
            word(&heaps[0], 0).store(abort, Ordering::Relaxed);
        }
        first.detach();
        if stops {
            first.stop();
        }
        for thread in [&mut one, &mut two] {
            thread.turn().expect("the link in memory does not fail");
        }
        assert_eq!(second.abort(), abort, "on a GPU: {on_gpu}, before goodbye: {stops}");
        assert_eq!((one.goodbye.is_some(), two.peers[0].goodbye), (stops, stops));
        // The next launch has not been aborted.
        let _heap = begin_launch(&first);
        assert_eq!(first.abort(), 0);
        first.detach();
        assert_eq!(first.abort(), 0);
        second.detach();
    }
}

/// Puts more than one message holds, then a signal.
fn put(shared: &Shared, heap: &HugeBuffer) {
    let mut sym = [heap.as_ptr(), std::ptr::null_mut()];
    let rank = abi::mpk_rank {
        world: 2,
        deadline_ns: LOST.as_nanos() as u64,
        sym: sym.as_mut_ptr(),
        control: heap.as_ptr().cast(),
        proxy: shared.ring.as_ptr(),
        ..Default::default()
    };
    let values = vec![7_u8; 3 * FRAME_BYTES];
    // SAFETY: places in the heap with room for the values; a live rank.
    let put = unsafe {
        let (to, signal) = (heap.as_ptr().add(DATA).cast(), heap.as_ptr().add(SIGNAL).cast());
        mpk_put_with_signal(&rank, 1, to, values.as_ptr().cast(), values.len() as u64, signal, 1)
    };
    assert!(put, "the ring has room");
}

#[test]
fn puts_in_the_ring_are_sent_before_goodbye() {
    let [(first, mut one), (second, mut two)] = ranks(Duration::ZERO, 1);
    let heaps = [begin_launch(&first), begin_launch(&second)];
    put(&first, &heaps[0]);
    first.stop();
    let begin = Instant::now();
    while !two.peers[0].goodbye {
        assert!(begin.elapsed() < LOST, "no goodbye");
        one.turn().expect("the link in memory does not fail");
        two.turn().expect("the link in memory does not fail");
    }
    assert_eq!(word(&heaps[1], SIGNAL).load(Ordering::Acquire), 1);
    assert_eq!(word(&heaps[1], DATA + 3 * FRAME_BYTES - 8).load(Ordering::Relaxed).to_ne_bytes(), [7; 8]);
    first.detach();
    second.detach();
}

#[test]
fn a_peer_that_accepts_nothing_delays_goodbye_for_a_bounded_time() {
    let [(first, mut one), _second] = ranks(Duration::ZERO, 0);
    let heap = begin_launch(&first);
    put(&first, &heap);
    first.stop();
    let begin = Instant::now();
    while one.goodbye.is_none() {
        assert!(begin.elapsed() < LOST, "no goodbye");
        one.turn().expect("the link in memory does not fail");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(begin.elapsed() >= DRAIN);
    first.detach();
}
