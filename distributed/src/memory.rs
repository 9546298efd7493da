//! Host memory of the CPU target: anonymous mappings on huge pages, and values that do not move.

use crate::error::{Error, Result};
use std::ptr::NonNull;

const HUGE_PAGE: usize = 2 << 20;

/// Zeroed anonymous memory, on transparent huge pages if the system provides them.
///
/// Weights are read once per token, so the page size decides the bandwidth: 4 KB pages can halve it.
#[derive(Debug)]
pub struct HugeBuffer {
    base: NonNull<u8>,
    mapped: usize,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the buffer owns its mapping. It is accessed through references, or through raw pointers whose users order the accesses.
unsafe impl Send for HugeBuffer {}
// SAFETY: as above; `&HugeBuffer` only returns the address.
unsafe impl Sync for HugeBuffer {}

/// The kind of pages for a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Huge pages: for memory that is read over and over.
    Huge,
    /// Ordinary pages: for memory that is touched bit by bit while the kernel runs, such as a key-value cache. The first touch of
    /// a huge page zeroes 2 MB, and the system may have to move other pages for that. That would cost milliseconds in the middle
    /// of a step.
    Small,
}

impl HugeBuffer {
    /// `len` zeroed bytes for `what` on huge pages, aligned to a huge page (to an ordinary page if `len` is small).
    pub fn new(rank: u32, what: &str, len: usize) -> Result<Self> {
        Self::on(Pages::Huge, rank, what, len)
    }

    /// `len` zeroed bytes for `what`.
    pub fn on(pages: Pages, rank: u32, what: &str, len: usize) -> Result<Self> {
        let align = if len >= HUGE_PAGE { HUGE_PAGE } else { 4096 };
        let failed =
            |reason: String| Error::OutOfMemory { rank, what: what.into(), bytes: len as u64, reason };
        let mapped = len
            .max(1)
            .checked_add(align)
            .ok_or_else(|| failed("the size overflows".into()))?
            .next_multiple_of(4096);
        // SAFETY: a fresh anonymous mapping; no existing memory is touched.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(failed(std::io::Error::last_os_error().to_string()));
        }
        let base = NonNull::new(base.cast::<u8>()).ok_or_else(|| failed("mmap gave address 0".into()))?;
        let skip = base.as_ptr().align_offset(align);
        // SAFETY: `skip < align`, and the mapping is `align` bytes longer than needed.
        let start = unsafe { base.add(skip) };
        if len >= HUGE_PAGE {
            let advice = match pages {
                Pages::Huge => libc::MADV_HUGEPAGE,
                // Some systems use huge pages without being asked.
                Pages::Small => libc::MADV_NOHUGEPAGE,
            };
            // SAFETY: the range is inside the mapping. This is only advice: a refusal costs nothing but speed.
            unsafe { libc::madvise(start.as_ptr().cast(), len, advice) };
        }
        Ok(HugeBuffer { base, mapped, start, len })
    }

    /// First byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if the buffer has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes, for filling them before any worker starts.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the mapping holds `len` initialised (zeroed) bytes, and `&mut self` excludes other users in Rust.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// The bytes, once no worker writes them any more.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: as above, shared.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for HugeBuffer {
    fn drop(&mut self) {
        // SAFETY: unmaps exactly what `new` mapped, once.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.mapped) };
    }
}

/// A value on the heap that C++ points to while Rust reads it too. It never moves, and Rust never creates an exclusive reference
/// to it.
#[derive(Debug)]
pub struct Pinned<T>(NonNull<T>);

// SAFETY: owns its value like a `Box`. Users that share the raw pointer order their accesses.
unsafe impl<T: Send> Send for Pinned<T> {}

impl<T> Pinned<T> {
    /// Moves `value` to the heap.
    pub fn new(value: T) -> Self {
        Pinned(NonNull::from(Box::leak(Box::new(value))))
    }

    /// The address of the value, valid as long as `self` lives.
    pub fn as_ptr(&self) -> *mut T {
        self.0.as_ptr()
    }
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        // SAFETY: created from a box in `new`, and dropped once.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// A bump allocator for offsets within one allocation.
#[derive(Debug, Default, Clone, Copy)]
pub struct Layout {
    end: u64,
}

impl Layout {
    /// Reserves `bytes` aligned to `align` (a power of two). Returns the offset.
    pub fn reserve(&mut self, bytes: u64, align: u64) -> u64 {
        let offset = self.end.next_multiple_of(align);
        self.end = offset + bytes;
        offset
    }

    /// Bytes reserved so far.
    pub fn bytes(&self) -> u64 {
        self.end
    }
}
