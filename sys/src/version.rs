//! Versions of NVSHMEM.

use crate::sys;
use std::fmt;

/// A version of NVSHMEM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Changes with the ABI.
    pub major: u32,
    /// Changes with features.
    pub minor: u32,
    /// Changes with corrections.
    pub patch: u32,
}

impl Version {
    /// The oldest host library that this crate works with.
    pub const OLDEST: Self = Self { major: 3, minor: 4, patch: 0 };

    /// Whether a host library of this version can be used.
    #[must_use]
    pub fn is_supported(self) -> bool {
        self >= Self::OLDEST && self.major == Self::OLDEST.major
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// The version of the headers that the bindings were generated from.
pub const HEADER_VERSION: Version = Version {
    major: sys::NVSHMEM_VENDOR_MAJOR_VERSION,
    minor: sys::NVSHMEM_VENDOR_MINOR_VERSION,
    patch: sys::NVSHMEM_VENDOR_PATCH_VERSION,
};
