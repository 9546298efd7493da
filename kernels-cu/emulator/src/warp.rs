//! A warp: each lane has a place of its own; lanes at the same place execute together.

use crate::barrier::Block;
use crate::decode::Program;
use crate::execute::{self, Next};
use crate::instruction::NONE;
use crate::launch::System;
use crate::memory::Bytes;
use crate::registers::{LANES, Registers};
use crate::tensor::Wide;

/// A copy of 16 bytes or less that a lane has begun.
#[derive(Debug)]
pub(crate) struct LaneCopy {
    pub lane: usize,
    pub group: u32,
    pub to: u64,
    pub from: u64,
    pub bytes: u64,
    /// Of those, how many are read; the others become 0.
    pub read: u64,
}

#[derive(Debug)]
pub(crate) struct Warp {
    /// Number in its block.
    pub number: u32,
    pub registers: Registers,
    /// Local memory of the lanes, one after the other.
    pub local: Bytes,
    pub pc: [u32; LANES],
    /// Where each lane's calls return to.
    pub stack: [Vec<u32>; LANES],
    /// Lanes that have ended, or that the block does not have.
    pub exited: u32,
    /// Lanes that wait for others of the warp, and the lanes that each waits for.
    pub together: u32,
    pub wanted: [u32; LANES],
    /// Lanes that wait at a named barrier; its number and phase.
    pub at_barrier: u32,
    pub barrier: [(u8, u64); LANES],
    /// Lanes that have had a turn while others had none.
    passed: u32,
    /// When it goes on, in the emulator's time.
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

    /// Puts its first `lanes` lanes at `start`. Registers keep what they held: a kernel writes before it reads.
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

    /// Lanes that can go on.
    pub(crate) fn ready(&self) -> u32 {
        !(self.exited | self.together | self.at_barrier)
    }

    /// The lanes of `group` go on at `pc`.
    #[inline(always)]
    pub(crate) fn go(&mut self, group: u32, pc: u32) {
        for lane in lanes(group) {
            self.pc[lane] = pc;
        }
    }

    /// The group whose turn it is: its place, its lanes, and the next place after it where others are.
    fn group(&mut self, ready: u32) -> (u32, u32, u32) {
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

/// Executes up to about `quantum` instructions of a warp; gives how many.
pub(crate) fn run(context: &mut Context<'_>, quantum: u32) -> Result<u32, String> {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: the processor has these features.
        return unsafe { run_with_vectors(context, quantum) };
    }
    steps(context, quantum)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn run_with_vectors(context: &mut Context<'_>, quantum: u32) -> Result<u32, String> {
    steps(context, quantum)
}

#[inline(always)]
fn steps(context: &mut Context<'_>, quantum: u32) -> Result<u32, String> {
    let mut executed = 0;
    loop {
        let ready = context.warp.ready();
        if ready == 0 {
            return Ok(executed);
        }
        let (mut pc, group, next) = context.warp.group(ready);
        loop {
            if executed >= quantum {
                context.warp.go(group, pc);
                if group != ready {
                    context.warp.passed |= group;
                }
                return Ok(executed);
            }
            let instruction = &context.program.instructions[pc as usize];
            let mask = match instruction.guard {
                NONE => group,
                guard => {
                    let bits = context.warp.registers.predicate(guard);
                    group & if instruction.guard_not { !bits } else { bits }
                }
            };
            executed += 1;
            if mask == 0 {
                pc += 1;
            } else {
                match execute::execute(context, instruction, pc, mask, group) {
                    Ok(Next::Step) => pc += 1,
                    // Waits for what others do: the turn goes on sooner.
                    Ok(Next::Poll) => {
                        pc += 1;
                        executed += 8;
                    }
                    Ok(Next::Jump(to)) => pc = to,
                    Ok(Next::Split) => break,
                    Ok(Next::Yield) => {
                        context.warp.go(group, pc + 1);
                        if group != ready {
                            context.warp.passed |= group;
                        }
                        return Ok(executed);
                    }
                    Err(problem) => {
                        let place = context.program.place(pc);
                        let (block, warp) = (context.block.index, context.warp.number);
                        return Err(format!(
                            "{problem}; {place}, block {block}, warp {warp}, lanes {mask:#x}"
                        ));
                    }
                }
            }
            if pc >= next {
                context.warp.go(group, pc);
                break;
            }
        }
    }
}

/// Lanes whose barrier has completed go on.
pub(crate) fn pass_barriers(warp: &mut Warp, block: &Block, program: &Program) {
    let done: u32 = lanes(warp.at_barrier)
        .filter(|&lane| block.named[usize::from(warp.barrier[lane].0)].phase > warp.barrier[lane].1)
        .fold(0, |done, lane| done | 1 << lane);
    for lane in lanes(done) {
        let (barrier, phase) = warp.barrier[lane];
        execute::after_barrier(warp, block, program, lane, (barrier, phase));
    }
    warp.at_barrier &= !done;
}
