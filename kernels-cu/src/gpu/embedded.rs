//! The GPU sources that are part of this binary.
