//! Runs a model as one persistent kernel per rank: `model` describes what to run, `engine` runs it, `serve` offers it over
//! HTTP, and the programs are built from `cli`. Each of them depends only on those before it.
//!
//! The input side is plain Rust without MPI or a device. A typical use:
//!
//! ```no_run
//! use launch::model::{model_json::ModelJson, model_source::ModelSource, prompts};
//!
//! # fn main() -> Result<(), launch::model::error::InputError> {
//! let model = ModelJson::read("examples/tiny/model.json".as_ref())?;
//! if let ModelSource::Model(source) = ModelSource::open(&model)? {
//!     let sizes = model.sizes(&source.config)?;
//!     let requests = prompts::resolve(
//!         &prompts::of_model_json(&model),
//!         source.tokenizer.as_ref(),
//!         &prompts::Limits::new(&sizes, source.config.vocab_size, model.max_new_tokens()),
//!     )?;
//!     println!("{} requests", requests.len());
//! }
//! # Ok(())
//! # }
//! ```

pub mod cli;
pub mod engine;
pub mod model;
pub mod serve;
