//! Boxes in the index space of a tensor.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Maximum number of dimensions of a tensor.
pub const MAX_DIMS: usize = 4;

/// A box `[lo, hi)` in up to four dimensions; unused dimensions are `[0, 1)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub struct Region {
    /// First index in each dimension.
    pub lo: [u32; MAX_DIMS],
    /// One past the last index in each dimension.
    pub hi: [u32; MAX_DIMS],
}

impl Region {
    /// The region of a whole tensor with these dimensions.
    pub fn whole(dims: &[u32]) -> Self {
        let mut region = Region { lo: [0; MAX_DIMS], hi: [1; MAX_DIMS] };
        region.hi[..dims.len()].copy_from_slice(dims);
        region
    }

    /// This region, restricted to `[lo, hi)` in dimension `dim`.
    // It must not change a `self` taken by value: rustc up to 1.95 at least may pass the caller's own region to a closure
    // that takes one by value and does that (rust-lang/rust#155241).
    pub fn with(&self, dim: usize, lo: u32, hi: u32) -> Self {
        let (mut first, mut last) = (self.lo, self.hi);
        (first[dim], last[dim]) = (lo, hi);
        Region { lo: first, hi: last }
    }

    /// True if it contains no index.
    pub fn is_empty(&self) -> bool {
        (0..MAX_DIMS).any(|d| self.lo[d] >= self.hi[d])
    }

    /// True if the two regions share at least one index.
    pub fn overlaps(&self, other: &Region) -> bool {
        (0..MAX_DIMS).all(|d| self.lo[d].max(other.lo[d]) < self.hi[d].min(other.hi[d]))
    }

    /// True if every index of `other` is in `self`.
    pub fn contains(&self, other: &Region) -> bool {
        (0..MAX_DIMS).all(|d| self.lo[d] <= other.lo[d] && other.hi[d] <= self.hi[d])
    }

    /// The smallest region that contains both.
    pub fn hull(&self, other: &Region) -> Region {
        let mut all = *self;
        for d in 0..MAX_DIMS {
            all.lo[d] = all.lo[d].min(other.lo[d]);
            all.hi[d] = all.hi[d].max(other.hi[d]);
        }
        all
    }

    /// Number of indices.
    pub fn volume(&self) -> u64 {
        (0..MAX_DIMS).map(|d| u64::from(self.hi[d].saturating_sub(self.lo[d]))).product()
    }
}

impl std::fmt::Display for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let last = (0..MAX_DIMS).rev().find(|&d| self.hi[d] != 1 || self.lo[d] != 0).unwrap_or(0);
        f.write_str("[")?;
        for d in 0..=last {
            if d > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{}..{}", self.lo[d], self.hi[d])?;
        }
        f.write_str("]")
    }
}
