//! One folder per task type. Every `pub mod` line here is a registered task type (see `build.rs`): the module has `pub
//! const REGISTRATION: Registration`. bindgen reads the headers of its folder, and the folder's `cpu*.cpp` are
//! compiled.

pub mod add;
pub mod argmax_partial;
pub mod argmax_reduce;
pub mod attention;
pub mod attention_append;
pub mod attention_merge;
pub mod attention_prefill;
pub mod attention_prefill_merge;
pub mod embedding;
pub mod linear;
pub mod linear_with_residual;
pub mod nvshmem_copy;
pub mod nvshmem_signal;
pub mod reduce;
pub mod rmsnorm;
pub mod rmsnorm_linear;
pub mod rmsnorm_linear_silu_mul;
pub mod sample_merge;
pub mod sample_partial;
pub mod sample_reduce;
pub mod sample_weigh;
pub mod silu_mul;
pub mod silu_mul_linear;
pub mod silu_mul_linear_with_residual;
pub mod token_counts;
pub mod token_logit;
pub mod token_logprob;
pub mod wide_linear;
pub mod wide_rows;

pub(crate) mod attended;
pub(crate) mod contract;
pub(crate) mod heads;
pub(crate) mod linear_family;
pub(crate) mod linear_knobs;
pub(crate) mod linear_member;
pub(crate) mod linear_parts;
pub(crate) mod operand;
pub(crate) mod sample_family;
pub(crate) mod source;
pub(crate) mod wide;
pub(crate) mod wide_order;
pub(crate) mod wide_tile;
