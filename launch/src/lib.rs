//! The input side of the command line: model.json, Hugging Face configurations, checkpoints, tokenizers, prompts.
//!
//! Everything here is plain Rust without MPI or a device. A typical use:
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

pub mod checkpoint;
pub mod error;
pub mod hf_config;
mod json;
pub mod model_json;
pub mod model_source;
pub mod prompts;
pub mod random_weights;
pub mod tokenizer;
pub mod weights;
