//! What instructions work on: a warp with its registers, its block, and what all blocks share.

use crate::barrier::{Block, LaneCopy};
use crate::instruction::{Instruction, NONE, Space};
use crate::memory::{Bytes, Global};
use crate::program::{LOCAL_WINDOW, Program, SHARED_WINDOW};
use crate::registers::{LANES, Registers};
use std::time::{SystemTime, UNIX_EPOCH};

/// What all blocks share.
#[derive(Debug)]
pub(crate) struct System {
    pub global: Global,
    /// The kernel's clock in ns. It advances with instructions, and jumps when all warps sleep.
    pub clock: u64,
    /// `%globaltimer` is the clock plus this.
    epoch: u64,
    random: u64,
}

impl System {
    pub(crate) fn new(global: Global, seed: u64) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        System { global, clock: 0, epoch: now.as_nanos() as u64, random }
    }

    pub(crate) fn random(&mut self) -> u32 {
        // Xorshift64*.
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        (self.random.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as u32
    }

    /// The time that the kernel reads: ns since 1970, or cycles.
    pub(crate) fn time(&self, global: bool) -> u64 {
        if global { self.epoch + self.clock } else { self.clock }
    }
}

#[derive(Debug)]
pub(crate) struct Warp {
    /// Index in its block.
    pub number: u32,
    pub registers: Registers,
    /// Local memory of the lanes, one after the other.
    pub local: Bytes,
    pub pc: [u32; LANES],
    /// Return addresses of each lane's calls.
    pub stack: [Vec<u32>; LANES],
    /// Lanes that have ended, or that the block does not have.
    pub exited: u32,
    /// Lanes that wait for others of the warp, and which lanes each one waits for.
    pub together: u32,
    pub wanted: [u32; LANES],
    /// Lanes that wait at a named barrier; the barrier's number and phase.
    pub at_barrier: u32,
    pub barrier: [(u8, u64); LANES],
    /// Lanes that have had a turn while other ready lanes have not.
    pub passed: u32,
    /// When it continues, in the emulator's time.
    pub wake: u64,
    pub copies: Vec<LaneCopy>,
    pub copy_groups: [u32; LANES],
    pub wide: Wide,
}

/// What instructions work on.
pub(crate) struct Context<'l> {
    pub program: &'l Program,
    pub warp: &'l mut Warp,
    pub block: &'l mut Block,
    pub system: &'l mut System,
}

impl Context<'_> {
    /// Checks an access and returns a pointer to it.
    #[inline(always)]
    pub(crate) fn pointer(
        &mut self,
        space: Space,
        address: u64,
        bytes: u64,
        lane: usize,
    ) -> Result<*mut u8, String> {
        if address & (bytes - 1) != 0 && bytes.is_power_of_two() {
            return Err(format!("{bytes} bytes at {address:#x}: not aligned"));
        }
        let (space, address) = match space {
            Space::Generic => match address >> 56 {
                1 => (Space::Shared, address - SHARED_WINDOW),
                2 => (Space::Local, address - LOCAL_WINDOW),
                _ => (Space::Global, address),
            },
            // Addresses of shared memory may also have 32 bits.
            space => (space, address),
        };
        match space {
            Space::Shared => {
                let len = self.block.shared.len();
                self.block.shared.at(address, bytes).ok_or_else(|| {
                    format!("{bytes} bytes at {address:#x} of shared memory, which has {len:#x}, lane {lane}")
                })
            }
            Space::Local => {
                let stride = self.warp.local.len() / LANES as u64;
                if address > stride || bytes > stride - address {
                    return Err(format!("{bytes} bytes at {address:#x} of local memory, lane {lane}"));
                }
                self.warp
                    .local
                    .at(stride * lane as u64 + address, bytes)
                    .ok_or_else(|| "local memory".to_string())
            }
            _ => self.system.global.at(address, bytes).map_err(|problem| format!("{problem}, lane {lane}")),
        }
    }
}

/// The lanes of a mask.
#[inline(always)]
pub(crate) fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    (0..LANES).filter(move |lane| mask >> lane & 1 != 0)
}

impl Warp {
    pub(crate) fn new(program: &Program, number: u32) -> Self {
        Warp {
            number,
            registers: Registers::new(program.register_bytes, program.constants.clone()),
            local: Bytes::new(program.local_bytes.next_multiple_of(16) * LANES as u64, 0),
            pc: [0; LANES],
            stack: std::array::from_fn(|_| Vec::new()),
            exited: u32::MAX,
            together: 0,
            wanted: [0; LANES],
            at_barrier: 0,
            barrier: [(0, 0); LANES],
            passed: 0,
            wake: 0,
            copies: Vec::new(),
            copy_groups: [0; LANES],
            wide: Wide::default(),
        }
    }

    /// Puts its first `lanes` lanes at `start`. Registers keep their values: a kernel writes before it reads.
    pub(crate) fn begin(&mut self, lanes: u32, start: u32) {
        self.pc = [start; LANES];
        self.exited = if lanes >= 32 { 0 } else { u32::MAX << lanes };
        (self.together, self.at_barrier, self.passed, self.wake) = (0, 0, 0, 0);
        self.copies.clear();
        self.copy_groups = [0; LANES];
        self.wide = Wide::default();
    }

    pub(crate) fn ended(&self) -> bool {
        self.exited == u32::MAX
    }

    /// Lanes that can continue.
    pub(crate) fn ready(&self) -> u32 {
        !(self.exited | self.together | self.at_barrier)
    }

    /// Moves the lanes of `group` to `pc`.
    #[inline(always)]
    pub(crate) fn go(&mut self, group: u32, pc: u32) {
        for lane in lanes(group) {
            self.pc[lane] = pc;
        }
    }

    /// The group whose turn it is: its place, its lanes, and the nearest later place that has other lanes.
    pub(crate) fn group(&mut self, ready: u32) -> (u32, u32, u32) {
        if ready & !self.passed == 0 {
            self.passed = 0;
        }
        let pc = lanes(ready & !self.passed).map(|l| self.pc[l]).min().unwrap_or(NONE);
        let (mut group, mut next) = (0, NONE);
        for lane in lanes(ready) {
            if self.pc[lane] == pc {
                group |= 1 << lane;
            } else if self.pc[lane] > pc {
                next = next.min(self.pc[lane]);
            }
        }
        (pc, group, next)
    }
}

/// A warp's part of its warpgroup's products. Each warp has its own rows of A and of the sums, so warps need not wait for
/// each other.
#[derive(Debug, Default)]
pub(crate) struct Wide {
    pub begun: Vec<Begun>,
    /// Sums that products in flight write; their registers cannot be read until the products are done.
    pub sums: Vec<Sums>,
    pub groups: u64,
}

#[derive(Debug)]
pub(crate) struct Begun {
    pub instruction: Instruction,
    pub group: u64,
    /// Index in `Wide::sums`, by first register.
    pub sums: u32,
    pub descriptor: [u64; 2],
    pub add: bool,
    pub done: bool,
}

#[derive(Debug)]
pub(crate) struct Sums {
    pub first: u32,
    pub registers: Vec<u32>,
    pub values: Vec<[u32; LANES]>,
}
