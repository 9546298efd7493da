//! See `linear`'s reference: the residual is one of its arguments.

pub use crate::tasks::linear::reference::linear;
