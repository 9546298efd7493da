//! How a request's tokens are chosen.

use crate::engine::error::{Error, ErrorKind};
use distributed::plan::Sampling;
use serde::{Deserialize, Serialize};
use std::hash::{BuildHasher, Hasher};

/// How tokens are chosen. The default is greedy: the token with the highest logit; among equal ones, the lowest id.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// Divides the logits; 0 is greedy.
    pub temperature: f32,
    /// Keeps the most probable tokens whose probabilities add up to this; 1 keeps all.
    pub top_p: f32,
    /// Keeps this many of the most probable tokens; 0 keeps all.
    pub top_k: u32,
    /// Drops tokens whose probability is less than this share of the most probable token's; 0 keeps all.
    pub min_p: f32,
    /// Above 1, tokens of the prompt and the answer become less probable; 1 changes nothing.
    pub repetition_penalty: f32,
    /// Subtracted once from the logit of every token that is in the answer.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit for each time that it is in the answer.
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
    /// Converts the kernel's parameters. `seed` is the seed, if there is one.
    pub fn new(sampling: Sampling, seed: Option<u64>) -> SamplingParams {
        SamplingParams {
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            top_k: sampling.top_k,
            min_p: sampling.min_p,
            repetition_penalty: sampling.repetition_penalty,
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            seed,
        }
    }

    /// With a seed: its own, otherwise a random one.
    pub fn with_seed(self) -> SamplingParams {
        let drawn = || std::hash::RandomState::new().build_hasher().finish();
        SamplingParams { seed: Some(self.seed.unwrap_or_else(drawn)), ..self }
    }

    /// Refuses values that are out of range, and sampling if the engine was not loaded for it.
    pub(crate) fn check(&self, possible: bool, vocabulary: u32) -> Result<(), Error> {
        let within = |name: &str, value: f32, fits: bool, wanted: &str| match fits {
            true => Ok(()),
            false => {
                let message = format!("sampling.{name} is {value}");
                Err(Error::new(ErrorKind::Input, message).with_help(format!("give a value of {wanted}")))
            }
        };
        let t = self.temperature;
        within("temperature", t, (0.0..=100.0).contains(&t), "0 to 100")?;
        within("top_p", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0, "above 0 and at most 1")?;
        within("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "0 to 1")?;
        let r = self.repetition_penalty;
        within("repetition_penalty", r, (0.01..=100.0).contains(&r), "0.01 to 100")?;
        for (name, penalty) in
            [("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)]
        {
            within(name, penalty, (-2.0..=2.0).contains(&penalty), "-2 to 2")?;
        }
        let sampling = Sampling::from(*self);
        if sampling.is_greedy() {
            return Ok(());
        }
        if let Some(problem) = sampling.problem().filter(|_| sampling.top_k < vocabulary) {
            return Err(Error::new(ErrorKind::Input, format!("sampling.top_k: {problem}")));
        }
        if !possible {
            let message = "sampling: the engine was loaded for greedy decoding";
            return Err(Error::new(ErrorKind::Unsupported, message).with_help("set RunConfig::sampling"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_or_unsupported_sampling_values_are_refused_by_name() {
        let check = |params: SamplingParams| params.check(true, 5000).map_err(|e| e.message().to_string());
        let greedy = SamplingParams::default();
        assert_eq!(check(greedy), Ok(()));
        assert_eq!(greedy.check(false, 5000), Ok(()));
        let hot = SamplingParams { temperature: 0.7, ..greedy };
        assert_eq!(check(hot), Ok(()));
        assert_eq!(hot.check(false, 5000).unwrap_err().kind(), ErrorKind::Unsupported);
        for (wrong, name) in [
            (SamplingParams { temperature: -0.1, ..greedy }, "temperature"),
            (SamplingParams { temperature: f32::NAN, ..greedy }, "temperature"),
            (SamplingParams { top_p: 0.0, ..hot }, "top_p"),
            (SamplingParams { min_p: 2.0, ..hot }, "min_p"),
            (SamplingParams { frequency_penalty: 3.0, ..greedy }, "frequency_penalty"),
            (SamplingParams { top_k: 2000, top_p: 0.9, ..hot }, "top_k"),
        ] {
            assert!(check(wrong).unwrap_err().contains(name), "{wrong:?}");
        }
    }
}
