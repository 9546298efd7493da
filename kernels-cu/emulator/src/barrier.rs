//! A block: its shared memory, its barriers, and the bulk copies in flight to it.

use crate::memory::{Bytes, Global};
use crate::program::SHARED_WINDOW;
use std::collections::HashSet;

/// Contents of shared memory before it is written: NaN in every float type.
const POISON: u64 = u64::MAX;

/// A named barrier (`bar.sync`).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Named {
    /// Threads that have arrived, of `expected` (0: none has arrived).
    pub arrived: u32,
    pub expected: u32,
    /// Number of times that it has completed.
    pub phase: u64,
    any: bool,
    all: bool,
    /// For the last two phases: whether the predicate held for any thread, and for all.
    results: [(bool, bool); 2],
}

/// A bulk copy in flight.
#[derive(Debug)]
pub(crate) struct BulkCopy {
    /// When it completes, in the emulator's time.
    pub due: u64,
    pub to: u64,
    pub from: u64,
    pub bytes: u64,
    pub barrier: u64,
}

/// A copy of at most 16 bytes that a lane has started.
#[derive(Debug)]
pub(crate) struct LaneCopy {
    pub lane: usize,
    pub group: u32,
    pub to: u64,
    pub from: u64,
    pub bytes: u64,
    /// Number of these bytes that are read; the others become 0.
    pub read: u64,
}

/// Copies of a lane in flight that will arrive at a barrier.
#[derive(Debug)]
pub(crate) struct Arrival {
    /// When they complete, in the emulator's time.
    pub due: u64,
    pub warp: u32,
    pub copies: Vec<LaneCopy>,
    pub barrier: u64,
}

#[derive(Debug)]
pub(crate) struct Block {
    pub index: u32,
    pub threads: u32,
    pub shared: Bytes,
    pub named: [Named; 16],
    /// Addresses of the initialised mbarriers.
    pub mbarriers: HashSet<u64>,
    pub copies: Vec<BulkCopy>,
    pub arrivals: Vec<Arrival>,
}

impl Block {
    pub(crate) fn new(index: u32, threads: u32, shared_bytes: u64) -> Self {
        Block {
            index,
            threads,
            shared: Bytes::new(shared_bytes, POISON),
            named: [Named::default(); 16],
            mbarriers: HashSet::new(),
            copies: Vec::new(),
            arrivals: Vec::new(),
        }
    }

    /// `count` threads of a warp arrive at a named barrier of `expected` threads; `any` and `all` reduce their
    /// predicates.
    pub(crate) fn arrive(
        &mut self,
        barrier: u32,
        expected: u32,
        count: u32,
        any: bool,
        all: bool,
    ) -> Result<(), String> {
        let named =
            self.named.get_mut(barrier as usize).ok_or_else(|| format!("there is no barrier {barrier}"))?;
        if expected == 0 || !expected.is_multiple_of(32) || expected > self.threads {
            return Err(format!("barrier {barrier} of {expected} threads in a block of {}", self.threads));
        }
        if named.arrived == 0 {
            (named.expected, named.any, named.all) = (expected, false, true);
        } else if named.expected != expected {
            return Err(format!(
                "barrier {barrier} of {expected} threads, others wait for {}",
                named.expected
            ));
        }
        named.arrived += count;
        named.any |= any;
        named.all &= all;
        if named.arrived > expected {
            return Err(format!("{} threads at barrier {barrier} of {expected}", named.arrived));
        }
        if named.arrived == expected {
            named.results[(named.phase % 2) as usize] = (named.any, named.all);
            named.phase += 1;
            named.arrived = 0;
        }
        Ok(())
    }

    /// Whether the predicate held for any thread, and for all, in the completed `phase`.
    pub(crate) fn result(&self, barrier: usize, phase: u64) -> (bool, bool) {
        self.named[barrier].results[(phase % 2) as usize]
    }

    /// The word of an mbarrier.
    fn word(&mut self, address: u64, fresh: bool) -> Result<*mut u64, String> {
        if !address.is_multiple_of(8) {
            return Err(format!("an mbarrier at {address:#x}, which is not a multiple of 8"));
        }
        if !fresh && !self.mbarriers.contains(&address) {
            return Err(format!("the mbarrier at {address:#x} of shared memory is not initialised"));
        }
        let at = self
            .shared
            .at(address, 8)
            .ok_or_else(|| format!("an mbarrier at {address:#x}, outside shared memory"))?;
        Ok(at.cast())
    }

    pub(crate) fn mbarrier_init(&mut self, address: u64, count: u32) -> Result<(), String> {
        if count == 0 || count >= 1 << 20 {
            return Err(format!("an mbarrier of {count} arrivals"));
        }
        let word = self.word(address, true)?;
        self.mbarriers.insert(address);
        let state = State { phase: 0, expected: count, pending: count, bytes: 0 };
        // SAFETY: `word` checked that these 8 bytes are inside the block's shared memory.
        unsafe { word.write(state.pack()) };
        Ok(())
    }

    /// Changes the state of an mbarrier, and starts its next phase if this one is complete. Returns the state
    /// before.
    pub(crate) fn mbarrier_change(
        &mut self,
        address: u64,
        change: impl FnOnce(&mut State) -> Result<(), String>,
    ) -> Result<u64, String> {
        let word = self.word(address, false)?;
        // SAFETY: as above.
        let before = unsafe { word.read() };
        let mut state = State::unpack(before);
        change(&mut state)
            .map_err(|problem| format!("mbarrier at {address:#x} of shared memory: {problem}"))?;
        if state.pending == 0 && state.bytes == 0 {
            state = State { phase: state.phase ^ 1, pending: state.expected, ..state };
        }
        // SAFETY: as above.
        unsafe { word.write(state.pack()) };
        Ok(before)
    }

    /// True once the phase of this parity has completed.
    pub(crate) fn mbarrier_test(&mut self, address: u64, parity: u32) -> Result<bool, String> {
        if parity > 1 {
            return Err(format!("parity {parity}"));
        }
        let word = self.word(address, false)?;
        // SAFETY: as above.
        Ok(State::unpack(unsafe { word.read() }).phase != parity)
    }

    /// Performs the copies that are due.
    pub(crate) fn copy(&mut self, now: u64, global: &mut Global) -> Result<(), String> {
        let mut at = 0;
        while at < self.copies.len() {
            if self.copies[at].due > now {
                at += 1;
                continue;
            }
            let copy = self.copies.swap_remove(at);
            let text =
                |problem: String| format!("bulk copy of {} bytes to {:#x}: {problem}", copy.bytes, copy.to);
            let from = global.at(copy.from, copy.bytes).map_err(text)?;
            let to = self
                .shared
                .at(copy.to, copy.bytes)
                .ok_or_else(|| text("outside shared memory".to_string()))?;
            // SAFETY: both ranges are checked, and no host allocation overlaps a block's shared memory.
            unsafe { std::ptr::copy_nonoverlapping(from, to, copy.bytes as usize) };
            self.mbarrier_change(copy.barrier, |state| {
                state.bytes -= copy.bytes as i64;
                Ok(())
            })?;
        }
        let (done, left): (Vec<Arrival>, _) =
            std::mem::take(&mut self.arrivals).into_iter().partition(|a| a.due <= now);
        self.arrivals = left;
        for arrival in done {
            arrival.copies.iter().try_for_each(|copy| self.copy_of_lane(copy, global))?;
            self.mbarrier_change(arrival.barrier, |state| state.arrive(1))?;
        }
        Ok(())
    }

    /// Completes a lane's copy.
    pub(crate) fn copy_of_lane(&mut self, copy: &LaneCopy, global: &mut Global) -> Result<(), String> {
        if copy.read > copy.bytes {
            return Err(format!("copy of {} bytes that reads {}", copy.bytes, copy.read));
        }
        let to = self.shared.at(copy.to & (SHARED_WINDOW - 1), copy.bytes).ok_or_else(|| {
            format!("copy of {} bytes to {:#x}: outside shared memory", copy.bytes, copy.to)
        })?;
        // SAFETY: checked.
        unsafe { std::ptr::write_bytes(to, 0, copy.bytes as usize) };
        if copy.read > 0 {
            let from = global.at(copy.from, copy.read)?;
            // SAFETY: both are checked; no host allocation overlaps a block's shared memory.
            unsafe { std::ptr::copy_nonoverlapping(from, to, copy.read as usize) };
        }
        Ok(())
    }
}

/// The state of an mbarrier, in a format of the emulator's own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct State {
    pub phase: u32,
    pub expected: u32,
    pub pending: u32,
    /// Bytes that bulk copies still have to bring; negative if the copies were faster than the thread that
    /// expects them.
    pub bytes: i64,
}

impl State {
    /// 1 bit of phase, 20 bits for each of the two counts, 23 bits of bytes.
    fn pack(self) -> u64 {
        u64::from(self.phase)
            | u64::from(self.expected) << 1
            | u64::from(self.pending) << 21
            | ((self.bytes as u64) & 0x7F_FFFF) << 41
    }

    fn unpack(word: u64) -> Self {
        State {
            phase: (word & 1) as u32,
            expected: (word >> 1 & 0xF_FFFF) as u32,
            pending: (word >> 21 & 0xF_FFFF) as u32,
            bytes: (word as i64) >> 41,
        }
    }

    pub(crate) fn arrive(&mut self, count: u32) -> Result<(), String> {
        self.pending = self
            .pending
            .checked_sub(count)
            .ok_or_else(|| format!("more arrivals than the {} of a phase", self.expected))?;
        Ok(())
    }

    pub(crate) fn expect(&mut self, bytes: u32) -> Result<(), String> {
        self.bytes += i64::from(bytes);
        if self.bytes >= 1 << 20 { Err(format!("{} bytes expected", self.bytes)) } else { Ok(()) }
    }
}
