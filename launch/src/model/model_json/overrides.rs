//! Values that a program uses in place of those of model.json, such as its command-line options.

use super::placements::Placement;
use super::runtime::{Allreduce, AllreduceDtype, Kv, PrefixCache};

/// Values that replace those of model.json, if given.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Overrides {
    /// `max_batch`.
    pub max_batch: Option<u32>,
    /// `max_seq_len`.
    pub max_seq_len: Option<u32>,
    /// `runtime.placement`, for all graphs.
    pub placement: Option<Placement>,
    /// `runtime.allreduce`.
    pub allreduce: Option<Allreduce>,
    /// `runtime.allreduce_dtype`.
    pub allreduce_dtype: Option<AllreduceDtype>,
    /// `runtime.prefill_share`.
    pub prefill_share: Option<f64>,
    /// `runtime.kv`.
    pub kv: Option<Kv>,
    /// `runtime.prefix_cache`.
    pub prefix_cache: Option<PrefixCache>,
    /// `runtime.workers`.
    pub workers: Option<u32>,
    /// `runtime.prefill_chunk`.
    pub prefill_chunk: Option<u32>,
    /// `generate.max_new_tokens`.
    pub max_new_tokens: Option<u32>,
    /// `generate.ignore_eos`, if true.
    pub ignore_eos: bool,
    /// `generate.stop`.
    pub stop: Option<Vec<String>>,
}

impl Overrides {
    /// The name of the value that replaces a field, for messages.
    pub(super) fn name(&self, field: &str) -> Option<&'static str> {
        let (given, name) = match field {
            "max_batch" => (self.max_batch.is_some(), "Overrides::max_batch"),
            "max_seq_len" => (self.max_seq_len.is_some(), "Overrides::max_seq_len"),
            "runtime.prefill_share" => (self.prefill_share.is_some(), "Overrides::prefill_share"),
            "runtime.workers" => (self.workers.is_some(), "Overrides::workers"),
            "generate.stop" => (self.stop.is_some(), "Overrides::stop"),
            "generate.max_new_tokens" => (self.max_new_tokens.is_some(), "Overrides::max_new_tokens"),
            _ => return None,
        };
        given.then_some(name)
    }
}
