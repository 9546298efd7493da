//! The benchmarks of mpk-bench: whole models (`decode`, `online`, `prefill`, `stream`, with `budget`), parts of the running kernel (`allreduce`,
//! `tasks`), graph building (`graphs`), the machine (`memory`), and the search for tuning values (`tune`).

pub mod allreduce;
pub mod budget;
pub mod decode;
pub mod floor;
mod full_batch;
pub mod graphs;
pub mod memory;
pub mod online;
mod own_graph;
pub mod prefill;
pub mod program;
pub mod samples;
pub mod stream;
pub mod tasks;
pub mod tune;
pub mod verdict;
