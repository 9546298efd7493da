//! Loads, proves, compiles and launches a model, over all ranks. Knows nothing of command lines.

pub mod agreement;
pub mod backend;
pub mod config;
pub mod graphs;
pub mod launch;
pub mod own_graph;
pub mod proofs;
pub mod same;
pub mod trace;
pub mod user_graph;
