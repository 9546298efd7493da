//! Memory as the kernel sees it: allocations on device and host, a block's shared memory, a thread's local memory.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

/// The memory that the kernel may access: start and end of each allocation.
#[derive(Debug, Default)]
pub struct Allocations {
    ranges: RwLock<BTreeMap<u64, u64>>,
}

impl Allocations {
    /// Adds `bytes` bytes at `address`, which must stay valid until they are removed.
    pub fn insert(&self, address: u64, bytes: u64) {
        self.ranges.write().unwrap_or_else(PoisonError::into_inner).insert(address, address + bytes);
    }

    /// Removes the allocation that starts at `address`, and returns its bytes.
    pub fn remove(&self, address: u64) -> Option<u64> {
        let end = self.ranges.write().unwrap_or_else(PoisonError::into_inner).remove(&address)?;
        Some(end - address)
    }

    /// The allocation that contains all of these bytes.
    pub fn holding(&self, address: u64, bytes: u64) -> Option<(u64, u64)> {
        let ranges = self.ranges.read().unwrap_or_else(PoisonError::into_inner);
        let (&begin, &end) = ranges.range(..=address).next_back()?;
        (address.checked_add(bytes)? <= end).then_some((begin, end))
    }

    /// Total bytes of all allocations.
    pub fn total(&self) -> u64 {
        let ranges = self.ranges.read().unwrap_or_else(PoisonError::into_inner);
        ranges.iter().map(|(begin, end)| end - begin).sum()
    }
}

/// Global memory, with a cache of the allocations that were accessed last.
#[derive(Debug)]
pub(crate) struct Global {
    allocations: Arc<Allocations>,
    recent: [(u64, u64); 4],
    next: usize,
}

impl Global {
    pub(crate) fn new(allocations: Arc<Allocations>) -> Self {
        Global { allocations, recent: [(0, 0); 4], next: 0 }
    }

    /// Clears that cache, because the allocations may have been freed.
    pub(crate) fn forget(&mut self) {
        self.recent = [(0, 0); 4];
    }

    /// Checks an access.
    #[inline(always)]
    pub(crate) fn at(&mut self, address: u64, bytes: u64) -> Result<*mut u8, String> {
        let end = address.wrapping_add(bytes);
        for (begin, limit) in self.recent {
            if address >= begin && end <= limit && end > address {
                return Ok(address as *mut u8);
            }
        }
        self.search(address, bytes)
    }

    #[cold]
    #[inline(never)]
    fn search(&mut self, address: u64, bytes: u64) -> Result<*mut u8, String> {
        let found = self.allocations.holding(address, bytes);
        let range = found.ok_or_else(|| format!("{bytes} bytes at {address:#x} are in no allocation"))?;
        self.recent[self.next % 4] = range;
        self.next += 1;
        Ok(address as *mut u8)
    }
}

/// Bytes of a block or a warp; as their addresses, they are aligned to `ALIGNMENT`.
#[derive(Debug)]
pub(crate) struct Bytes {
    words: Vec<u64>,
    /// Bytes before the first aligned one.
    skip: usize,
    len: u64,
}

const ALIGNMENT: usize = 16;

impl Bytes {
    pub(crate) fn new(len: u64, word: u64) -> Self {
        let words = vec![word; (len as usize).div_ceil(8) + ALIGNMENT / 8];
        let skip = words.as_ptr().cast::<u8>().align_offset(ALIGNMENT);
        Bytes { words, skip, len }
    }

    #[inline(always)]
    pub(crate) fn at(&mut self, offset: u64, bytes: u64) -> Option<*mut u8> {
        if offset > self.len || bytes > self.len - offset {
            return None;
        }
        // SAFETY: inside the words, which have ALIGNMENT bytes more than `len`.
        Some(unsafe { self.words.as_mut_ptr().cast::<u8>().add(self.skip + offset as usize) })
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }
}
