//! How a request's tokens are chosen.

use crate::engine::error::{Error, ErrorKind};
use distributed::plan::Sampling;
use serde::{Deserialize, Serialize};

/// How tokens are chosen. The default is greedy: the token with the highest logit, the lowest id of equal ones.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// Divides the logits; 0 is greedy.
    pub temperature: f32,
    /// Keeps the most probable tokens whose probabilities add up to this; 1 keeps all.
    pub top_p: f32,
    /// Keeps this many of the most probable tokens; 0 keeps all.
    pub top_k: u32,
    /// Drops tokens whose probability is less than this share of the best token's; 0 keeps all.
    pub min_p: f32,
    /// Above 1, tokens of the prompt and the answer become less probable; 1 changes nothing.
    pub repetition_penalty: f32,
    /// Is subtracted from the logits of tokens of the answer, once each.
    pub presence_penalty: f32,
    /// Is subtracted from the logits of tokens of the answer, for each time that they occurred.
    pub frequency_penalty: f32,
    /// Equal seeds give equal tokens.
    pub seed: Option<u64>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: None,
        }
    }
}

impl From<SamplingParams> for Sampling {
    fn from(params: SamplingParams) -> Sampling {
        Sampling {
            temperature: params.temperature,
            top_k: params.top_k,
            top_p: params.top_p,
            min_p: params.min_p,
            repetition_penalty: params.repetition_penalty,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            seed: params.seed.unwrap_or_default(),
        }
    }
}

impl SamplingParams {
    /// Refuses, by name, what the engine does not do yet. A seed, and filters of a greedy request, change nothing.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let not_default = [
            ("temperature", self.temperature != 0.0),
            ("repetition_penalty", self.repetition_penalty != 1.0),
            ("presence_penalty", self.presence_penalty != 0.0),
            ("frequency_penalty", self.frequency_penalty != 0.0),
        ];
        match not_default.into_iter().find(|&(_, set)| set) {
            None => Ok(()),
            Some((name, _)) => {
                let message = format!("sampling.{name}: only greedy decoding is implemented");
                Err(Error::new(ErrorKind::Unsupported, message).with_help("leave it at its default"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_greedy_is_refused_by_name() {
        assert_eq!(SamplingParams::default().check(), Ok(()));
        assert_eq!(SamplingParams { seed: Some(1), top_k: 3, ..SamplingParams::default() }.check(), Ok(()));
        let hot = SamplingParams { temperature: 0.7, ..SamplingParams::default() };
        let error = hot.check().unwrap_err();
        assert!(error.kind() == ErrorKind::Unsupported && error.message().contains("temperature"), "{error}");
        let penalty = SamplingParams { frequency_penalty: -1.0, ..SamplingParams::default() };
        assert!(penalty.check().unwrap_err().message().contains("frequency_penalty"));
    }
}
