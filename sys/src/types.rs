//! The types of arguments and results of calls.

use crate::sys;
use std::ffi::c_int;
use std::fmt;

/// How far NVSHMEM is initialised in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum InitStatus {
    /// Not at all, or finalised.
    NotInitialized,
    /// Ranks know each other; there is no symmetric heap yet.
    Bootstrapped,
    /// Ready.
    Initialized,
    /// Ready, several PEs share a GPU without MPS (functional, slow).
    LimitedMultiplePesPerGpu,
    /// Ready, several PEs share a GPU through MPS.
    FullMultiplePesPerGpu,
    /// A value that the headers do not name.
    Unknown(i32),
}

impl InitStatus {
    /// Whether the symmetric heap is up.
    #[must_use]
    pub fn is_ready(self) -> bool {
        matches!(self, Self::Initialized | Self::LimitedMultiplePesPerGpu | Self::FullMultiplePesPerGpu)
    }

    pub(crate) fn from_raw(raw: c_int) -> Self {
        match u32::try_from(raw) {
            Ok(sys::NVSHMEM_STATUS_NOT_INITIALIZED) => Self::NotInitialized,
            Ok(sys::NVSHMEM_STATUS_IS_BOOTSTRAPPED) => Self::Bootstrapped,
            Ok(sys::NVSHMEM_STATUS_IS_INITIALIZED) => Self::Initialized,
            Ok(sys::NVSHMEM_STATUS_LIMITED_MPG) => Self::LimitedMultiplePesPerGpu,
            Ok(sys::NVSHMEM_STATUS_FULL_MPG) => Self::FullMultiplePesPerGpu,
            _ => Self::Unknown(raw),
        }
    }
}

impl fmt::Display for InitStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotInitialized => f.write_str("not initialised"),
            Self::Bootstrapped => f.write_str("bootstrapped only"),
            Self::Initialized => f.write_str("initialised"),
            Self::LimitedMultiplePesPerGpu => f.write_str("initialised (several PEs on a GPU, no MPS)"),
            Self::FullMultiplePesPerGpu => f.write_str("initialised (several PEs on a GPU, MPS)"),
            Self::Unknown(raw) => write!(f, "in state {raw}"),
        }
    }
}

/// A set of PEs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Team(pub sys::nvshmem_team_t);

impl Team {
    /// All PEs.
    pub const WORLD: Self = Self(sys::NVSHMEM_TEAM_WORLD);
    /// The PEs whose memory this one reaches by load and store.
    pub const SHARED: Self = Self(sys::NVSHMEM_TEAM_SHARED);
    /// The PEs of this node.
    pub const NODE: Self = Self(sys::NVSHMEMX_TEAM_NODE);
}

/// CUDA's `dim3`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Dim3 {
    /// Innermost extent.
    pub x: u32,
    /// Middle extent.
    pub y: u32,
    /// Outermost extent.
    pub z: u32,
}
