//! Requests to the engine.

use crate::engine::sampling::SamplingParams;
pub use crate::model::prompts::Prompt;

/// One request.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Text or token ids.
    pub prompt: Prompt,
    /// Maximum number of new tokens. The answer is shorter if `max_seq_len` or the KV cache leaves less room.
    pub max_new_tokens: u32,
    /// End-of-sequence tokens, stop tokens and stop strings end the answer only after this many new tokens. A stop string counts if
    /// it ends after them.
    pub min_new_tokens: u32,
    /// Continue after an end-of-sequence token.
    pub ignore_eos: bool,
    /// Number of log-probabilities per new token, at most [`RunConfig::logprobs`]. Above 0, the new token's own one is given, too.
    ///
    /// [`RunConfig::logprobs`]: crate::engine::RunConfig::logprobs
    pub logprobs: u32,
    /// The answer ends before the first of these texts.
    pub stop: Vec<String>,
    /// The answer ends with the first of these tokens. The text of that token is left out.
    pub stop_token_ids: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Deliver the answer as a whole: a waiting reader is woken only by the first token and by the end. On the CPU target this leaves the
    /// cores to the workers.
    pub whole: bool,
}

impl Request {
    /// A request for up to `max_new_tokens` tokens after `prompt`, with greedy decoding.
    pub fn new(prompt: Prompt, max_new_tokens: u32) -> Request {
        Request {
            prompt,
            max_new_tokens,
            min_new_tokens: 0,
            ignore_eos: false,
            logprobs: 0,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            sampling: SamplingParams::default(),
            whole: false,
        }
    }

    /// A text prompt. It is encoded with the tokenizer's defaults, without a chat template.
    pub fn text(prompt: impl Into<String>, max_new_tokens: u32) -> Request {
        Request::new(Prompt::Text(prompt.into()), max_new_tokens)
    }

    /// A prompt of token ids.
    pub fn tokens(prompt: impl Into<Vec<u32>>, max_new_tokens: u32) -> Request {
        Request::new(Prompt::Tokens(prompt.into()), max_new_tokens)
    }
}
