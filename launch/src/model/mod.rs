//! The model: model.json, the checkpoint's configuration and weights, tokenizer and chat template, and the op graphs of
//! model families. Plain Rust, without MPI or a device.

pub mod app_error;
pub mod chat_template;
pub mod checkpoint;
pub(crate) mod convert;
pub mod error;
pub mod families;
pub mod files;
pub mod fill;
pub mod fold;
pub mod hf_config;
pub mod json;
pub mod lack;
pub(crate) mod mapped;
pub mod model_json;
pub mod model_path;
pub mod model_source;
pub mod not_numbers;
pub mod prompts;
pub mod random_weights;
pub mod sampling;
pub mod shapes;
pub mod tokenizer;
pub mod weights;
