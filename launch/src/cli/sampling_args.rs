//! Options for sampling.

use crate::model::app_error::AppError;
use crate::model::model_json::ModelJson;
use crate::model::model_source::Model;
use crate::model::sampling::{InForce, SamplingOptions, merge};

const SAMPLING: &str = "Sampling (overrides model.json, which overrides generation_config.json)";

/// How tokens are chosen.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct SamplingArgs {
    /// Always take the most likely token. Ignores the sampling values of model.json and generation_config.json.
    #[arg(long, conflicts_with_all = ["temperature", "top_k", "top_p", "min_p"], help_heading = SAMPLING)]
    greedy: bool,
    /// Divide the logits by T and sample. 0 takes the most likely token.
    #[arg(long, value_name = "T", allow_negative_numbers = true, help_heading = SAMPLING)]
    temperature: Option<f64>,
    /// Sample from the K most likely tokens. 0 means all; with --top-p, K is at most 1024.
    #[arg(long, value_name = "K", allow_negative_numbers = true, help_heading = SAMPLING)]
    top_k: Option<u32>,
    /// Sample from the smallest set of most likely tokens whose probabilities add up to P.
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = SAMPLING)]
    top_p: Option<f64>,
    /// Sample only tokens that are at least P times as likely as the most likely one.
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = SAMPLING)]
    min_p: Option<f64>,
    /// For each token that is already in the prompt or the answer, divide a positive logit by R and multiply a negative
    /// one by R.
    #[arg(long, value_name = "R", allow_negative_numbers = true, help_heading = SAMPLING)]
    repetition_penalty: Option<f64>,
    /// Subtract A from the logit of every token that is already in the answer.
    #[arg(long, value_name = "A", allow_negative_numbers = true, help_heading = SAMPLING)]
    presence_penalty: Option<f64>,
    /// Subtract A from a token's logit for each time that the token is already in the answer.
    #[arg(long, value_name = "A", allow_negative_numbers = true, help_heading = SAMPLING)]
    frequency_penalty: Option<f64>,
    /// Seed of the random numbers. The same seed gives the same tokens on any number of ranks. By default each run uses
    /// another seed.
    #[arg(long, value_name = "SEED", allow_negative_numbers = true, help_heading = SAMPLING)]
    seed: Option<u64>,
}

impl SamplingArgs {
    /// The options in the library's own type.
    pub fn options(&self) -> SamplingOptions {
        SamplingOptions {
            greedy: self.greedy,
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: self.seed,
        }
    }

    /// The name of the first option that was given.
    pub fn first_given(&self) -> Option<&'static str> {
        let given = [
            ("--greedy", self.greedy),
            ("--temperature", self.temperature.is_some()),
            ("--top-k", self.top_k.is_some()),
            ("--top-p", self.top_p.is_some()),
            ("--min-p", self.min_p.is_some()),
            ("--repetition-penalty", self.repetition_penalty.is_some()),
            ("--presence-penalty", self.presence_penalty.is_some()),
            ("--frequency-penalty", self.frequency_penalty.is_some()),
            ("--seed", self.seed.is_some()),
        ];
        given.into_iter().find_map(|(name, given)| given.then_some(name))
    }

    /// The sampling values in force. These options override model.json, which overrides generation_config.json.
    ///
    /// # Errors
    /// A value is out of range, or two values contradict each other.
    pub fn in_force(&self, model: &ModelJson, source: &Model) -> Result<InForce, AppError> {
        let file = (&*model.file(), &model.generate.sampling());
        let config = &source.config;
        Ok(merge(&self.options(), file, &config.generation, config.vocab_size)?)
    }
}
