//! Runs the PTX that nvcc makes of the kernel on the CPU, thread by thread, behind the interface of the CUDA driver's
//! library. See `docs/emulator.md`.
//!
//! `parse` reads PTX, `decode` turns it into instructions over register offsets, `warp` executes them for the lanes of a
//! warp that are at the same place, `launch` schedules warps and blocks, and `driver` is the library that programs load.

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
mod opcode;
mod parse;
mod registers;
mod tensor;
mod together;
mod warp;

pub use decode::Program;
pub use launch::{Grid, Launch};
pub use memory::Allocations;
