//! One folder for each task type. Every `pub mod` line here is a registered task type (see `build.rs`): the
//! module has `pub const REGISTRATION: Registration`. Its headers are read by bindgen, its `cpu*.cpp` compiled.

pub mod add;

pub(crate) mod contract;
