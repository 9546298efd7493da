//! A launch: blocks and warps take turns on one CPU thread, in an order that a seed decides.

use crate::barrier::Block;
use crate::execute::pass_barriers;
use crate::memory::{Allocations, Global};
use crate::program::Program;
use crate::registers::LANES;
use crate::state::{Context, System, Warp};
use crate::warp;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Range of the random number of instructions per turn.
const TURN: (u32, u32) = (16, 512);
/// How far the kernel's clock may be ahead of real time when all warps sleep, in ns.
const AHEAD: u64 = 2_000_000;

/// Blocks, threads per block, and dynamic shared memory per block.
#[derive(Clone, Copy, Debug)]
pub struct Grid {
    /// Blocks.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block, bytes.
    pub shared_bytes: u64,
    /// All blocks run at the same time.
    pub cooperative: bool,
}

/// A kernel with its arguments.
#[derive(Debug)]
pub struct Launch {
    program: Arc<Program>,
    kernel: String,
    grid: Grid,
    arguments: Vec<Vec<u8>>,
    system: System,
    executed: u64,
}

/// A block and its warps.
struct Running {
    block: Block,
    warps: Vec<Warp>,
}

impl Launch {
    /// Prepares a launch of `kernel` with the bytes of its arguments.
    ///
    /// # Errors
    /// There is no such kernel, or its arguments do not match.
    pub fn new(
        program: Arc<Program>,
        kernel: &str,
        grid: Grid,
        arguments: Vec<Vec<u8>>,
        allocations: Arc<Allocations>,
        seed: u64,
    ) -> Result<Launch, String> {
        let entry = program.entries.get(kernel).ok_or_else(|| format!("there is no kernel {kernel}"))?;
        let sizes: Vec<u64> = entry.parameters.iter().map(|p| p.1).collect();
        if !arguments.iter().map(|a| a.len() as u64).eq(sizes.iter().copied()) {
            return Err(format!("kernel {kernel} takes arguments of {sizes:?} bytes"));
        }
        for global in &program.globals {
            allocations.insert(global.as_ptr() as u64, global.len() as u64 * 8);
        }
        let system = System::new(Global::new(allocations), seed);
        Ok(Launch { program, kernel: kernel.to_string(), grid, arguments, system, executed: 0 })
    }

    /// Warp instructions executed so far.
    pub fn executed(&self) -> u64 {
        self.executed
    }

    /// Runs the launch to its end; calls `stop` now and then.
    ///
    /// # Errors
    /// What the kernel did wrong, or what is not emulated, and where.
    pub fn run(&mut self, stop: &dyn Fn() -> bool) -> Result<(), String> {
        let at_once = if self.grid.cooperative { self.grid.blocks } else { 1 };
        let warps = self.grid.threads.div_ceil(32);
        let mut running: Vec<Running> = Vec::new();
        for first in (0..self.grid.blocks).step_by(at_once.max(1) as usize) {
            let blocks = first..(first + at_once).min(self.grid.blocks);
            running.truncate(blocks.len());
            for (place, index) in blocks.enumerate() {
                match running.get_mut(place) {
                    // Warps are reused, because their registers take memory.
                    Some(running) => self.begin(running, index)?,
                    None => {
                        let warp = |number| Warp::new(&self.program, number);
                        let block = Block::new(index, self.grid.threads, 0);
                        let mut new = Running { block, warps: (0..warps).map(warp).collect() };
                        self.begin(&mut new, index)?;
                        running.push(new);
                    }
                }
            }
            self.together(&mut running, stop)
                .map_err(|problem| format!("kernel {}: {problem}", self.kernel))?;
        }
        Ok(())
    }

    /// Resets `running` to block `index`, at its first instruction.
    fn begin(&self, running: &mut Running, index: u32) -> Result<(), String> {
        let program = &self.program;
        let entry = &program.entries[&self.kernel];
        running.block = Block::new(index, self.grid.threads, program.shared_bytes + self.grid.shared_bytes);
        for warp in &mut running.warps {
            let number = warp.number;
            warp.begin((self.grid.threads - number * 32).min(32), entry.start);
            for (special, register) in program.specials.iter().enumerate() {
                let value = |lane: u32| match special {
                    0 => number * 32 + lane,
                    3 => self.grid.threads,
                    4 | 5 | 10 | 11 => 1,
                    6 => index,
                    9 => self.grid.blocks,
                    12 => lane,
                    13 => number,
                    14 => 1 << lane,
                    15 => (1 << lane) - 1,
                    16 => (1 << lane) | ((1 << lane) - 1),
                    17 => !((1 << lane) | ((1 << lane) - 1)),
                    18 => !((1 << lane) - 1),
                    19 => index,
                    _ => 0,
                };
                warp.registers.set(
                    *register,
                    u32::MAX,
                    &std::array::from_fn::<u32, LANES, _>(|l| value(l as u32)),
                );
            }
            let stride = warp.local.len() / LANES as u64;
            for ((offset, bytes), argument) in entry.parameters.iter().zip(&self.arguments) {
                for lane in 0..LANES as u64 {
                    let at = warp.local.at(stride * lane + offset, *bytes).ok_or("parameters")?;
                    // SAFETY: local memory has these bytes, and the argument has as many.
                    unsafe { std::ptr::copy_nonoverlapping(argument.as_ptr(), at, argument.len()) };
                }
            }
        }
        Ok(())
    }

    /// Runs until all blocks have ended.
    fn together(&mut self, running: &mut [Running], stop: &dyn Fn() -> bool) -> Result<(), String> {
        let began = Instant::now();
        loop {
            self.system.global.forget();
            if stop() {
                return Err("stopped".to_string());
            }
            let (mut left, mut ran) = (0, 0);
            let mut next_wake = u64::MAX;
            for Running { block, warps } in running.iter_mut() {
                for warp in warps.iter_mut().filter(|warp| !warp.ended()) {
                    left += 1;
                    if warp.at_barrier != 0 {
                        pass_barriers(warp, block, &self.program);
                    }
                    if warp.ready() == 0 {
                        continue;
                    }
                    if warp.wake > self.system.clock {
                        next_wake = next_wake.min(warp.wake);
                        continue;
                    }
                    let quantum = TURN.0 + self.system.random() % (TURN.1 - TURN.0);
                    let mut context =
                        Context { program: &self.program, warp, block, system: &mut self.system };
                    let executed = warp::run(&mut context, quantum)?;
                    ran += executed;
                    // Warps run concurrently on a GPU: an SM issues several instructions per cycle.
                    self.system.clock += u64::from(executed / 8) + 1;
                }
                block.copy(self.system.clock, &mut self.system.global)?;
                let due = block.copies.iter().map(|c| c.due).chain(block.arrivals.iter().map(|a| a.due));
                next_wake = due.fold(next_wake, u64::min);
            }
            self.executed += u64::from(ran);
            if left == 0 {
                return Ok(());
            }
            if ran == 0 {
                if next_wake == u64::MAX {
                    return Err(self.stuck(running));
                }
                self.sleep(next_wake, began);
            }
        }
    }

    /// All warps sleep until `wake`. The clock jumps there, but not far ahead of real time, because the kernel may wait for
    /// the host.
    fn sleep(&mut self, wake: u64, began: Instant) {
        let ours = began.elapsed().as_nanos() as u64 + AHEAD;
        if wake > ours {
            std::thread::sleep(Duration::from_nanos((wake - ours).min(1_000_000)));
        }
        self.system.clock = self.system.clock.max(wake);
    }

    /// Lists the places of the warps that would wait forever.
    fn stuck(&self, running: &[Running]) -> String {
        let mut text = "all warps wait for each other:".to_string();
        for Running { block, warps } in running {
            for warp in warps.iter().filter(|warp| !warp.ended()) {
                let lane = (warp.together | warp.at_barrier).trailing_zeros() as usize % LANES;
                let place = self.program.place(warp.pc[lane]);
                text += &format!("\n  block {}, warp {}: {place}", block.index, warp.number);
            }
        }
        text
    }
}
