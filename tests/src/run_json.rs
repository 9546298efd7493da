//! The object that `mpk-run --json` prints, schema mpk-run/1, read strictly: exactly these fields.

use serde::{Deserialize, Deserializer};
use serde_json::Value;
use std::collections::BTreeMap;

/// The whole object.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct RunJson {
    /// "mpk-run/1".
    pub schema: String,
    /// "cpu" or "cuda".
    pub backend: String,
    /// Number of ranks.
    pub tp: u32,
    /// In the order of submission.
    pub requests: Vec<RequestJson>,
    /// For a user's own op graph: its named outputs.
    #[serde(default)]
    pub outputs: BTreeMap<String, Output>,
    /// Times of the run.
    pub timing: Timing,
}

/// Result of one request.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct RequestJson {
    /// The prompt, encoded.
    pub prompt_tokens: Vec<u32>,
    /// The new tokens.
    pub tokens: Vec<u32>,
    /// Their text; null without tokenizer. Never absent.
    #[serde(deserialize_with = "present")]
    pub text: Option<String>,
    /// "length" or "eos".
    pub finish_reason: String,
    /// The log-probability of each new token; only with `--logprobs`.
    pub token_logprobs: Option<Vec<f64>>,
    /// For each new token the best `[token, logprob]`, highest first; only with `--logprobs`.
    pub logprobs: Option<Vec<Vec<(u32, f64)>>>,
}

/// A whole tensor of the user's own op graph.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Output {
    /// Such as `f32`.
    pub dtype: String,
    /// Global dimensions.
    pub dims: Vec<u64>,
    /// Row-major.
    pub values: Vec<f64>,
}

/// Times in seconds.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Timing {
    /// Until the weights are in place.
    pub load_s: f64,
    /// Iterations with any prompt row.
    pub prefill_s: f64,
    /// All other iterations.
    pub decode_s: f64,
    /// Number of those.
    pub decode_steps: u64,
    /// 1000 x decode_s / decode_steps.
    pub ms_per_token: f64,
    /// On a GPU: from the task graphs to the loaded cubin.
    pub compile_s: Option<f64>,
    /// On a GPU: to copy the weights there.
    pub weights_s: Option<f64>,
    /// On a GPU: weights of all ranks.
    pub weights_bytes: Option<u64>,
}

impl RunJson {
    /// The new tokens of every request.
    pub fn tokens(&self) -> Vec<Vec<u32>> {
        self.requests.iter().map(|r| r.tokens.clone()).collect()
    }

    /// Everything that must not differ from run to run: tokens, texts, reasons and the bits of the log-probabilities.
    pub fn result(&self) -> Vec<Outcome> {
        let bits = |lists: &Vec<Vec<(u32, f64)>>| {
            lists
                .iter()
                .map(|l| l.iter().map(|&(token, logprob)| (token, logprob.to_bits())).collect())
                .collect()
        };
        let outcome = |r: &RequestJson| Outcome {
            prompt_tokens: r.prompt_tokens.clone(),
            tokens: r.tokens.clone(),
            text: r.text.clone(),
            finish_reason: r.finish_reason.clone(),
            token_logprob_bits: r.token_logprobs.iter().flatten().map(|logprob| logprob.to_bits()).collect(),
            logprob_bits: r.logprobs.as_ref().map(bits).unwrap_or_default(),
        };
        self.requests.iter().map(outcome).collect()
    }
}

/// The parts of a request's result that must be the same in every run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The prompt.
    pub prompt_tokens: Vec<u32>,
    /// The new tokens.
    pub tokens: Vec<u32>,
    /// Their text.
    pub text: Option<String>,
    /// Why it ended.
    pub finish_reason: String,
    /// The bits of the tokens' own log-probabilities.
    pub token_logprob_bits: Vec<u64>,
    /// The log-probabilities' bits.
    pub logprob_bits: Vec<Vec<(u32, u64)>>,
}

/// An optional value whose field must be present: otherwise serde takes an absent field for `None`.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    match Value::deserialize(deserializer)? {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(text)),
        other => Err(serde::de::Error::custom(format!("expected a string or null, found {other}"))),
    }
}
