//! Two proxies over a link in memory, whose turns are taken by waiting workers too.

use super::*;
use crate::memory::HugeBuffer;
use crate::nodes::carrying::tests::{Memory, ranks};
use crate::nodes::mpk_put_with_signal;
use crate::nodes::ring::{Heap, Target};
use kernels_cu::abi;
use std::time::Instant;

const WORDS: usize = 256;
/// Places in the heap, in words: after the control block.
const SIGNAL: usize = 512;
const DATA: usize = 1024;
/// Far more than a message takes, even if the machine is busy.
const LOST: Duration = Duration::from_secs(20);

/// A rank whose memory only its proxy reaches.
struct Rank {
    shared: Arc<Shared>,
    turns: Turns<Memory>,
    heap: HugeBuffer,
}

impl Rank {
    fn word(&self, place: usize) -> &AtomicU64 {
        // SAFETY: a word of the live heap, whose data is only read after its signal.
        unsafe { AtomicU64::from_ptr(self.heap.as_ptr().cast::<u64>().add(place)) }
    }

    /// A worker's round trips: puts numbered words to `peer` and waits for those of the same number from there. `helps`: it takes the
    /// proxy's turns while it waits. Returns the first round that went wrong.
    fn play(&self, me: u32, rounds: u64, starts: bool) -> Option<u64> {
        let mut sym = [std::ptr::null_mut(); 2];
        sym[me as usize] = self.heap.as_ptr();
        let rank = abi::mpk_rank {
            rank: me,
            world: 2,
            deadline_ns: LOST.as_nanos() as u64,
            sym: sym.as_mut_ptr(),
            control: self.heap.as_ptr().cast(),
            proxy: self.shared.ring.as_ptr(),
            ..Default::default()
        };
        let put = |round: u64| {
            let values = [round; WORDS];
            let at = |place| self.word(place).as_ptr();
            // SAFETY: places in this rank's heap with room for the words; a live rank.
            unsafe {
                mpk_put_with_signal(
                    &rank,
                    1 - me,
                    at(DATA).cast(),
                    values.as_ptr().cast(),
                    WORDS as u64 * 8,
                    at(SIGNAL),
                    1,
                )
            }
        };
        for round in 1..=rounds {
            if starts && !put(round) {
                return Some(round);
            }
            let begin = Instant::now();
            while self.word(SIGNAL).load(Ordering::Acquire) < round {
                if begin.elapsed() > LOST {
                    return Some(round);
                }
                // As `help_proxy` calls it.
                // SAFETY: the turns live as long as this rank.
                unsafe { Turns::<Memory>::help_of((&raw const self.turns).cast_mut().cast()) };
                std::thread::yield_now();
            }
            if (DATA..DATA + WORDS).any(|place| self.word(place).load(Ordering::Relaxed) != round) {
                return Some(round);
            }
            if !starts && !put(round) {
                return Some(round);
            }
        }
        None
    }
}

#[test]
fn puts_carried_by_workers_and_proxy_arrive_once_and_in_order() {
    for (delay, room) in [(0, 16), (0, 1), (300, 2)] {
        let mut both = ranks(Duration::from_micros(delay), room).map(|(shared, thread)| {
            let heap = HugeBuffer::new(0, "a heap", (DATA + WORDS) * 8).expect("memory");
            *shared.target() = Some(Target::Host(Heap { base: heap.as_ptr(), bytes: heap.len() as u64 }));
            shared.begun.store(1, Ordering::Relaxed);
            Rank { turns: Turns::new(shared.clone(), thread), shared, heap }
        });
        let [first, second] = &mut both;
        let (first, second) = (&*first, &*second);
        let wrong = std::thread::scope(|scope| {
            for rank in [first, second] {
                scope.spawn(|| rank.turns.run());
            }
            let other = scope.spawn(|| second.play(1, 2000, false));
            let wrong = [first.play(0, 2000, true), other.join().expect("the worker does not panic")];
            first.shared.stop();
            second.shared.stop();
            wrong
        });
        assert_eq!(wrong, [None; 2], "delay {delay}, room {room}: the first wrong round of each rank");
        for rank in [first, second] {
            assert!(
                rank.turns.helped.load(Ordering::Relaxed) > 0,
                "no worker has helped, so nothing was tested"
            );
            *rank.shared.target() = None;
        }
    }
}
