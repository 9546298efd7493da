//! Runs the PTX that nvcc generates for the kernel on the CPU, thread by thread, with the interface of the CUDA driver's library. See
//! `docs/emulator.md`.
//!
//! `parse` reads PTX. `decode` turns it into a `program` of instructions over register offsets. `warp` executes them for the lanes of a warp that
//! are at the same place, on the warp's `state`. `launch` schedules warps and blocks, and `driver` is the library that programs load.

#![cfg(target_pointer_width = "64")]
#![allow(clippy::needless_range_loop, reason = "a lane is an index of several arrays at once")]

mod arithmetic;
mod barrier;
mod decode;
pub mod driver;
mod execute;
mod formats;
mod instruction;
mod launch;
mod memory;
mod names;
mod opcode;
mod parse;
mod program;
mod registers;
mod state;
mod tensor;
mod together;
mod warp;

pub use launch::{Grid, Launch};
pub use memory::Allocations;
pub use program::{Program, SUMS_AT_ONCE};
