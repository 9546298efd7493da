//! model.json (schema `mpk-model/1`): which model to run, and how.

mod file;
mod overrides;
mod placements;
mod runtime;
mod sizes;
#[cfg(test)]
mod tests;

pub use file::{
    DEFAULT_MAX_BATCH, DEFAULT_MAX_NEW_TOKENS, DEFAULT_MAX_SEQ_LEN, DEFAULT_PAGE_SIZE, DEFAULT_PREFILL_CHUNK,
    DEFAULT_WIDE_PREFILL_CHUNK, Generate, LARGEST_MAX_BATCH, LARGEST_WORKERS, LONGEST_STOP, MOST_STOPS,
    ModelJson, RandomSeed, SCHEMA, Weights,
};
pub use overrides::Overrides;
pub use placements::{Placement, Placements};
pub use runtime::{Allreduce, AllreduceDtype, Embedding, Kv, PrefixCache, Runtime};
pub use sizes::Sizes;
