//! What is asked of the engine.

use crate::engine::sampling::SamplingParams;
pub use crate::model::prompts::Prompt;

/// One request.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Text, or token ids.
    pub prompt: Prompt,
    /// New tokens at most. The answer is shorter where `max_seq_len` or the KV cache leaves less room.
    pub max_new_tokens: u32,
    /// An end-of-sequence token, a stop token or a stop string ends it only after so many new tokens.
    pub min_new_tokens: u32,
    /// Go on after an end-of-sequence token.
    pub ignore_eos: bool,
    /// Log-probabilities that are wanted for each new token, at most [`RunConfig::logprobs`].
    ///
    /// [`RunConfig::logprobs`]: crate::engine::RunConfig::logprobs
    pub logprobs: u32,
    /// The answer ends before the first of these texts.
    pub stop: Vec<String>,
    /// The answer ends with the first of these tokens. Its text is left out.
    pub stop_token_ids: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// The answer is wanted as a whole: whoever waits for it is woken by the first token and by the end only. On the CPU target this leaves
    /// the cores to the workers.
    pub whole: bool,
}

impl Request {
    /// A request for at most `max_new_tokens` tokens that follow `prompt`, by greedy decoding.
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

    /// A prompt of text. The tokenizer encodes it as it does by default, without a chat template.
    pub fn text(prompt: impl Into<String>, max_new_tokens: u32) -> Request {
        Request::new(Prompt::Text(prompt.into()), max_new_tokens)
    }

    /// A prompt of token ids.
    pub fn tokens(prompt: impl Into<Vec<u32>>, max_new_tokens: u32) -> Request {
        Request::new(Prompt::Tokens(prompt.into()), max_new_tokens)
    }
}
