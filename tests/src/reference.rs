//! Operators in f64, written down from their definitions.
