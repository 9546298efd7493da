//! Artificial attention operators, run through the contract and the kernels, and compared with the reference.
//!
//! A [`Case`] describes the operator and the iteration. `data` makes its operands, `run` runs it on a rank, `check` compares.

mod check;
mod data;
mod run;

use std::ops::Range;
use taskgraph::{DType, Split};

#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) dtype: DType,
    pub(super) heads: u32,
    pub(super) kv_heads: u32,
    pub(super) head_dim: u32,
    pub(super) page_size: u32,
    pub(super) splits: u32,
    pub(super) qk_norm: bool,
    /// (tokens in the cache, new rows) of each slot.
    pub(super) slots: Vec<(u32, u32)>,
    pub(super) world: u32,
    /// If present, the operator expands into the steps for many rows, for this number of workers.
    pub(super) prefill: Option<u32>,
    /// Maximum number of key-value heads per task, as on a GPU.
    pub(super) kv_heads_of_task: u32,
    /// Positions that a query sees; 0: all.
    pub(super) window: u32,
    /// Columns of a column tile of the output, in `MPK_LAYOUT_WIDE`; 0: it is written as rows.
    pub(super) wide: u32,
}

/// `eps` of the norms of queries and keys.
const EPS: f64 = 1e-5;

/// The heads of a rank.
struct LocalHeads {
    queries: Range<u64>,
    key_values: Range<u64>,
}

impl LocalHeads {
    fn num_key_values(&self) -> u32 {
        (self.key_values.end - self.key_values.start) as u32
    }
}

impl Case {
    fn local_heads(&self, rank: u32) -> LocalHeads {
        let (heads, kv_heads) = (u64::from(self.heads), u64::from(self.kv_heads));
        let key_values = Split::KeyValues { heads, kv_heads, head_dim: 1 };
        LocalHeads {
            queries: Split::Queries { heads, head_dim: 1 }.range(heads, rank, self.world),
            key_values: key_values.range(kv_heads, rank, self.world),
        }
    }

    /// Columns of `qkv` with all heads.
    fn width(&self) -> usize {
        ((self.heads + 2 * self.kv_heads) * self.head_dim) as usize
    }

    /// Norm of queries or keys with this weight, if the case has norms.
    fn norm<'a>(&self, weight: &'a [f32]) -> Option<(&'a [f32], f64)> {
        self.qk_norm.then_some((weight, EPS))
    }
}
