//! Multi-rank, golden and command-line tests of `mpk-run`; see `tests/tests`.
