//! What the proof takes on trust, all of it.
//!
//! The verifier decides on bytes, which it computes from the views that kernels get. Two things are known only at run
//! time: which rows a slot has, and which pages its cache has. There a task names a [`Trust`], and its region stands
//! for the bytes. Each trust has an invariant that something else keeps, and a check of that at run time.
//! `docs/architecture.md` ("What is taken on trust") shows the same list to people.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An assumption about bytes that are known only at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Trust {
    /// The task touches only the rows (dimension 0) of one active slot; its region says what of the other dimensions.
    /// Whoever names rows without this trust may meet the rows of any slot.
    RowsOfSlot {
        /// The active slot.
        slot: u32,
        /// Active slots that the graph has room for.
        of: u32,
    },
    /// The task touches only the cache pages of one slot; its region is in the tensor's own index space
    /// `[active slot, head, split]`.
    PagesOfSlot,
}

/// A trust as people read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Assumption {
    /// Its name in files and messages.
    pub name: &'static str,
    /// What must hold, and who keeps it.
    pub invariant: &'static str,
    /// Where that is checked at run time.
    pub checked: &'static str,
}

/// Every assumption that the proof rests on.
pub const ASSUMPTIONS: [Assumption; 2] = [
    Assumption {
        name: "rows_of_slot",
        invariant: "in one iteration no row belongs to two active slots; the batch step deals them",
        checked: "by the region sanitizer, for every task: that the rows of active slots follow each other, and that the \
                  kernel leaves all others alone",
    },
    Assumption {
        name: "pages_of_slot",
        invariant: "no cache page belongs to two slots, and the splits of a slot share no position; the page allocator \
                    and the attention task keep it",
        checked: "by the page allocator, which gives no page twice, and whole in debug builds (MPK_DEBUG_CHECKS); by the \
                  region sanitizer, for every task: that the kernel touches pages of its slot only",
    },
];

impl Trust {
    /// Its entry in [`ASSUMPTIONS`].
    pub fn assumption(&self) -> &'static Assumption {
        match self {
            Trust::RowsOfSlot { .. } => &ASSUMPTIONS[0],
            Trust::PagesOfSlot => &ASSUMPTIONS[1],
        }
    }
}
