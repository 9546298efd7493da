//! Checks whether a rank's memory fits on its GPU, and lists what uses it.

use super::device::Context;
use crate::error::{Error, Result};
use crate::gibibytes::gibibytes;

/// The device memory that a rank needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Budget {
    parts: Vec<(&'static str, u64)>,
}

impl Budget {
    pub fn add(&mut self, what: &'static str, bytes: u64) {
        self.parts.push((what, bytes));
    }

    pub fn total(&self) -> u64 {
        self.parts.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Refuses what does not fit for `ranks` ranks on one GPU with `free` bytes.
    pub fn check(&self, context: &Context, ranks: u32, free: u64) -> Result<()> {
        let gpu = context.gpu();
        self.check_on(&format!("GPU {} ({})", gpu.ordinal, gpu.name), ranks, free)
    }

    fn check_on(&self, device: &str, ranks: u32, free: u64) -> Result<()> {
        if self.total().saturating_mul(u64::from(ranks)) <= free {
            return Ok(());
        }
        Err(Error::DeviceMemory {
            device: device.to_string(),
            ranks,
            free,
            needed: self.total(),
            parts: self.to_string(),
        })
    }
}

impl std::fmt::Display for Budget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let taken = self.parts.iter().filter(|(_, bytes)| *bytes > 0);
        let texts: Vec<String> = taken.map(|(what, bytes)| format!("{what} {}", gibibytes(*bytes))).collect();
        f.write_str(&texts.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_memory_is_refused_with_a_list_of_its_uses() {
        let mut budget = Budget::default();
        budget.add("weights", 16 << 30);
        budget.add("key-value cache", 512 << 20);
        assert!(budget.check_on("GPU 0", 1, 17 << 30).is_ok());
        let error = budget.check_on("GPU 0", 2, 17 << 30).unwrap_err();
        assert_eq!(error.exit_status(), 3);
        let text = error.to_string();
        assert!(text.contains("weights 16.00 GiB, key-value cache 512.0 MiB"), "{text}");
        assert!(text.contains("17.00 GiB of its memory free") && text.contains("16.50 GiB"), "{text}");
    }
}
