//! Running nvcc.
