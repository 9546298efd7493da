//! How the programs read and write files that the user names.
//!
//! [`read()`] and [`open`] take regular files only, and look before they open: a FIFO would block, a device might act.
//! [`write()`] replaces a file as a whole or leaves it as it was; what is no regular file is written to.
//! [`failed`] gives an output's error its exit status, the same for every output.

mod input;
mod output;
#[cfg(test)]
mod tests;

pub use input::{open, read, read_if_there};
pub use output::{check, failed, report_size_limits, write};
