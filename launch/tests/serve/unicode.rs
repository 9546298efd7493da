//! Text of every kind, in prompts and answers.

use super::fake::{Behaviour, tokenizer, usual};
use super::http::post;
use serde_json::{Value, json};

/// Letters of one to four bytes, joined emoji, right-to-left text, combining marks, controls, the last code points.
const TEXTS: [&str; 9] = [
    "Grüße aus Köln",
    "世界、こんにちは",
    "👩‍👩‍👧‍👦 🦀 🏳️‍🌈",
    "שלום مرحبا",
    "Z̷͢͠a̸l̴g̵o",
    "\u{0}\u{1}\u{7f}\u{85}\u{2028}",
    "\u{FEFF}bom \u{FFFD} \u{FFFF} \u{10FFFF}",
    "tabs\tand\r\nlines\n\n",
    "𝒜𝓈𝓉𝓇𝒶𝓁 𐍈",
];

#[test]
fn answers_are_never_torn() {
    for text in TEXTS {
        let server = usual(Behaviour { answer: text.into(), ..Behaviour::default() });
        let ids = tokenizer().encode(text).unwrap();
        let expected = tokenizer().decode(&ids).unwrap();
        let body = json!({"messages": [{"role": "user", "content": "x"}], "stream": true, "logprobs": true});
        let answer = post(server.address, "/v1/chat/completions", &body);
        let events = answer.events();
        let pieces: Vec<&str> =
            events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
        assert_eq!(pieces.concat(), expected);
        if !text.contains('\u{FFFD}') {
            assert!(pieces.iter().all(|piece| !piece.contains('\u{FFFD}')), "{pieces:?}");
        }
        let bytes: Vec<u8> = events
            .iter()
            .filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array())
            .flatten()
            .filter(|token| token["token"] != "<|endoftext|>")
            .flat_map(|token| token["bytes"].as_array().unwrap().iter().map(|b| b.as_u64().unwrap() as u8))
            .collect();
        assert_eq!(String::from_utf8(bytes).unwrap().trim_start(), expected.trim_start());
        // If it is cut after any number of tokens, the text is a prefix of the whole, apart from the last
        // character.
        for length in 1..ids.len().min(12) {
            let body = json!({"prompt": "x", "max_tokens": length});
            let object = post(server.address, "/v1/completions", &body).json();
            let cut = object["choices"][0]["text"].as_str().unwrap().trim_end_matches('\u{FFFD}').to_string();
            assert!(expected.starts_with(&cut), "{cut:?} is no beginning of {expected:?}");
        }
    }
}

#[test]
fn prompts_of_every_kind() {
    let server = usual(Behaviour::default());
    for text in TEXTS {
        let answer =
            post(server.address, "/v1/completions", &json!({"prompt": text, "max_tokens": 1, "echo": true}));
        let echoed = answer.json()["choices"][0]["text"].as_str().unwrap().to_string();
        assert!(echoed.starts_with(text), "{echoed:?}");
        assert_eq!(server.submission().prompt, tokenizer().encode(text).unwrap());
        let ids = post(server.address, "/tokenize", &json!({"prompt": text})).json()["tokens"].clone();
        let back = post(server.address, "/detokenize", &json!({"tokens": ids})).json();
        assert_eq!(
            back["prompt"],
            Value::String(tokenizer().decode(&tokenizer().encode(text).unwrap()).unwrap())
        );
    }
}

#[test]
fn stop_strings_of_several_bytes() {
    let server = usual(Behaviour { answer: "Die Größe der 世界 🦀!".into(), ..Behaviour::default() });
    for (stop, expected) in [("ß", "Die Grö"), ("界", "Die Größe der 世"), ("🦀", "Die Größe der 世界 ")]
    {
        let body = json!({"prompt": "x", "max_tokens": 100, "stop": stop, "stream": true});
        let events = post(server.address, "/v1/completions", &body).events();
        let text: String = events.iter().map(|event| event["choices"][0]["text"].as_str().unwrap()).collect();
        assert_eq!(text, expected);
    }
}
