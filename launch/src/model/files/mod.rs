//! How the programs read and write files that the user names.
//!
//! [`read()`] and [`open`] accept only regular files, and check before they open: a FIFO would block, and a device
//! might act. [`write()`] replaces a regular file as a whole or leaves it as it was; anything else is written to
//! directly. [`write_folder`] writes several files, all of them or none. [`failed`] gives all output errors the same exit statuses.

mod input;
mod output;
#[cfg(test)]
mod tests;

pub use input::{is_lfs_pointer, is_there, open, read, read_if_there};
pub use output::{check, failed, report_size_limits, write, write_folder};
