//! Shared parts of the attention types: the heads of a rank, the rows of a slot, the layout of the cache.

use crate::tasks::contract;
use std::ops::Range;
use taskgraph::op_graph::Attrs;
use taskgraph::split::Part;
use taskgraph::task_type::OpError;
use taskgraph::words::counted;
use taskgraph::{Sharding, Split};

/// Maximum number of shares of a slot's positions.
pub const MAX_SPLITS: u32 = 16;

/// Sharding of `qkv`, and with `dim` = 0 of the weight that produces it.
pub fn qkv_sharding(dim: usize, heads: u64, kv_heads: u64, head_dim: u64) -> Sharding {
    let queries = Part { len: heads * head_dim, split: Split::Queries { heads, head_dim } };
    let key_values = Part { len: kv_heads * head_dim, split: Split::KeyValues { heads, kv_heads, head_dim } };
    Sharding::Split { dim, parts: vec![queries, key_values, key_values] }
}

/// Sharding of `kv_cache`.
pub fn kv_sharding(heads: u64, kv_heads: u64) -> Sharding {
    let part = Part { len: kv_heads, split: Split::KeyValues { heads, kv_heads, head_dim: 1 } };
    Sharding::Split { dim: 1, parts: vec![part, part] }
}

/// Global dimensions of `kv_cache`.
pub fn kv_dims(num_pages: u64, kv_heads: u64, page_size: u64, head_dim: u64) -> Vec<u64> {
    vec![num_pages, 2 * kv_heads, page_size, head_dim]
}

/// Region space of `kv_cache` in a graph with `active` slots: [active, kv heads, splits]. An upper bound for every rank
/// and number of splits.
pub fn kv_region_dims(active: u32, kv_heads: u64) -> Vec<u64> {
    vec![u64::from(active), kv_heads, u64::from(MAX_SPLITS)]
}

/// The rows that represent those of active slot `a` of `active` in regions, in a tensor with `rows` rows.
pub fn row_share(rows: u32, a: u32, active: u32) -> Range<u32> {
    let at = |a: u32| (u64::from(rows) * u64::from(a) / u64::from(active)) as u32;
    at(a)..at(a + 1)
}

/// The heads of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Heads {
    pub heads: u64,
    pub kv_heads: u64,
    pub head_dim: u64,
    /// Query heads of the rank.
    pub queries: Range<u64>,
    /// Key-value heads of the rank.
    pub key_values: Range<u64>,
}

impl Heads {
    pub(crate) fn global(attrs: &Attrs) -> Result<Heads, OpError> {
        let get = |name: &str| match contract::attr_u32(attrs, name)? {
            Some(value) if value > 0 => Ok(u64::from(value)),
            _ => Err(OpError(format!("attribute `{name}` must be given and above 0"))),
        };
        let (heads, kv_heads, head_dim) = (get("heads")?, get("kv_heads")?, get("head_dim")?);
        if heads % kv_heads != 0 {
            return Err(OpError(format!("`kv_heads` {kv_heads} must divide `heads` {heads}")));
        }
        if head_dim % 2 != 0 {
            return Err(OpError(format!(
                "`head_dim` {head_dim} must be even, because rotary embedding needs pairs"
            )));
        }
        Ok(Heads { heads, kv_heads, head_dim, queries: 0..heads, key_values: 0..kv_heads })
    }

    /// The heads of one rank, if the operand is split by heads (`split`).
    pub(crate) fn local(attrs: &Attrs, sharding: &Sharding, rank: u32, world: u32) -> Result<Heads, OpError> {
        let mut heads = Self::global(attrs)?;
        if let Sharding::Split { .. } = sharding {
            let (all, kv) = (heads.heads, heads.kv_heads);
            if all % u64::from(world) != 0 {
                return Err(OpError(format!("{world} ranks do not divide {}", counted(all, "query head"))));
            }
            heads.queries = Split::Queries { heads: all, head_dim: 1 }.range(all, rank, world);
            heads.key_values =
                Split::KeyValues { heads: all, kv_heads: kv, head_dim: 1 }.range(kv, rank, world);
        }
        Ok(heads)
    }

    /// Local query heads that read local key-value head `h`.
    pub(crate) fn readers(&self, h: u64) -> Range<u64> {
        let group = self.heads / self.kv_heads;
        let global = self.key_values.start + h;
        let first = (global * group).max(self.queries.start);
        let last = ((global + 1) * group).min(self.queries.end);
        first - self.queries.start..last - self.queries.start
    }

    pub(crate) fn num_queries(&self) -> u64 {
        self.queries.end - self.queries.start
    }

    pub(crate) fn num_key_values(&self) -> u64 {
        self.key_values.end - self.key_values.start
    }
}

/// The factor that scores are multiplied by.
pub(crate) fn scale(attrs: &Attrs, head_dim: u64) -> Result<f64, OpError> {
    Ok(contract::attr_f64(attrs, "scale")?.unwrap_or((head_dim as f64).powf(-0.5)))
}

/// The number of positions that a query sees, its own included; 0 if it sees all.
pub(crate) fn window(attrs: &Attrs) -> Result<u32, OpError> {
    match contract::attr_u32(attrs, "window")? {
        Some(0) => Err(OpError(
            "attribute `window` must be at least 1, the query's own position; leave it out for no window"
                .to_string(),
        )),
        window => Ok(window.unwrap_or(0)),
    }
}

/// Rows and active slots of the graph. Each active slot must be able to have a row.
pub(crate) fn rows_and_active(rows: u64, active: u32) -> Result<(u32, u32), OpError> {
    match u32::try_from(rows) {
        Ok(rows) if active > 0 && rows >= active => Ok((rows, active)),
        _ => {
            Err(OpError(format!("{} cannot serve {}", counted(rows, "row"), counted(active, "active slot"))))
        }
    }
}

/// The number of bytes that `lay_out_scratch` of slot.h needs.
pub(crate) fn scratch_bytes(head_dim: u64) -> u64 {
    const QUERIES: u64 = 64;
    const BLOCK: u64 = 64;
    let padded = head_dim.next_multiple_of(16);
    4 * ((2 * QUERIES + 2 * BLOCK + 3) * padded + QUERIES * BLOCK + 2 * QUERIES)
}
