//! The command line: what model.json names, from the checkpoint to op graphs, launch and output.
//!
//! The input side is plain Rust without MPI or a device. A typical use:
//!
//! ```no_run
//! use launch::{model_json::ModelJson, model_source::ModelSource};
//!
//! # fn main() -> Result<(), launch::error::InputError> {
//! let model = ModelJson::read("examples/tiny/model.json".as_ref())?;
//! if let ModelSource::Model(source) = ModelSource::open(&model)? {
//!     let sizes = model.sizes(&source.config)?;
//!     let requests = launch::prompts::resolve(
//!         &model.prompt_sources(),
//!         source.tokenizer.as_ref(),
//!         &launch::prompts::Limits::new(&sizes, source.config.vocab_size, model.max_new_tokens()),
//!     )?;
//!     println!("{} requests", requests.len());
//! }
//! # Ok(())
//! # }
//! ```

pub mod app_error;
pub mod backend;
pub mod bench;
pub mod build_only;
pub mod chat_template;
pub mod checkpoint;
pub mod cli;
pub mod console;
pub mod doctor;
pub mod error;
pub mod families;
pub mod files;
pub mod fill;
pub mod fold;
pub mod graphs;
pub mod hf_config;
mod json;
pub mod logging;
mod mapped;
pub mod model_json;
pub mod model_path;
pub mod model_source;
pub mod not_numbers;
pub mod output;
pub mod own_graph;
pub mod passes;
pub mod process_limits;
pub mod prompts;
pub mod proofs;
pub mod random_weights;
pub mod same;
pub mod session;
pub mod tokenizer;
pub mod trace;
pub mod user_graph;
pub mod weights;
