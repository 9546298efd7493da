//! Log-probabilities in the formats of the two endpoints.

use super::answers::Shown;
use crate::model::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

/// The format of chats: token, bytes, log-probability.
pub fn of_chat(tokenizer: Option<&Tokenizer>, tokens: &[Shown]) -> Value {
    let entry = |id: u32, logprob: f32| {
        let bytes = bytes(tokenizer, id);
        json!({"token": String::from_utf8_lossy(&bytes), "logprob": number(logprob), "bytes": bytes})
    };
    let content: Vec<Value> = tokens
        .iter()
        .map(|shown| {
            let token = &shown.token;
            let mut value = entry(token.id, token.logprob.unwrap_or(f32::NEG_INFINITY));
            value["top_logprobs"] = token.top.iter().map(|&(id, logprob)| entry(id, logprob)).collect();
            value
        })
        .collect();
    json!({"content": content, "refusal": null})
}

/// The format of completions: four lists. `base` is the number of characters before the answer.
pub fn of_completion(tokenizer: Option<&Tokenizer>, tokens: &[Shown], base: usize) -> Value {
    let text = |id: u32| String::from_utf8_lossy(&bytes(tokenizer, id)).into_owned();
    let top = |shown: &Shown| -> Value {
        let entry = |&(id, logprob): &(u32, f32)| (text(id), number(logprob));
        let mut top: Map<String, Value> = shown.token.top.iter().map(entry).collect();
        if let Some(logprob) = shown.token.logprob {
            top.entry(text(shown.token.id)).or_insert(number(logprob));
        }
        Value::Object(top)
    };
    json!({
        "tokens": tokens.iter().map(|shown| text(shown.token.id)).collect::<Vec<_>>(),
        "token_logprobs": tokens.iter().map(|shown| shown.token.logprob.map(number)).collect::<Vec<_>>(),
        "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
        "text_offset": tokens.iter().map(|shown| base + shown.offset).collect::<Vec<_>>(),
    })
}

/// A token's bytes. Without a tokenizer, its id in decimal.
fn bytes(tokenizer: Option<&Tokenizer>, id: u32) -> Vec<u8> {
    tokenizer.map_or_else(|| format!("token_id:{id}").into_bytes(), |tokenizer| tokenizer.bytes_of(id))
}

/// JSON has no infinity, and clients expect a number.
fn number(logprob: f32) -> Value {
    Value::from(f64::from(logprob.max(-9999.0)))
}
