//! What the proof takes on trust, all of it.
//!
//! The verifier decides on bytes, which it computes from the views that kernels get. Known only at run time is
//! which rows a slot or a task has, and which pages its cache has. There a task names a [`Trust`], and its region stands
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
    /// The task touches only the rows of what falls to it of the iteration's work; its region's rows are the task's
    /// *share*, R task/of .. R (task + 1)/of of R. Whoever names rows without this trust may meet those of any task.
    RowsOfUnits {
        /// The task's number among those that share the work.
        task: u32,
        /// How many they are.
        of: u32,
    },
    /// The task touches only the cache pages of rows of the iteration that fall to it; its region is in the tensor's own
    /// index space.
    PagesOfRows,
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
pub const ASSUMPTIONS: [Assumption; 4] = [
    Assumption {
        name: "rows_of_slot",
        invariant: "in one iteration no row belongs to two active slots; the batch step deals them",
        checked: "by the region sanitizer, for every task: that the rows of active slots follow each other, and that the \
                  kernel leaves all others alone",
    },
    Assumption {
        name: "pages_of_slot",
        invariant: "one owner writes: a cache page that one slot writes belongs to no other, what several slots have nobody \
                    writes, and the splits of a slot share no position. An iteration writes only positions from the slot's \
                    context on, so earlier ones may be read ahead of a task's events; the page allocator and the attention \
                    task keep it",
        checked: "by the page allocator, which gives no page to a second owner, and whole in debug builds (MPK_DEBUG_CHECKS); \
                  by the region sanitizer, for every task: that the kernel touches pages of its slot only, and writes none \
                  of those that were full before the iteration",
    },
    Assumption {
        name: "rows_of_units",
        invariant: "the units of an iteration are disjoint: each task has what lies between two neighbouring cuts of one \
                    order, and the cuts follow from the batch",
        checked: "by the CPU's tasks: that their cuts are in order",
    },
    Assumption {
        name: "pages_of_rows",
        invariant: "no two rows of an iteration have the same slot and position; the batch step deals them",
        checked: "by the kernels: that each position they touch has a page of the cache",
    },
];

impl Trust {
    /// Its entry in [`ASSUMPTIONS`].
    pub fn assumption(&self) -> &'static Assumption {
        match self {
            Trust::RowsOfSlot { .. } => &ASSUMPTIONS[0],
            Trust::PagesOfSlot => &ASSUMPTIONS[1],
            Trust::RowsOfUnits { .. } => &ASSUMPTIONS[2],
            Trust::PagesOfRows => &ASSUMPTIONS[3],
        }
    }

    /// The region's rows stand for rows that are known at run time only.
    pub fn of_rows(&self) -> bool {
        matches!(self, Trust::RowsOfSlot { .. } | Trust::RowsOfUnits { .. })
    }

    /// The region is in a cache's own index space and stands for pages.
    pub fn of_pages(&self) -> bool {
        matches!(self, Trust::PagesOfSlot | Trust::PagesOfRows)
    }
}
