//! Two proxies over a link in memory: the rings between hosts.

use super::*;
use crate::bell::Bell;
use crate::launcher::Place;
use crate::watch::{Watch, WatchOptions};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;
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
