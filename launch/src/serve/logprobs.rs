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
        let mut top = Map::new();
        // Tokens that are parts of a character look the same. The first of them counts, which is the likeliest.
        for &(id, logprob) in &shown.token.top {
            top.entry(text(id)).or_insert(number(logprob));
        }
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

#[cfg(test)]
mod tests {
    use super::super::backend::Token;
    use super::*;
    use std::path::Path;

    #[test]
    fn of_tokens_with_the_same_text_the_likeliest_is_listed() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/tiny");
        let tokenizer = Tokenizer::open(&folder).unwrap().unwrap();
        let is_part =
            |id: &u32| bytes(Some(&tokenizer), *id).len() == 1 && tokenizer.bytes_of(*id)[0] >= 0x80;
        let parts: Vec<u32> = (0..2048).filter(is_part).take(3).collect();
        let top = vec![(parts[0], -0.5), (parts[1], -1.5)];
        let token = Token { id: parts[2], logprob: Some(-2.5), top, ..Token::default() };
        let value = of_completion(Some(&tokenizer), &[Shown { token, offset: 0 }], 0);
        assert_eq!(value["top_logprobs"], json!([{"\u{FFFD}": -0.5}]));
        assert_eq!(value["token_logprobs"], json!([-2.5]));
    }
}
