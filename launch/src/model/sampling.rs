//! Sampling values: merges those of the command line, model.json and generation_config.json, and checks them once.

use crate::model::{error::InputError, json::Fields};
use distributed::plan::Sampling;
use serde_json::{Map, Value};

/// `top_k` if generation_config.json says `do_sample: true` without a `top_k`; the same as in transformers.
const TRANSFORMERS_TOP_K: u32 = 50;

/// The values of one source. A value that is not set is taken from the next source.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SamplingOptions {
    /// Always take the highest logit. Ignores the values of sources of lower priority.
    pub greedy: bool,
    /// Divides the logits; 0 takes the highest logit.
    pub temperature: Option<f64>,
    /// Keep this many of the highest logits; 0 keeps all.
    pub top_k: Option<u32>,
    /// Keep the fewest tokens whose probabilities add up to at least this; 1 keeps all.
    pub top_p: Option<f64>,
    /// Keep tokens that have at least this share of the highest probability; 0 keeps all.
    pub min_p: Option<f64>,
    /// Divides positive logits of tokens in the prompt and the answer, and multiplies negative ones; 1 changes nothing.
    pub repetition_penalty: Option<f64>,
    /// Subtracted once from the logit of every token that is in the answer.
    pub presence_penalty: Option<f64>,
    /// Subtracted from a token's logit for each time that it is in the answer.
    pub frequency_penalty: Option<f64>,
    /// Key of the random numbers.
    pub seed: Option<u64>,
}

/// The sampling values of a checkpoint's generation_config.json.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GenerationConfig {
    /// `do_sample`: requests are sampled by default.
    pub do_sample: bool,
    /// The values.
    pub options: SamplingOptions,
    /// Fields that would change the answer in transformers, but have no effect here.
    pub ignored: Vec<String>,
}

/// Fields of generation_config.json that change the answer in transformers and have no effect here, unless they have the value that
/// changes nothing.
const WITHOUT_EFFECT: [&str; 25] = [
    "bad_words_ids",
    "begin_suppress_tokens",
    "constraints",
    "dola_layers",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "force_words_ids",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "guidance_scale",
    "max_time",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "num_beams",
    "penalty_alpha",
    "sequence_bias",
    "stop_strings",
    "suppress_tokens",
    "top_h",
    "typical_p",
    "watermarking_config",
];

/// True if a field without effect has a value that changes nothing in transformers either.
fn changes_nothing(name: &str, value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) => false,
        Value::Number(number) => {
            let one =
                matches!(name, "encoder_repetition_penalty" | "guidance_scale" | "num_beams" | "typical_p");
            number.as_f64() == Some(if one { 1.0 } else { 0.0 })
        }
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}

impl GenerationConfig {
    /// Reads generation_config.json.
    ///
    /// # Errors
    /// A field has the wrong type.
    pub fn parse(file: &str, map: &Map<String, Value>) -> Result<Self, InputError> {
        let fields = Fields::new(file, "", map);
        let options = SamplingOptions {
            temperature: fields.f64("temperature")?,
            // vLLM's value for all tokens.
            top_k: if map.get("top_k") == Some(&Value::from(-1)) { Some(0) } else { fields.u32("top_k")? },
            top_p: fields.f64("top_p")?,
            min_p: fields.f64("min_p")?,
            repetition_penalty: fields.f64("repetition_penalty")?,
            ..SamplingOptions::default()
        };
        let ignored = WITHOUT_EFFECT
            .iter()
            .filter(|&&name| map.get(name).is_some_and(|value| !changes_nothing(name, value)));
        Ok(GenerationConfig {
            do_sample: fields.bool("do_sample")? == Some(true),
            options,
            ignored: ignored.map(|name| name.to_string()).collect(),
        })
    }
}

/// A value and its source.
type Given<T> = Option<(T, String)>;

/// The values in force, each with its source.
#[derive(Debug, Clone, PartialEq, Default)]
struct Merged {
    temperature: Given<f64>,
    top_k: Given<u32>,
    top_p: Given<f64>,
    min_p: Given<f64>,
    repetition_penalty: Given<f64>,
    presence_penalty: Given<f64>,
    frequency_penalty: Given<f64>,
    seed: Given<u64>,
    /// True if a source asks for sampling.
    drawn: bool,
}

impl Merged {
    /// Adds a source of higher priority. `place` names one of its fields.
    fn add(&mut self, options: &SamplingOptions, asks: bool, place: impl Fn(&str) -> String) {
        if options.greedy {
            let seed = self.seed.take();
            *self = Merged { seed, ..Merged::default() };
        }
        let filters = options.top_k.is_some() || options.top_p.is_some() || options.min_p.is_some();
        if asks && (filters || options.temperature.is_some()) && !options.greedy {
            self.drawn = true;
        }
        fn put<T: Copy>(to: &mut Given<T>, value: Option<T>, place: impl Fn(&str) -> String, name: &str) {
            if let Some(value) = value {
                *to = Some((value, place(name)));
            }
        }
        put(&mut self.temperature, options.temperature, &place, "temperature");
        put(&mut self.top_k, options.top_k, &place, "top_k");
        put(&mut self.top_p, options.top_p, &place, "top_p");
        put(&mut self.min_p, options.min_p, &place, "min_p");
        put(&mut self.repetition_penalty, options.repetition_penalty, &place, "repetition_penalty");
        put(&mut self.presence_penalty, options.presence_penalty, &place, "presence_penalty");
        put(&mut self.frequency_penalty, options.frequency_penalty, &place, "frequency_penalty");
        put(&mut self.seed, options.seed, &place, "seed");
    }

    /// Checks the values in force. Without sampling, temperature and filters are not.
    fn check(&self) -> Result<(), InputError> {
        let within = |given: &Given<f64>, fits: fn(f64) -> bool, wanted: &str| match given {
            Some((value, place)) if !fits(*value) => Err(InputError::Option {
                place: place.clone(),
                problem: format!("must be {wanted}, found {}", short(*value)),
            }),
            _ => Ok(()),
        };
        if self.drawn {
            within(&self.temperature, |v| (0.0..=100.0).contains(&v), "0 to 100")?;
            within(&self.top_p, |v| v as f32 > 0.0 && v <= 1.0, "above 0 and at most 1")?;
            within(&self.min_p, |v| (0.0..=1.0).contains(&v), "0 to 1")?;
        }
        within(&self.repetition_penalty, |v| (0.01..=100.0).contains(&v), "0.01 to 100")?;
        within(&self.presence_penalty, |v| (-2.0..=2.0).contains(&v), "-2 to 2")?;
        within(&self.frequency_penalty, |v| (-2.0..=2.0).contains(&v), "-2 to 2")
    }
}

/// A number for people, without hundreds of digits.
pub(crate) fn short(value: f64) -> String {
    let plain = value == 0.0 || !value.is_finite() || (1e-5..1e16).contains(&value.abs());
    if plain { format!("{value}") } else { format!("{value:e}") }
}

/// The values in force.
#[derive(Debug, Clone, PartialEq)]
pub struct InForce {
    /// The values. Without a given seed, each run draws one.
    pub sampling: Sampling,
    /// The seed, if one was given.
    pub seed: Option<u64>,
}

/// Merges the values of all sources: the command line overrides model.json (`file`), which overrides
/// generation_config.json.
///
/// Tokens are sampled if the command line or model.json sets a temperature above 0, top_k, top_p or min_p, or if
/// generation_config.json says `do_sample: true`. If no source sets a temperature then, it is 1. Otherwise the highest
/// logit is taken. Penalties apply in both cases.
///
/// # Errors
/// A value in force is out of range, or not possible with a vocabulary of `vocabulary` tokens.
pub fn merge(
    command_line: &SamplingOptions,
    (file, model_json): (&str, &SamplingOptions),
    generation: &GenerationConfig,
    vocabulary: u32,
) -> Result<InForce, InputError> {
    let mut merged = Merged { drawn: generation.do_sample, ..Merged::default() };
    let mut defaults = generation.options.clone();
    if generation.do_sample {
        defaults.top_k = defaults.top_k.or(Some(TRANSFORMERS_TOP_K));
    }
    merged.add(&defaults, false, |name| format!("generation_config.json: `{name}`"));
    merged.add(model_json, true, |name| format!("{file}: `generate.{name}`"));
    merged.add(command_line, true, |name| format!("SamplingOptions::{name}"));
    merged.check()?;
    let number = |given: &Given<f64>, otherwise: f64| given.as_ref().map_or(otherwise, |g| g.0) as f32;
    let temperature = if merged.drawn { number(&merged.temperature, 1.0) } else { 0.0 };
    let drawn = temperature > 0.0;
    let top_k = merged.top_k.as_ref().map_or(0, |g| g.0);
    let sampling = Sampling {
        temperature,
        // The whole vocabulary means no limit, which is 0.
        top_k: if drawn && top_k < vocabulary { top_k } else { 0 },
        top_p: if drawn { number(&merged.top_p, 1.0) } else { 1.0 },
        min_p: if drawn { number(&merged.min_p, 0.0) } else { 0.0 },
        repetition_penalty: number(&merged.repetition_penalty, 1.0),
        presence_penalty: number(&merged.presence_penalty, 0.0),
        frequency_penalty: number(&merged.frequency_penalty, 0.0),
        seed: merged.seed.as_ref().map_or(0, |g| g.0),
    };
    if let Some(problem) = sampling.problem() {
        let place = merged.top_k.map_or_else(|| "top_k".to_string(), |g| g.1);
        return Err(InputError::Option { place, problem });
    }
    Ok(InForce { sampling, seed: merged.seed.map(|g| g.0) })
}

/// The values in force, for the log.
pub fn describe(sampling: &Sampling) -> String {
    let mut words = Vec::new();
    if sampling.temperature > 0.0 {
        words.push(format!("temperature {}", sampling.temperature));
        if sampling.top_k > 0 {
            words.push(format!("top-k {}", sampling.top_k));
        }
        if sampling.top_p < 1.0 {
            words.push(format!("top-p {}", sampling.top_p));
        }
        if sampling.min_p > 0.0 {
            words.push(format!("min-p {}", sampling.min_p));
        }
    } else {
        words.push("greedy".to_string());
    }
    for (name, value, none) in [
        ("repetition", sampling.repetition_penalty, 1.0),
        ("presence", sampling.presence_penalty, 0.0),
        ("frequency", sampling.frequency_penalty, 0.0),
    ] {
        if value != none {
            words.push(format!("{name} penalty {value}"));
        }
    }
    if sampling.temperature > 0.0 {
        words.push(format!("seed {}", sampling.seed));
    }
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn generation(value: Value) -> GenerationConfig {
        GenerationConfig::parse("generation_config.json", value.as_object().unwrap()).unwrap()
    }

    fn merged(line: SamplingOptions, model: SamplingOptions, config: Value) -> Result<InForce, String> {
        merge(&line, ("m.json", &model), &generation(config), 1000).map_err(|e| e.to_string())
    }

    fn text(line: SamplingOptions, model: SamplingOptions, config: Value) -> String {
        let mut found = merged(line, model, config).unwrap();
        found.sampling.seed = 7;
        describe(&found.sampling)
    }

    #[test]
    fn only_values_in_force_are_checked() {
        let none = SamplingOptions::default;
        let broken = json!({"do_sample": true, "temperature": -1, "repetition_penalty": 0});
        assert!(merged(none(), none(), broken.clone()).unwrap_err().contains("`temperature`"));
        let line = || SamplingOptions {
            temperature: Some(0.5),
            repetition_penalty: Some(1.0),
            ..SamplingOptions::default()
        };
        assert_eq!(text(line(), none(), broken.clone()), "temperature 0.5, top-k 50, seed 7");
        let greedy = SamplingOptions { greedy: true, ..none() };
        assert_eq!(text(greedy, none(), broken), "greedy");
        assert_eq!(text(none(), none(), json!({"do_sample": false, "temperature": 99999})), "greedy");
        assert_eq!(text(none(), none(), json!({"do_sample": true, "top_k": -1})), "temperature 1, seed 7");
        let line = SamplingOptions { presence_penalty: Some(1e39), ..none() };
        assert!(merged(line, none(), json!({})).unwrap_err().ends_with("found 1e39"));
    }

    #[test]
    fn fields_without_effect_are_named() {
        let config = json!({"num_beams": 4, "typical_p": 1.0, "min_length": 0, "suppress_tokens": [1], "bad_words_ids": null});
        assert_eq!(generation(config).ignored, ["num_beams", "suppress_tokens"]);
    }

    #[test]
    fn the_command_line_goes_before_model_json_before_generation_config() {
        let none = SamplingOptions::default;
        assert_eq!(text(none(), none(), json!({})), "greedy");
        // A configuration that does not sample still supplies values for a source that asks for sampling.
        let waits = json!({"temperature": 0.6, "top_p": 0.9});
        assert_eq!(text(none(), none(), waits.clone()), "greedy");
        let asks = SamplingOptions { top_k: Some(5), ..none() };
        assert_eq!(text(asks, none(), waits), "temperature 0.6, top-k 5, top-p 0.9, seed 7");
        // The same values as in transformers.
        let samples =
            json!({"do_sample": true, "temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.05});
        let wanted = "temperature 0.6, top-k 50, top-p 0.95, repetition penalty 1.05, seed 7";
        assert_eq!(text(none(), none(), samples.clone()), wanted);
        assert_eq!(text(none(), none(), json!({"do_sample": true})), "temperature 1, top-k 50, seed 7");
        let model = SamplingOptions { temperature: Some(0.8), top_k: Some(0), ..none() };
        let line = SamplingOptions { temperature: Some(0.3), ..none() };
        let wanted = "temperature 0.3, top-p 0.95, repetition penalty 1.05, seed 7";
        assert_eq!(text(line, model, samples.clone()), wanted);
        let zero = SamplingOptions { temperature: Some(0.0), ..none() };
        assert_eq!(text(zero, none(), samples.clone()), "greedy, repetition penalty 1.05");
        let greedy = SamplingOptions { greedy: true, ..none() };
        assert_eq!(text(greedy.clone(), none(), samples.clone()), "greedy");
        // model.json says greedy, but the command line asks for sampling: model.json's other values apply.
        let line = SamplingOptions { top_p: Some(0.5), ..none() };
        assert_eq!(text(line, greedy, samples), "temperature 1, top-p 0.5, seed 7");
        // More than the vocabulary means all of it. A seed alone does not ask for sampling.
        let line = SamplingOptions { top_k: Some(5000), ..none() };
        assert_eq!(text(line, none(), json!({})), "temperature 1, seed 7");
        let line = SamplingOptions { seed: Some(3), ..none() };
        assert_eq!(text(line, none(), json!({})), "greedy");
    }

    #[test]
    fn values_out_of_range_are_refused_by_name() {
        let none = SamplingOptions::default;
        let line = SamplingOptions { temperature: Some(-1.0), ..none() };
        let error = merged(line.clone(), none(), json!({})).unwrap_err();
        assert_eq!(error, "SamplingOptions::temperature: must be 0 to 100, found -1");
        let model = SamplingOptions { top_p: Some(0.0), ..none() };
        let error = merged(none(), model.clone(), json!({})).unwrap_err();
        assert_eq!(error, "m.json: `generate.top_p`: must be above 0 and at most 1, found 0");
        let error = merged(none(), none(), json!({"min_p": 2, "do_sample": true})).unwrap_err();
        assert_eq!(error, "generation_config.json: `min_p`: must be 0 to 1, found 2");
        // The kernels take 32 bits, in which this is 0.
        let tiny = SamplingOptions { top_p: Some(1e-300), ..none() };
        assert!(
            merged(tiny, none(), json!({}))
                .unwrap_err()
                .starts_with("SamplingOptions::top_p: must be above 0")
        );
        // An invalid value does not matter if another source overrides it.
        let line = SamplingOptions { top_p: Some(0.5), ..none() };
        assert!(merged(line, model, json!({})).is_ok());
        let nan = SamplingOptions { frequency_penalty: Some(f64::NAN), ..none() };
        assert!(
            merged(nan, none(), json!({}))
                .unwrap_err()
                .starts_with("SamplingOptions::frequency_penalty: must be")
        );
        let both = SamplingOptions { top_k: Some(2000), top_p: Some(0.9), ..none() };
        let error =
            merge(&both, ("m.json", &none()), &GenerationConfig::default(), 5000).unwrap_err().to_string();
        assert!(error.starts_with("SamplingOptions::top_k: ") && error.contains("1024"), "{error}");
        let wrong = json!({"top_k": "many"});
        assert!(GenerationConfig::parse("g.json", wrong.as_object().unwrap()).is_err());
    }
}
