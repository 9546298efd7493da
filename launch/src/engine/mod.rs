//! Loads, verifies, compiles and launches a model over all ranks, and accepts requests for it. It knows nothing of command
//! lines and prints nothing.
//!
//! ```no_run
#![doc = include_str!("../../../examples/engine.rs")]
//! ```

pub mod agreement;
pub mod backend;
pub mod config;
pub mod cubin;
pub mod error;
pub mod graphs;
pub mod handle;
pub mod launch;
mod life;
pub mod loaded;
mod measured;
pub mod place;
pub mod proofs;
pub mod request;
pub mod run;
pub mod same;
pub mod sampling;
mod serving;
pub mod spec;
pub mod stats;
mod stop;
mod text;
pub mod trace;
pub mod tuning;
pub mod user_graph;
pub mod user_outputs;
pub mod user_places;
mod user_values;

pub use config::RunConfig;
pub use distributed::online::Reader;
pub use error::{Error, ErrorKind};
pub use handle::{Completion, End, Event, FinishReason, Handle, Token};
pub use loaded::{Info, Opened};
pub use request::{Prompt, Request};
pub use run::Engine;
pub use sampling::SamplingParams;
pub use spec::ModelSpec;
pub use stats::{Start, Stats};
