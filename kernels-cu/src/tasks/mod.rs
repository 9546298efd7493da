//! One folder for each task type. Every `pub mod` line here is a registered task type (see `build.rs`): the
//! module has `pub const REGISTRATION: Registration`. Its headers are read by bindgen, its `cpu*.cpp` compiled.

pub mod add;
pub mod argmax_partial;
pub mod argmax_reduce;
pub mod attention;
pub mod attention_merge;
pub mod nvshmem_copy;
pub mod nvshmem_signal;
pub mod reduce;

pub(crate) mod contract;
