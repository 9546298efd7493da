//! How a host writes memory that the kernel reads.

use crate::error::Result;

/// How a host writes the memory of a rank whose kernel may be running.
pub(crate) trait ControlWriter {
    /// Writes `bytes` at this offset of the control memory.
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<()>;
    /// Writes zeros at this offset of the control memory.
    fn zero(&self, offset: u64, bytes: u64) -> Result<()>;
    /// Writes zeros in this rank's part of the symmetric heap.
    fn zero_heap(&self, offset: u64, bytes: u64) -> Result<()>;
    /// True if everything that was written has arrived.
    fn is_written(&self) -> Result<bool>;
}
