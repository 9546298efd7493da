//! Multi-rank, golden and command-line tests of `mpk-run`, through the real binary: see `tests/tests`.
//!
//! A test describes a [`Job`], runs it with or without `mpirun`, and checks the results: exit status, output, files.
//! [`fixtures`] has the results of Hugging Face transformers, [`model_file`] writes model.json files,
//! [`mod@reference`] computes operators in f64, and [`task_graph`] reads emitted graphs without the code that wrote
//! them.

pub mod fixtures;
pub mod folders;
pub mod http;
pub mod job;
pub mod launcher;
pub mod model_file;
pub mod preload;
pub mod random;
pub mod reference;
pub mod run_json;
pub mod server;
pub mod task_graph;
pub mod toolkit;

mod capture;
mod finished;
mod places;
mod processes;
mod running;
mod turn;

pub use finished::Finished;
pub use job::Job;
pub use model_file::ModelFile;
pub use run_json::RunJson;
pub use running::Running;
pub use turn::Turn;
