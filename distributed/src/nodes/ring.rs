//! The rings of a rank's proxy: the one that the loops of the rank fill with frames (`kernels-cu/protocol/frames.h`), and, for a GPU, the
//! inbox from which its kernel takes the frames of others; and what frames from elsewhere are for: a heap of this process, or a GPU's.

use crate::error::Result;
use crate::memory::HugeBuffer;
use kernels_cu::abi;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a ring.
const CAPACITY: usize = 4 << 20;
/// Where the parts lie, from the beginning of the memory: what is written by different threads, in cache lines of its own.
const HEAD: usize = size_of::<abi::mpk_proxy>().next_multiple_of(256);
const ABORT: usize = HEAD + 128;
const INBOX: usize = ABORT + 128;
const WRITTEN: usize = INBOX + size_of::<abi::mpk_inbox>().next_multiple_of(256);
const FRAMES: usize = (WRITTEN + CAPACITY / abi::MPK_FRAME_ALIGN as usize * 4).next_multiple_of(4096);
const BROUGHT: usize = FRAMES + CAPACITY;
const BYTES: usize = BROUGHT + CAPACITY;
/// Room that any frame fits into.
pub(super) const FRAME_BYTES: usize = abi::MPK_FRAME_BYTES as usize;

/// The ring. Any thread may write; one reads.
pub(super) struct Ring {
    ring: *mut abi::mpk_proxy,
    // The struct, then the bytes.
    _memory: HugeBuffer,
}

// SAFETY: the protocol orders all access to what the pointer leads to; the memory lives as long as the struct.
unsafe impl Send for Ring {}
// SAFETY: as above.
unsafe impl Sync for Ring {}

impl Ring {
    pub fn new(rank: u32) -> Result<Ring> {
        let memory = HugeBuffer::new(rank, "the proxy's ring", BYTES)?;
        let ring = memory.as_ptr().cast::<abi::mpk_proxy>();
        // SAFETY: all places lie in the memory, which is zeroed; nobody else knows it yet.
        unsafe {
            let at = |offset| memory.as_ptr().add(offset);
            let inbox = at(INBOX).cast::<abi::mpk_inbox>();
            (*inbox).capacity = CAPACITY as u64;
            (*inbox).bytes = at(BROUGHT);
            *ring = abi::mpk_proxy {
                capacity: CAPACITY as u64,
                head: at(HEAD).cast(),
                written: at(WRITTEN).cast(),
                bytes: at(FRAMES),
                abort: at(ABORT).cast(),
                inbox,
                ..Default::default()
            };
        }
        Ok(Ring { ring, _memory: memory })
    }

    /// For the loops.
    pub fn as_ptr(&self) -> *mut abi::mpk_proxy {
        self.ring
    }

    /// The rank that the next frame goes to.
    pub fn next(&self) -> Option<u32> {
        // SAFETY: a live ring.
        let to = unsafe { abi::mpk_proxy_next(self.ring) };
        (to != u32::MAX).then_some(to)
    }

    /// Takes the next frames for that rank out: as many as follow each other. By one thread only.
    pub fn take(&self, frames: &mut Vec<u8>) {
        let begin = frames.len();
        frames.resize(begin + FRAME_BYTES, 0);
        // SAFETY: a live ring, and so much room.
        let taken =
            unsafe { abi::mpk_proxy_take(self.ring, frames.as_mut_ptr().add(begin), FRAME_BYTES as u64) };
        frames.truncate(begin + taken as usize);
    }
}

/// This rank's symmetric heap, while its kernel runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heap {
    pub base: *mut u8,
    pub bytes: u64,
}

// SAFETY: what the pointer leads to is only accessed as the protocol orders it; who attaches it detaches it before it ends.
unsafe impl Send for Heap {}

impl Heap {
    /// Does what frames say. False if they are none.
    pub fn apply(&self, frames: &[u8]) -> bool {
        // SAFETY: a live heap of so many bytes; each frame is checked against it.
        let code =
            unsafe { abi::mpk_proxy_apply(self.base, self.bytes, frames.as_ptr(), frames.len() as u64) };
        code == abi::MPK_OK as i32
    }

    /// The abort word with its origin; 0: there is no abort.
    pub fn abort(&self) -> u64 {
        // SAFETY: the control block is the heap's beginning, and its first word is accessed atomically only.
        let word = unsafe { AtomicU64::from_ptr(self.base.cast()) }.load(Ordering::Relaxed);
        if word as u32 == abi::MPK_OK { 0 } else { word }
    }
}

/// The frame that brings an abort word to a rank.
pub(super) fn abort_frame(to: u32, word: u64) -> Vec<u8> {
    let frame = abi::mpk_frame {
        bytes: (size_of::<abi::mpk_frame>() + 16) as u32,
        kind: abi::MPK_FRAME_WORDS,
        to,
        rows: 1,
        ..Default::default()
    };
    // SAFETY: a plain struct without padding.
    let head =
        unsafe { std::slice::from_raw_parts((&raw const frame).cast::<u8>(), size_of::<abi::mpk_frame>()) };
    [head, &word.to_ne_bytes(), &[0; 8]].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_abort_arrives_and_the_first_one_stays() {
        let memory = HugeBuffer::new(0, "a heap", 4096).expect("memory");
        let heap = Heap { base: memory.as_ptr(), bytes: 4096 };
        assert_eq!(heap.abort(), 0);
        let (first, second) = (0x3_0000_0002, 0x1_0000_0003);
        assert!(heap.apply(&abort_frame(0, first)));
        assert!(heap.apply(&abort_frame(0, second)));
        assert_eq!(heap.abort(), first);
        assert!(!heap.apply(&abort_frame(0, first)[..40]));
    }

    #[test]
    fn an_empty_ring_gives_nothing() {
        let ring = Ring::new(0).expect("memory");
        assert_eq!(ring.next(), None);
        let mut frames = vec![1, 2];
        ring.take(&mut frames);
        assert_eq!(frames, [1, 2]);
    }
}
