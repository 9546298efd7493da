//! The rings of a rank's proxy. The loops of the rank fill one with frames (`kernels-cu/protocol/frames.h`). For a GPU there is also an
//! inbox, from which its kernel takes the frames of others. This module also has the destination of incoming frames: a
//! heap of this process, or a GPU's.

use crate::error::Result;
use crate::memory::HugeBuffer;
use kernels_cu::abi;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a ring.
const CAPACITY: usize = 4 << 20;
/// Offsets of the parts in the memory. Data written by different threads is in separate cache lines.
const HEAD: usize = size_of::<abi::mpk_proxy>().next_multiple_of(256);
const ABORT: usize = HEAD + 128;
const INBOX: usize = ABORT + 128;
const WRITTEN: usize = INBOX + size_of::<abi::mpk_inbox>().next_multiple_of(256);
const FRAMES: usize = (WRITTEN + CAPACITY / abi::MPK_FRAME_ALIGN as usize * 4).next_multiple_of(4096);
const BROUGHT: usize = FRAMES + CAPACITY;
const BYTES: usize = BROUGHT + CAPACITY;
/// Enough room for any frame.
pub(super) const FRAME_BYTES: usize = abi::MPK_FRAME_BYTES as usize;

// The function that tasks use for puts (kernels-cu/src/cpu/push.h), for measurements and tests.
unsafe extern "C" {
    pub(crate) fn mpk_put_with_signal(
        rank: *const abi::mpk_rank,
        pe: u32,
        to: *mut c_void,
        from: *const c_void,
        bytes: u64,
        signal: *mut u64,
        value: u64,
    ) -> bool;
}

/// The ring. Any thread may write; one reads.
pub(super) struct Ring {
    ring: *mut abi::mpk_proxy,
    // The struct, then the bytes.
    memory: HugeBuffer,
}

// SAFETY: the protocol orders all access through the pointer; the memory lives as long as the struct.
unsafe impl Send for Ring {}
// SAFETY: as above.
unsafe impl Sync for Ring {}

impl Ring {
    pub fn new(rank: u32) -> Result<Ring> {
        let memory = HugeBuffer::new(rank, "the proxy's ring", BYTES)?;
        let ring = memory.as_ptr().cast::<abi::mpk_proxy>();
        // SAFETY: all places are in the memory, which is zeroed; nobody else knows it yet.
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
        Ok(Ring { ring, memory })
    }

    /// From now on, waiting workers call `help` with `helper`, to take turns of the proxy.
    ///
    /// # Safety
    /// No loop uses the ring yet. Such calls are allowed as long as loops use the ring.
    pub unsafe fn set_helper(&self, help: unsafe extern "C" fn(*mut c_void) -> i32, helper: *mut c_void) {
        // SAFETY: a live ring that nobody reads at this time.
        unsafe {
            (*self.ring).help = Some(help);
            (*self.ring).helper = helper;
        }
    }

    /// All of its memory, which a GPU must be able to access.
    pub fn memory(&self) -> (*mut u8, usize) {
        (self.memory.as_ptr(), BYTES)
    }

    /// The ring for the loops.
    pub fn as_ptr(&self) -> *mut abi::mpk_proxy {
        self.ring
    }

    /// For a GPU whose kernel aborts through the word `host_abort`: the description of the ring, and the destination of frames for the
    /// GPU. Clears the abort words of an earlier launch.
    pub fn for_device(&self, heap_bytes: u64, host_abort: *mut u64) -> (abi::mpk_proxy, Target) {
        // SAFETY: a live ring and inbox, which no kernel reads at this time.
        let ring = unsafe {
            (*(*self.ring).inbox).abort = host_abort;
            AtomicU64::from_ptr((*self.ring).abort).store(0, Ordering::Relaxed);
            // A GPU cannot call it.
            abi::mpk_proxy { help: None, helper: std::ptr::null_mut(), ..*self.ring }
        };
        (ring, Target::Device { bytes: heap_bytes, inbox: ring.inbox, abort: ring.abort })
    }

    /// After the kernel's end: the next frame that it has not read.
    pub fn brought(&self) -> Option<Vec<u8>> {
        let mut frame = vec![0; FRAME_BYTES];
        // SAFETY: a live inbox that nobody else reads, and enough room.
        let bytes = unsafe { abi::mpk_inbox_take((*self.ring).inbox, frame.as_mut_ptr()) };
        frame.truncate(bytes as usize);
        (bytes != 0).then_some(frame)
    }

    /// The rank that the next frame goes to.
    pub fn next(&self) -> Option<u32> {
        // SAFETY: a live ring.
        let to = unsafe { abi::mpk_proxy_next(self.ring) };
        (to != u32::MAX).then_some(to)
    }

    /// Removes the next frames for that rank: consecutive ones, at most `room` bytes. Called by one thread only.
    pub fn take(&self, frames: &mut Vec<u8>, room: usize) {
        let begin = frames.len();
        frames.reserve(room);
        // SAFETY: a live ring; enough room was reserved, and the removed frames are written.
        unsafe {
            let taken = abi::mpk_proxy_take(self.ring, frames.as_mut_ptr().add(begin), room as u64);
            frames.set_len(begin + taken as usize);
        }
    }
}

/// This rank's symmetric heap, while its kernel runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heap {
    pub base: *mut u8,
    pub bytes: u64,
}

// SAFETY: memory behind the pointer is only accessed as the protocol orders it; the owner detaches it before it ends.
unsafe impl Send for Heap {}

/// The result of applying frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Applied {
    /// Applied, or on its way to the GPU.
    Yes,
    /// There is no room now.
    Later,
    /// These are no valid frames.
    No,
}

/// The destination of incoming frames while a kernel runs.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    /// A heap of this process.
    Host(Heap),
    /// A heap of `bytes` bytes in a GPU's memory, whose kernel reads the inbox and aborts through the other word.
    Device { bytes: u64, inbox: *mut abi::mpk_inbox, abort: *mut u64 },
}

// SAFETY: as for `Heap`; inbox and abort word are only accessed as the protocol orders it.
unsafe impl Send for Target {}

impl Target {
    /// Applies frames.
    pub fn apply(&self, frames: &[u8]) -> Applied {
        match self {
            Target::Host(heap) if heap.apply(frames) => Applied::Yes,
            Target::Host(_) => Applied::No,
            Target::Device { bytes, inbox, .. } => {
                // SAFETY: a live inbox with one writer, the proxy's thread; each frame is checked against the heap's size.
                match unsafe { abi::mpk_inbox_put(*inbox, *bytes, frames.as_ptr(), frames.len() as u64) } {
                    0 => Applied::Yes,
                    abi::MPK_INBOX_FULL => Applied::Later,
                    _ => Applied::No,
                }
            }
        }
    }

    /// The abort word with its origin; 0 if there is no abort.
    pub fn abort(&self) -> u64 {
        match self {
            Target::Host(heap) => heap.abort(),
            // SAFETY: live memory that is only accessed atomically.
            Target::Device { abort, .. } => unsafe { AtomicU64::from_ptr(*abort) }.load(Ordering::Relaxed),
        }
    }
}

impl Heap {
    /// Applies frames. Returns false if they are invalid.
    fn apply(&self, frames: &[u8]) -> bool {
        // SAFETY: a live heap of this size; each frame is checked against it.
        let code =
            unsafe { abi::mpk_proxy_apply(self.base, self.bytes, frames.as_ptr(), frames.len() as u64) };
        code == abi::MPK_OK as i32
    }

    /// The abort word with its origin; 0 if there is no abort.
    fn abort(&self) -> u64 {
        // SAFETY: the control block is the beginning of the heap, and its first word is only accessed atomically.
        let word = unsafe { AtomicU64::from_ptr(self.base.cast()) }.load(Ordering::Relaxed);
        if word as u32 == abi::MPK_OK { 0 } else { word }
    }
}

/// True if the last of these frames is data. Nobody reads it before its signal has arrived.
pub(super) fn end_with_data(frames: &[u8]) -> bool {
    let (mut rest, mut kind) = (frames, 0);
    while let Some(head) = rest.first_chunk::<{ size_of::<abi::mpk_frame>() }>() {
        // SAFETY: a plain struct of numbers with this size.
        let frame = unsafe { head.as_ptr().cast::<abi::mpk_frame>().read_unaligned() };
        kind = frame.kind;
        rest = rest.get(frame.bytes.max(1) as usize..).unwrap_or_default();
    }
    kind == abi::MPK_FRAME_ROWS
}

/// True if these frames begin with an abort word, as made by [`abort_frame`].
pub(super) fn is_abort(frames: &[u8]) -> bool {
    let Some(head) = frames.first_chunk::<{ size_of::<abi::mpk_frame>() }>() else { return false };
    // SAFETY: a plain struct of numbers with this size.
    let frame = unsafe { head.as_ptr().cast::<abi::mpk_frame>().read_unaligned() };
    frame.kind == abi::MPK_FRAME_WORDS && frame.offset == 0
}

/// The frame that sends an abort word to a rank.
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
    use std::mem::offset_of;

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
    fn data_waits_for_its_signal() {
        let frame = |kind: u32, bytes: u32| {
            let mut frame = vec![0u8; bytes as usize];
            frame[offset_of!(abi::mpk_frame, bytes)..][..4].copy_from_slice(&bytes.to_ne_bytes());
            frame[offset_of!(abi::mpk_frame, kind)..][..4].copy_from_slice(&kind.to_ne_bytes());
            frame
        };
        let (rows, add) = (frame(abi::MPK_FRAME_ROWS, 128), frame(abi::MPK_FRAME_ADD, 64));
        assert!(end_with_data(&rows));
        assert!(!end_with_data(&[rows.clone(), add.clone()].concat()));
        assert!(end_with_data(&[add, rows].concat()));
        assert!(!end_with_data(&[]));
    }

    #[test]
    fn an_empty_ring_gives_nothing() {
        let ring = Ring::new(0).expect("memory");
        assert_eq!(ring.next(), None);
        let mut frames = vec![1, 2];
        ring.take(&mut frames, FRAME_BYTES);
        assert_eq!(frames, [1, 2]);
    }
}
