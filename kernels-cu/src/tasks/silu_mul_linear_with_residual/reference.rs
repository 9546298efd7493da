//! See `silu_mul_linear`'s reference: the residual is one of its arguments.

pub use crate::tasks::silu_mul_linear::reference::silu_mul_linear;
