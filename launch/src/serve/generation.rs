//! The fields that completions and chats share: how many tokens to generate, how to choose them, and when to stop.

use super::backend::{Capabilities, ModelInfo, Sampling};
use super::error::ApiError;
use super::fields::{Fields, wrong};
use super::limits::Limits;
use super::refused;
use kernels_cu::tasks::sample_partial::MOST_LISTED;
use serde_json::Value;

/// A request without its prompts.
#[derive(Clone, Debug)]
pub struct Generation {
    /// Answer with server-sent events.
    pub stream: bool,
    /// Send the numbers of tokens as a last event.
    pub include_usage: bool,
    /// Number of answers per prompt.
    pub n: usize,
    /// Maximum number of new tokens, if the request sets it.
    pub max_tokens: Option<u32>,
    /// The name of the field that sets it.
    pub max_tokens_name: &'static str,
    /// The answer does not end before this many new tokens.
    pub min_tokens: u32,
    /// Continue after an end-of-sequence token.
    pub ignore_eos: bool,
    /// Further token ids that end an answer.
    pub stop_token_ids: Vec<u32>,
    /// Strings that end an answer.
    pub stop: Vec<String>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Return the log-probabilities of the chosen token and of this many of the best tokens.
    pub logprobs: Option<u32>,
    /// Return token ids in addition to the text.
    pub return_token_ids: bool,
}

/// Reads and checks the shared fields, and checks that the request's model is this one. Each endpoint reads its own `logprobs`.
/// Without a tokenizer (`has_text` is false), answers have no text. `least` is the minimum number of new tokens that a request may ask
/// for.
///
/// # Errors
/// A field is wrong, or asks for something that the engine does not support.
pub fn read(
    fields: &mut Fields,
    model: &ModelInfo,
    can: &Capabilities,
    has_text: bool,
    limits: &Limits,
    least: u32,
) -> Result<Generation, ApiError> {
    check_model(fields, model)?;
    refused::check(fields)?;
    let stream = fields.flag("stream")?;
    let include_usage = match fields.object("stream_options")? {
        None => false,
        Some(_) if !stream => {
            let message =
                "`stream_options` needs `stream`: set `stream` to true, or leave `stream_options` out";
            return Err(ApiError::field("stream_options", message));
        }
        Some(mut options) => {
            let value = options.remove("include_usage").filter(|value| !value.is_null());
            let flag = value.map(|v| {
                v.as_bool().ok_or_else(|| wrong("stream_options.include_usage", "true or false", &v))
            });
            flag.transpose()?.unwrap_or(false)
        }
    };
    let n = fields.integer("n", 1, limits.choices as i64)?.unwrap_or(1);
    if let Some(best) = fields.integer("best_of", 1, limits.choices as i64)?
        && best != n
    {
        let message = format!("`best_of` must equal `n` ({n}); other values are not supported");
        return Err(ApiError::unsupported("best_of", message));
    }
    let most = i64::from(u32::MAX);
    let least = i64::from(least);
    let older = fields.integer("max_tokens", least, most)?;
    let newer = fields.integer("max_completion_tokens", least, most)?;
    let max_tokens_name = if newer.is_some() { "max_completion_tokens" } else { "max_tokens" };
    let max_tokens = newer.or(older).map(|value| value as u32);
    let min_tokens = fields.integer("min_tokens", 0, most)?.unwrap_or(0) as u32;
    if min_tokens > 0 {
        require(can.min_tokens, "min_tokens")?;
        if max_tokens.is_some_and(|max_tokens| min_tokens > max_tokens) {
            let message = format!("`min_tokens` is more than `{max_tokens_name}`");
            return Err(ApiError::field("min_tokens", message));
        }
    }
    let ignore_eos = fields.flag("ignore_eos")?;
    if ignore_eos {
        require(can.ignore_eos, "ignore_eos")?;
    }
    let stop_token_ids = fields.ids("stop_token_ids", model.vocab_size)?;
    if stop_token_ids.len() > limits.stops {
        let message = format!("at most {} `stop_token_ids` are possible", limits.stops);
        return Err(ApiError::field("stop_token_ids", message));
    }
    Ok(Generation {
        stream,
        include_usage,
        n: n as usize,
        max_tokens,
        max_tokens_name,
        min_tokens,
        ignore_eos,
        stop_token_ids,
        stop: stops(fields, limits, has_text)?,
        sampling: sampling(fields, model, can)?,
        logprobs: None,
        return_token_ids: fields.flag("return_token_ids")?,
    })
}

/// Checks that the request names this model, or none.
///
/// # Errors
/// It names another model.
pub fn check_model(fields: &mut Fields, model: &ModelInfo) -> Result<(), ApiError> {
    match fields.text("model")? {
        Some(name) if name != model.name => Err(ApiError::no_model(&name, &model.name)),
        _ => Ok(()),
    }
}

/// Checks the number of log-probabilities that a request asks for.
///
/// # Errors
/// The engine returns none, or fewer.
pub fn check_logprobs(name: &str, asked: u32, can: &Capabilities) -> Result<u32, ApiError> {
    match can.logprobs {
        None => {
            let message = format!("`{name}`: log-probabilities are off; start the server with --logprobs K");
            Err(ApiError::unsupported(name, message))
        }
        Some(most) if asked > most => {
            let value = Value::from(asked);
            Err(wrong(name, &format!("at most {most}"), &value))
        }
        Some(_) => Ok(asked),
    }
}

fn stops(fields: &mut Fields, limits: &Limits, has_text: bool) -> Result<Vec<String>, ApiError> {
    let stops = fields.strings("stop")?;
    if !stops.is_empty() && !has_text {
        let message =
            "`stop`: the model has no tokenizer.json, so answers have no text; use `stop_token_ids`";
        return Err(ApiError::field("stop", message));
    }
    if stops.len() > limits.stops {
        return Err(ApiError::field("stop", format!("at most {} stop strings are possible", limits.stops)));
    }
    if stops.iter().any(|stop| stop.is_empty() || stop.len() > limits.stop_bytes) {
        let message = format!("a stop string must have 1 to {} bytes", limits.stop_bytes);
        return Err(ApiError::field("stop", message));
    }
    Ok(stops)
}

/// The sampling values of the request, with the model's defaults for missing ones.
fn sampling(fields: &mut Fields, model: &ModelInfo, can: &Capabilities) -> Result<Sampling, ApiError> {
    let defaults = &model.defaults;
    let temperature = fields.number("temperature", "from 0 to 100", |n| (0.0..=100.0).contains(&n))?;
    let top_p = fields.number("top_p", "above 0 and at most 1", |n| n > 0.0 && n <= 1.0)?;
    // -1 keeps all, as in other servers.
    let top_k = fields.integer("top_k", -1, i64::from(u32::MAX))?.map(|k| k.max(0) as u32);
    let min_p = fields.number("min_p", "from 0 to 1", |n| (0.0..=1.0).contains(&n))?;
    let seed = fields.integer("seed", i64::MIN, i64::MAX)?.map(|seed| seed as u64);
    let two = |n: f32| (-2.0..=2.0).contains(&n);
    let presence = fields.number("presence_penalty", "from -2 to 2", two)?;
    let frequency = fields.number("frequency_penalty", "from -2 to 2", two)?;
    let repetition =
        fields.number("repetition_penalty", "from 0.01 to 100", |n| (0.01..=100.0).contains(&n))?;
    let mut sampling = Sampling {
        temperature: temperature.unwrap_or(defaults.temperature),
        top_p: top_p.unwrap_or(defaults.top_p),
        top_k: top_k.unwrap_or(defaults.top_k),
        min_p: min_p.unwrap_or(defaults.min_p),
        seed: seed.or(defaults.seed),
        presence_penalty: presence.unwrap_or(defaults.presence_penalty),
        frequency_penalty: frequency.unwrap_or(defaults.frequency_penalty),
        repetition_penalty: repetition.unwrap_or(defaults.repetition_penalty),
    };
    let narrowed = [
        ("top_p", top_p.is_some_and(|p| p < 1.0)),
        ("top_k", top_k.is_some_and(|k| k > 1)),
        ("min_p", min_p.is_some_and(|p| p > 0.0)),
    ];
    // A request that narrows the choice of tokens wants to sample, with OpenAI's default temperature.
    let asked = narrowed.iter().find_map(|&(name, given)| given.then_some(name));
    if temperature.is_none() && sampling.temperature == 0.0 && asked.is_some() {
        sampling.temperature = 1.0;
    }
    if sampling.top_k == 1 {
        sampling.temperature = 0.0;
    }
    if sampling.temperature > 0.0 {
        let name = if temperature.is_some() { "temperature" } else { asked.unwrap_or("temperature") };
        if !can.sampling {
            let message = format!(
                "`{name}`: this engine only decodes greedily; set `temperature` to 0, or leave out the sampling fields"
            );
            return Err(ApiError::unsupported(name, message));
        }
    }
    let mut is_greedy = sampling.temperature == 0.0;
    for (name, value, neutral) in [
        ("presence_penalty", sampling.presence_penalty, 0.0),
        ("frequency_penalty", sampling.frequency_penalty, 0.0),
        ("repetition_penalty", sampling.repetition_penalty, 1.0),
    ] {
        if value != neutral {
            require(can.penalties, name)?;
            is_greedy = false;
        }
    }
    // The kernels list the candidates if `top_p` needs them.
    let k = sampling.top_k;
    if !is_greedy && sampling.top_p < 1.0 && k > MOST_LISTED && k < model.vocab_size {
        let message = format!("`top_k` must be at most {MOST_LISTED} if `top_p` is below 1, found {k}");
        return Err(ApiError::field("top_k", message));
    }
    Ok(sampling)
}

fn require(possible: bool, name: &str) -> Result<(), ApiError> {
    if possible { Ok(()) } else { Err(cannot(name)) }
}

fn cannot(name: &str) -> ApiError {
    ApiError::unsupported(name, format!("`{name}` is not supported by this engine; leave it out"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const ALL: Capabilities = Capabilities {
        sampling: true,
        penalties: true,
        min_tokens: true,
        ignore_eos: true,
        logprobs: Some(20),
    };

    fn model() -> ModelInfo {
        ModelInfo {
            name: "m".into(),
            max_seq_len: 100,
            vocab_size: 50,
            max_batch: 4,
            defaults: Sampling::default(),
        }
    }

    fn read_with(value: Value, can: Capabilities) -> Result<Generation, ApiError> {
        let Value::Object(object) = value else { panic!("an object") };
        read(&mut Fields(object), &model(), &can, true, &Limits::default(), 1)
    }

    #[test]
    fn stop_strings_need_a_tokenizer() {
        let read = |value: Value, has_text| match value {
            Value::Object(object) => {
                read(&mut Fields(object), &model(), &ALL, has_text, &Limits::default(), 1)
            }
            other => panic!("{other}"),
        };
        for stop in [json!("x"), json!(["x", "y"])] {
            assert!(read(json!({"stop": stop.clone()}), true).is_ok(), "{stop}");
            let error = read(json!({ "stop": stop }), false).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some("stop")));
            assert!(error.message.contains("stop_token_ids"), "{}", error.message);
        }
        for none in [json!({}), json!({"stop": null}), json!({"stop": []})] {
            assert!(read(none.clone(), false).is_ok(), "{none}");
        }
    }

    #[test]
    fn wrong_values_name_their_field() {
        for (name, values) in [
            ("temperature", vec![json!(-1), json!("1"), json!(100.1), json!(1e308), json!([]), json!(true)]),
            ("top_p", vec![json!(0), json!(1e-300), json!(1.1), json!({})]),
            ("top_k", vec![json!(-2), json!(1.5), json!(1e30)]),
            ("min_p", vec![json!(-0.1), json!(2)]),
            ("seed", vec![json!("a"), json!(0.5)]),
            ("n", vec![json!(0), json!(1000), json!(-1)]),
            ("max_tokens", vec![json!(0), json!(-5), json!("many"), json!(1u64 << 40)]),
            ("max_completion_tokens", vec![json!(0), json!(2.5)]),
            ("min_tokens", vec![json!(-1)]),
            ("presence_penalty", vec![json!(3), json!("x")]),
            ("frequency_penalty", vec![json!(-2.1)]),
            ("repetition_penalty", vec![json!(0), json!(-1), json!(0.009), json!(101), json!(1e300)]),
            ("stop", vec![json!(1), json!([1]), json!(""), json!(vec!["x"; 100]), json!("x".repeat(5000))]),
            ("stop_token_ids", vec![json!("1"), json!(vec![1; 100])]),
            ("stop_token_ids[0]", vec![]),
            ("stream", vec![json!("yes"), json!(1)]),
            ("ignore_eos", vec![json!(0)]),
            ("model", vec![json!(5), json!("other")]),
        ] {
            for value in values {
                let error = read_with(json!({ name: value }), ALL).unwrap_err();
                assert_eq!(error.param.as_deref(), Some(name), "{}", error.message);
            }
        }
        let error = read_with(json!({"stop_token_ids": [50]}), ALL).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("stop_token_ids[0]"));
        let error = read_with(json!({"stream_options": {"include_usage": true}}), ALL).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("stream_options"));
        let error =
            read_with(json!({"stream": true, "stream_options": {"include_usage": 1}}), ALL).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("stream_options.include_usage"));
    }

    #[test]
    fn fields_that_the_engine_does_not_support_are_refused_by_name() {
        let none = Capabilities::default();
        for (name, value) in [
            ("temperature", json!(0.7)),
            ("top_p", json!(0.5)),
            ("top_k", json!(5)),
            ("min_p", json!(0.1)),
            ("presence_penalty", json!(0.1)),
            ("frequency_penalty", json!(-1)),
            ("repetition_penalty", json!(1.1)),
            ("min_tokens", json!(1)),
            ("ignore_eos", json!(true)),
        ] {
            let error = read_with(json!({ name: value.clone() }), none).unwrap_err();
            assert_eq!((error.param.as_deref(), error.code), (Some(name), Some("unsupported_parameter")));
            assert!(read_with(json!({ name: value }), ALL).is_ok(), "{name}");
        }
        // These change nothing.
        let neutral = json!({"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "seed": 3, "presence_penalty": 0,
            "frequency_penalty": 0.0, "repetition_penalty": 1, "min_tokens": 0, "ignore_eos": false, "n": 1});
        assert_eq!(read_with(neutral, none).unwrap().sampling.temperature, 0.0);
        assert!(read_with(json!({"temperature": 0.9, "top_k": 1}), none).is_ok());
    }

    #[test]
    fn top_k_and_top_p_together_have_a_limit() {
        let model = ModelInfo { vocab_size: 5000, ..model() };
        let read = |value: Value| match value {
            Value::Object(object) => sampling(&mut Fields(object), &model, &ALL),
            other => panic!("{other}"),
        };
        for wrong in [
            json!({"top_k": 1025, "top_p": 0.9}),
            json!({"top_k": 1025, "top_p": 0.9, "temperature": 0, "presence_penalty": 1}),
        ] {
            let error = read(wrong).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("top_k"));
            assert!(error.message.contains("at most 1024"), "{}", error.message);
        }
        for fine in [
            json!({"top_k": 1024, "top_p": 0.9}),
            json!({"top_k": 1025}),
            json!({"top_k": 5000, "top_p": 0.9}),
            json!({"top_k": 1025, "top_p": 0.9, "temperature": 0}),
        ] {
            assert!(read(fine.clone()).is_ok(), "{fine}");
        }
    }

    #[test]
    fn sampling_takes_the_defaults_and_then_the_request() {
        let sampling = |value| read_with(value, ALL).unwrap().sampling;
        assert_eq!(sampling(json!({})), Sampling::default());
        assert_eq!(sampling(json!({"top_p": 0.9})).temperature, 1.0);
        assert_eq!(sampling(json!({"top_p": 0.9, "temperature": 0})).temperature, 0.0);
        assert_eq!(sampling(json!({"seed": -1})).seed, Some(u64::MAX));
        // The ends of the ranges are the engine's.
        let ends = json!({"repetition_penalty": 0.01, "temperature": 100});
        assert_eq!((sampling(ends.clone()).repetition_penalty, sampling(ends).temperature), (0.01, 100.0));
        let generation = read_with(json!({"max_tokens": 3, "max_completion_tokens": 5}), ALL).unwrap();
        assert_eq!((generation.max_tokens, generation.max_tokens_name), (Some(5), "max_completion_tokens"));
        let generation = read_with(json!({"max_tokens": 3}), ALL).unwrap();
        assert_eq!((generation.max_tokens, generation.max_tokens_name), (Some(3), "max_tokens"));
    }
}
