//! How a host writes what the kernel reads.

use crate::error::Result;

/// How a host writes the memory of a rank whose kernel may be running.
pub(crate) trait ControlWriter {
    /// `bytes` to this offset of the control memory.
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<()>;
    /// Zeros there.
    fn zero(&self, offset: u64, bytes: u64) -> Result<()>;
    /// Zeros in this rank's part of the symmetric heap.
    fn zero_heap(&self, offset: u64, bytes: u64) -> Result<()>;
    /// Everything that was written has arrived.
    fn is_written(&self) -> Result<bool>;
}
