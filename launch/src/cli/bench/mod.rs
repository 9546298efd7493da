//! Benchmarks that need no peer: how fast graphs are built, and what this machine's memory yields.

pub mod decode;
pub mod graphs;
pub mod memory;
