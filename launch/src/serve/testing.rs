//! For tests: a model whose engine accepts no request.

use super::backend::{Backend, Capabilities, Events, ModelInfo, Refusal, Sampling, Stats, Submission};
use super::state::Loaded;

struct Nothing;

impl Backend for Nothing {
    fn submit(&self, _: Vec<Submission>) -> Result<Vec<Events>, Refusal> {
        Err(Refusal::Full)
    }

    fn stats(&self) -> Stats {
        Stats::default()
    }
}

/// The model, without a tokenizer and a chat template.
pub(super) fn loaded() -> Loaded {
    Loaded {
        backend: Box::new(Nothing),
        model: ModelInfo {
            name: "m".into(),
            max_seq_len: 100,
            vocab_size: 300,
            max_batch: 4,
            defaults: Sampling::default(),
        },
        capabilities: Capabilities::default(),
        tokenizer: None,
        template: None,
    }
}
