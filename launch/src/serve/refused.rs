//! Fields that other servers support and this one does not. They are refused by name if they would change the answer.

use super::error::ApiError;
use super::fields::Fields;
use serde_json::Value;

/// A field, a test for values that change nothing, and what to do instead.
struct Refused {
    name: &'static str,
    harmless: fn(&Value) -> bool,
    instead: &'static str,
}

const fn refused(name: &'static str, harmless: fn(&Value) -> bool, instead: &'static str) -> Refused {
    Refused { name, harmless, instead }
}

fn never(_: &Value) -> bool {
    false
}

fn is_false(value: &Value) -> bool {
    value == &Value::Bool(false)
}

fn is_true(value: &Value) -> bool {
    value == &Value::Bool(true)
}

fn is_zero(value: &Value) -> bool {
    value.as_f64() == Some(0.0)
}

fn is_one(value: &Value) -> bool {
    value.as_f64() == Some(1.0)
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Object(object) => object.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::String(text) => text.is_empty(),
        _ => false,
    }
}

fn is_text_format(value: &Value) -> bool {
    value["type"] == "text"
}

fn leaves_the_choice(value: &Value) -> bool {
    value == "none" || value == "auto"
}

fn only_text(value: &Value) -> bool {
    value.as_array().is_some_and(|list| list.iter().all(|entry| entry == "text"))
}

/// The beginning of the names of further such fields.
const GUIDED: &str = "guided_";

/// All other such fields, in the order in which they are checked.
const REFUSED: &[Refused] = &[
    refused("response_format", is_text_format, "only {\"type\": \"text\"} is supported"),
    refused(
        "tool_choice",
        leaves_the_choice,
        "only \"none\" and \"auto\" are supported: calls are not parsed",
    ),
    refused("functions", is_empty, "use `tools`"),
    refused("function_call", leaves_the_choice, "use `tools`"),
    refused("modalities", only_text, "only text is supported"),
    refused("audio", never, "only text is supported"),
    refused("logit_bias", is_empty, "leave it out"),
    refused("bad_words", is_empty, "leave it out"),
    refused("allowed_token_ids", is_empty, "leave it out"),
    refused("logits_processors", is_empty, "leave it out"),
    refused("suffix", is_empty, "put all text into `prompt`"),
    refused("use_beam_search", is_false, "use `n`"),
    refused("prompt_logprobs", is_false, "only log-probabilities of new tokens are computed: use `logprobs`"),
    refused("prompt_embeds", never, "use `prompt`"),
    refused("truncate_prompt_tokens", never, "shorten the prompt"),
    refused("skip_special_tokens", is_true, "set `return_token_ids` to see all tokens"),
    refused("include_stop_str_in_output", is_false, "stop strings are never shown"),
    refused("structured_outputs", never, "leave it out"),
    refused("json_schema", never, "leave it out"),
    refused("grammar", is_empty, "leave it out"),
    refused("structural_tag", is_empty, "leave it out"),
    refused("regex", is_empty, "leave it out"),
    refused("ebnf", is_empty, "leave it out"),
    refused("typical_p", is_one, "leave it out"),
    refused("no_repeat_ngram_size", is_zero, "use the penalties"),
    refused("return_tokens_as_token_ids", is_false, "use `return_token_ids`"),
    refused("detokenize", is_true, "set `return_token_ids` to get token ids in addition to the text"),
    // Completions have read theirs before.
    refused("echo", is_false, "use /v1/completions"),
    refused("chat_template", never, "the checkpoint's own is used"),
    refused("continue_final_message", is_false, "use /v1/completions"),
    refused("documents", is_empty, "put them into the messages"),
    refused("web_search_options", never, "leave it out"),
];

/// Checks that the request uses no unsupported field.
///
/// # Errors
/// It uses one; the error names it.
pub fn check(fields: &Fields) -> Result<(), ApiError> {
    let refusal = |name: &str, instead: &str| {
        Err(ApiError::unsupported(name, format!("`{name}` is not supported; {instead}")))
    };
    for Refused { name, harmless, instead } in REFUSED {
        if fields.look(name).is_some_and(|value| !harmless(value)) {
            return refusal(name, instead);
        }
    }
    let guided = fields.0.iter().find(|(name, value)| name.starts_with(GUIDED) && !value.is_null());
    if let Some((name, _)) = guided {
        return refusal(name, "leave it out");
    }
    let usage = fields.look("stream_options").and_then(|options| options.get("continuous_usage_stats"));
    if usage.is_some_and(|usage| !usage.is_null() && !is_false(usage)) {
        return refusal("stream_options.continuous_usage_stats", "use `stream_options.include_usage`");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check_one(name: &str, value: Value) -> Result<(), ApiError> {
        check(&Fields([(name.to_string(), value)].into_iter().collect()))
    }

    #[test]
    fn unsupported_fields_that_change_the_answer_are_refused() {
        for (name, value) in [
            ("response_format", json!({"type": "json_object"})),
            ("response_format", json!("text")),
            ("tool_choice", json!("required")),
            ("tool_choice", json!({"type": "function", "function": {"name": "f"}})),
            ("logit_bias", json!({"50256": -100})),
            ("suffix", json!("end")),
            ("modalities", json!(["text", "audio"])),
            ("skip_special_tokens", json!(false)),
            ("prompt_logprobs", json!(1)),
            ("guided_json", json!({"type": "object"})),
            ("guided_whitespace_pattern", json!(" ?")),
            ("structural_tag", json!({"structures": []})),
            ("regex", json!("a+")),
            ("typical_p", json!(0.5)),
            ("no_repeat_ngram_size", json!(2)),
            ("return_tokens_as_token_ids", json!(true)),
            ("detokenize", json!(false)),
            ("echo", json!(true)),
        ] {
            let error = check_one(name, value).unwrap_err();
            assert_eq!((error.param.as_deref(), error.code), (Some(name), Some("unsupported_parameter")));
        }
    }

    #[test]
    fn values_that_change_nothing_are_accepted() {
        for (name, value) in [
            ("response_format", json!({"type": "text"})),
            ("response_format", Value::Null),
            ("tool_choice", json!("auto")),
            ("logit_bias", json!({})),
            ("suffix", json!("")),
            ("user", json!("me")),
            ("guided_json", Value::Null),
            ("ebnf", json!("")),
            ("typical_p", json!(1)),
            ("no_repeat_ngram_size", json!(0)),
            ("return_tokens_as_token_ids", json!(false)),
            ("detokenize", json!(true)),
            ("echo", json!(false)),
            ("stream_options", json!({"include_usage": true, "continuous_usage_stats": false})),
            ("stream_options", json!({"continuous_usage_stats": null})),
        ] {
            assert_eq!(check_one(name, value), Ok(()));
        }
    }

    #[test]
    fn an_option_of_streams_is_refused_by_its_place() {
        let error = check_one("stream_options", json!({"continuous_usage_stats": true})).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("stream_options.continuous_usage_stats"));
    }
}
