//! How a tensor is split over the ranks.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// How the `len` indices of one dimension are split over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Split {
    /// Contiguous ranges of whole units, as even as possible. The last unit may be short. If there are fewer units than
    /// ranks, the unit is halved until each rank has one (down to 1).
    Even {
        /// Indices that stay together.
        #[serde(default = "one")]
        unit: u64,
    },
    /// Query heads of `head_dim` indices each. The number of ranks divides `heads`.
    Queries {
        /// Total number of query heads.
        heads: u64,
        /// Indices of a head.
        head_dim: u64,
    },
    /// The key-value heads that the rank's query heads read. Ranks may share a head.
    KeyValues {
        /// Total number of query heads.
        heads: u64,
        /// Total number of key-value heads. Divides `heads`.
        kv_heads: u64,
        /// Indices of a head.
        head_dim: u64,
    },
}

fn one() -> u64 {
    1
}

impl Split {
    /// The indices of `0..len` that `rank` of `world` holds.
    pub fn range(&self, len: u64, rank: u32, world: u32) -> Range<u64> {
        // What the ranks before `rank` have of `count`.
        let before = |count: u64, rank: u32| {
            let before = u128::from(count) * u128::from(rank) / u128::from(world);
            u64::try_from(before).unwrap_or(u64::MAX) // at most `count`
        };
        match *self {
            Split::Even { unit } => {
                let mut unit = unit.max(1);
                while unit > 1 && len.div_ceil(unit) < u64::from(world) {
                    unit /= 2;
                }
                let units = len.div_ceil(unit);
                let at = |rank: u32| before(units, rank).saturating_mul(unit).min(len);
                at(rank)..at(rank + 1)
            }
            Split::Queries { heads, head_dim } => {
                (before(heads, rank) * head_dim)..(before(heads, rank + 1) * head_dim)
            }
            Split::KeyValues { heads, kv_heads, head_dim } => {
                let group = (heads / kv_heads).max(1);
                let (first, last) = (before(heads, rank), before(heads, rank + 1));
                (first / group * head_dim)..(last.div_ceil(group) * head_dim)
            }
        }
    }
}

/// One piece of a concatenated dimension (q | k | v, gate | up).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub struct Part {
    /// Global length.
    pub len: u64,
    /// How it is split over the ranks.
    pub split: Split,
}

/// Where the values of a tensor are.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Sharding {
    /// Every rank holds all of it.
    Replicated,
    /// Dimension `dim` is the concatenation of `parts`, each of which is split over the ranks. A rank holds the
    /// concatenation of its ranges.
    Split {
        /// The dimension.
        dim: usize,
        /// Its parts, in order.
        parts: Vec<Part>,
    },
    /// Every rank holds a summand. The value is the sum over the ranks.
    Partial,
}

impl Sharding {
    /// Splits dimension `dim` with one part of `len` indices.
    pub fn split(dim: usize, len: u64, split: Split) -> Self {
        Sharding::Split { dim, parts: vec![Part { len, split }] }
    }

    /// For each part, the global indices that `rank` holds, counted from the start of the part. Empty unless `Split`.
    pub fn ranges(&self, rank: u32, world: u32) -> Vec<Range<u64>> {
        match self {
            Sharding::Split { parts, .. } => {
                parts.iter().map(|p| p.split.range(p.len, rank, world)).collect()
            }
            _ => Vec::new(),
        }
    }

    /// True if several ranks hold the same index, as they do with [`Split::KeyValues`] and fewer key-value heads than ranks. Sums and
    /// choices over the ranks would count it several times.
    pub fn shares_indices(&self, world: u32) -> bool {
        let Sharding::Split { parts, .. } = self else { return false };
        parts.iter().any(|part| {
            let ranges = (0..world).map(|rank| part.split.range(part.len, rank, world));
            ranges.map(|range| range.end.saturating_sub(range.start)).sum::<u64>() > part.len
        })
    }

    /// The dimensions that `rank` holds of a tensor with global dimensions `dims`.
    pub fn local_dims(&self, dims: &[u64], rank: u32, world: u32) -> Vec<u64> {
        let mut local = dims.to_vec();
        if let Sharding::Split { dim, .. } = self {
            local[*dim] = self.ranges(rank, world).iter().map(|r| r.end - r.start).sum();
        }
        local
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_key_value_heads_if_there_are_fewer_than_ranks() {
        let shares = |split, world| Sharding::split(0, 8, split).shares_indices(world);
        let key_values = Split::KeyValues { heads: 8, kv_heads: 2, head_dim: 4 };
        assert_eq!([1, 2, 4, 8].map(|world| shares(key_values, world)), [false, false, true, true]);
        assert!(!shares(Split::Queries { heads: 4, head_dim: 2 }, 4) && !shares(Split::Even { unit: 4 }, 3));
        assert!(!Sharding::Replicated.shares_indices(4) && !Sharding::Partial.shares_indices(4));
        // Many heads, whose product with a rank is more than 64 bits.
        let many = Split::KeyValues { heads: 3 << 62, kv_heads: 3, head_dim: 1 };
        assert_eq!([0, 1].map(|rank| many.range(3, rank, 2)), [0..2, 1..3]);
    }

    #[test]
    fn even_covers_everything_once_also_when_nothing_divides() {
        for len in [1u64, 7, 8, 100, 203, 331, 151_936] {
            for unit in [1, 2, 16, 64] {
                for world in [1u32, 2, 3, 4, 8] {
                    let mut next = 0;
                    for rank in 0..world {
                        let r = Split::Even { unit }.range(len, rank, world);
                        assert_eq!(r.start, next);
                        assert!(len < u64::from(world) || !r.is_empty(), "{len} {unit} {world} {rank}");
                        next = r.end;
                    }
                    assert_eq!(next, len);
                }
            }
        }
    }

    #[test]
    fn a_rank_holds_every_kv_head_that_its_query_heads_read() {
        for (heads, kv_heads) in [(8u64, 8u64), (8, 4), (8, 2), (8, 1), (12, 4), (16, 8)] {
            for world in (1..=heads as u32).filter(|w| heads % u64::from(*w) == 0) {
                for rank in 0..world {
                    let q = Split::Queries { heads, head_dim: 1 }.range(heads, rank, world);
                    let kv = Split::KeyValues { heads, kv_heads, head_dim: 1 }.range(kv_heads, rank, world);
                    let needed: Vec<u64> = q.map(|h| h / (heads / kv_heads)).collect();
                    assert_eq!(kv.start, needed[0]);
                    assert_eq!(kv.end, needed[needed.len() - 1] + 1);
                }
            }
        }
    }
}
