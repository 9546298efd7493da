//! What mpk-bench measures: whole models (`decode`, `prefill`, with `budget`), parts of the running kernel (`allreduce`, `tasks`), graph
//! building (`graphs`), the machine (`memory`), and what of a run should be chosen for both (`tune`).

pub mod allreduce;
pub mod budget;
pub mod decode;
pub mod floor;
mod full_batch;
pub mod graphs;
pub mod memory;
mod own_graph;
pub mod prefill;
pub mod program;
pub mod samples;
pub mod stream;
pub mod tasks;
pub mod tune;
pub mod verdict;
