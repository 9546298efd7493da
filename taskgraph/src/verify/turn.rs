//! How the ranks' accesses to a tensor differ.

use crate::blocks::Blocks;

/// How the ranks' accesses to a tensor differ.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Turn {
    /// Not at all.
    Still,
    /// By these blocks.
    Blocks(Blocks),
    /// In some other way.
    Other,
}
