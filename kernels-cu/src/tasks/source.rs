//! The left side of a product, and how it is computed.

/// How the left side is computed from `x`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// `x` [rows, k].
    Plain,
    /// The norm of `x` [rows, k], times the norm weight [k].
    RmsNorm,
    /// silu(gate) * up of `x` [rows, 2k] = [gate | up].
    SiluMul,
}
