use proptest::prelude::*;
use serde_json::Value;

use super::*;

fn load(data: &str) -> (Tokenizer, Vec<Value>) {
    let data: Value = serde_json::from_str(data).unwrap();
    let text = data["tokenizer"].to_string();
    let tokenizer = Tokenizer::parse(Path::new("tokenizer.json"), text.as_bytes()).unwrap();
    (tokenizer, data["cases"].as_array().unwrap().clone())
}

fn both() -> [(Tokenizer, Vec<Value>); 2] {
    [
        load(include_str!("../../../testdata/byte_level.json")),
        load(include_str!("../../../testdata/byte_fallback.json")),
    ]
}

fn ids(case: &Value) -> Vec<u32> {
    case["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Pieces of the stream, the last one from `finish`.
fn pieces(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
    let mut stream = tokenizer.stream();
    let mut pieces: Vec<String> = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
    pieces.push(stream.finish().unwrap());
    pieces
}

/// Ids and text that Hugging Face's tokenizers library gives (testdata/make.py): special tokens are added and
/// recognised, and nothing is truncated although the file asks for it.
#[test]
fn texts_are_encoded_as_by_hugging_face() {
    for (tokenizer, cases) in both() {
        for case in &cases {
            let text = case["text"].as_str().unwrap();
            assert_eq!(tokenizer.encode(text).unwrap(), ids(case), "{text}");
            assert_eq!(tokenizer.decode(&ids(case)).unwrap(), case["decoded"].as_str().unwrap());
        }
    }
}

#[test]
fn a_stream_adds_up_to_the_whole_text() {
    for (tokenizer, cases) in both() {
        let mut all = Vec::new();
        for case in &cases {
            let pieces = pieces(&tokenizer, &ids(case));
            assert_eq!(pieces.concat(), case["decoded"].as_str().unwrap());
            assert!(pieces.iter().all(|piece| !piece.contains('\u{FFFD}')), "{pieces:?}");
            all.extend(ids(case));
        }
        // Longer than the window.
        let long = all.repeat(6);
        assert_eq!(pieces(&tokenizer, &long).concat(), tokenizer.decode(&long).unwrap());
    }
}

#[test]
fn text_comes_as_soon_as_it_is_certain() {
    let [(byte_level, _), (byte_fallback, _)] = both();
    let ids = byte_level.encode("a 😀b").unwrap();
    let pieces = super::tests::pieces(&byte_level, &ids);
    assert_eq!(pieces.concat(), "a 😀b");
    let emoji = pieces.iter().position(|p| p.contains('😀')).unwrap();
    assert_eq!(pieces[emoji], "😀");
    assert_eq!(pieces.last().unwrap(), "");
    assert!(pieces.iter().filter(|p| !p.is_empty()).count() >= 4, "{pieces:?}");

    // Three bytes of a character, then another one. Only then is it clear that they are replacement characters.
    let bytes = |text: &str| -> Vec<u32> { text.bytes().map(|b| 3 + u32::from(b)).collect() };
    let mut ids = bytes("中");
    ids.push(3 + 0xFF);
    let mut stream = byte_fallback.stream();
    for id in &ids {
        assert_eq!(stream.push(*id).unwrap(), "");
    }
    // Neither an unknown id nor a special token ends the run.
    assert_eq!(stream.push(4000).unwrap() + &stream.push(1).unwrap(), "");
    assert_eq!(stream.push(260).unwrap(), "\u{FFFD}\u{FFFD}\u{FFFD}\u{FFFD}T");
    assert_eq!(stream.finish().unwrap(), "");
}

#[test]
fn an_unfinished_character_comes_at_the_end() {
    for (tokenizer, _) in both() {
        let mut ids = tokenizer.encode("T😀").unwrap();
        ids.pop();
        let mut stream = tokenizer.stream();
        let streamed: String = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
        assert_eq!(streamed, "T");
        let rest = stream.finish().unwrap();
        assert!(!rest.is_empty() && rest.chars().all(|c| c == '\u{FFFD}'), "{rest:?}");
    }
}

#[test]
fn bad_files_are_errors() {
    let parse = |text: &str| Tokenizer::parse(Path::new("dir/tokenizer.json"), text.as_bytes());
    let message = parse("{\n\"a\"").unwrap_err().to_string();
    assert!(message.contains("dir/tokenizer.json:2:"), "{message}");
    let message = parse("{}").unwrap_err().to_string();
    assert!(message.contains("cannot read this file"), "{message}");
    let folder = tempfile::tempdir().unwrap();
    assert!(Tokenizer::open(folder.path()).unwrap().is_none());
    std::fs::create_dir(folder.path().join("tokenizer.json")).unwrap();
    assert!(Tokenizer::open(folder.path()).is_err());
}

/// A word-level tokenizer with one field changed.
fn with(field: &str, value: Value) -> Result<Tokenizer, InputError> {
    let mut file = serde_json::json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": null,
        "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"}
    });
    file[field] = value;
    Tokenizer::parse(Path::new("dir/tokenizer.json"), file.to_string().as_bytes())
}

/// Input that makes the library panic gives an error that names the file, and prints nothing else.
#[test]
fn files_that_the_library_panics_on_are_errors() {
    use serde_json::json;
    let split = |pattern: &str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    let template = json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {}
    });
    let replace = |pattern: Value| json!({"type": "Replace", "pattern": pattern, "content": "x"});
    let long = "a".repeat(60);
    for (what, field, value) in [
        ("an unknown special token in the template", "post_processor", template),
        (
            "a broken precompiled map",
            "normalizer",
            json!({"type": "Precompiled", "precompiled_charsmap": "/////w=="}),
        ),
        (
            "another one",
            "normalizer",
            json!({"type": "Precompiled", "precompiled_charsmap": "CAAAAP////8AAAAA"}),
        ),
        ("a length of 0", "pre_tokenizer", json!({"type": "FixedLength", "length": 0})),
        ("a regular expression that explodes", "pre_tokenizer", split("(a|aa|a?a)*$")),
        ("a regular expression that explodes", "normalizer", replace(json!({"Regex": "(a+)+$"}))),
    ] {
        let begin = std::time::Instant::now();
        let result = with(field, value).and_then(|tokenizer| tokenizer.encode(&format!("{long}! \u{e9} b")));
        let error = result.err().unwrap_or_else(|| panic!("{what}: the library takes it now"));
        assert_eq!(error.exit_status(), 2, "{what}");
        assert!(error.to_string().starts_with("dir/tokenizer.json: "), "{what}: {error}");
        assert!(error.to_string().contains("the tokenizers library panics: "), "{what}: {error}");
        assert!(begin.elapsed() < Duration::from_secs(10), "{what}");
    }
}

/// Patterns that match nothing give a result or an error, whatever the library does with them.
#[test]
fn empty_patterns_are_no_end_of_the_process() {
    use serde_json::json;
    for pattern in
        [json!({"String": ""}), json!({"Regex": ""}), json!({"Regex": "$"}), json!({"Regex": "(?=b)"})]
    {
        for content in ["", "x", "\u{e9}\u{20ac}"] {
            let replace = json!({"type": "Replace", "pattern": pattern, "content": content});
            for (field, value) in [("normalizer", replace.clone()), ("decoder", replace)] {
                let Ok(tokenizer) = with(field, value) else { continue };
                for text in ["", "a", "b\u{e9} a", "\u{20ac}\u{20ac} b"] {
                    let _ = tokenizer.encode(text);
                }
                let _ = tokenizer.decode(&[0, 1, 2]);
            }
        }
    }
}

#[test]
fn dropout_is_off() {
    let model = serde_json::json!({
        "type": "BPE",
        "dropout": 0.9,
        "vocab": {"a": 0, "aa": 1, "aaaa": 2},
        "merges": ["a a", "aa aa"],
    });
    let tokenizer = with("model", model).unwrap();
    for _ in 0..50 {
        assert_eq!(tokenizer.encode("aaaa").unwrap(), [2]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..Default::default() })]
    /// Any ids, including unknown and special ids and stray bytes: the pieces add up to the whole.
    #[test]
    fn any_stream_adds_up(fallback: bool, ids in prop::collection::vec(0u32..310, 0..200)) {
        let [(byte_level, _), (byte_fallback, _)] = both();
        let tokenizer = if fallback { byte_fallback } else { byte_level };
        prop_assert_eq!(pieces(&tokenizer, &ids).concat(), tokenizer.decode(&ids).unwrap());
    }
}

/// Only expressions that repeat a group can take forever on a short text.
#[test]
fn expressions_that_may_explode_are_found() {
    let regex = |pattern: &str| format!("{{\"pattern\":{{\"Regex\":\"{pattern}\"}}}}");
    for pattern in ["(a+)+$", "(a|aa|a?a)*$", "(?:a|b){2,}"] {
        assert!(super::repeats_a_group(&regex(pattern)), "{pattern}");
    }
    // Those of Qwen's and Llama's tokenizers.
    for pattern in [
        "(?i:'s|'t)|[^\\\\r\\\\n\\\\p{L}]?\\\\p{L}+|\\\\s+(?!\\\\S)|\\\\s+",
        "\\\\p{N}{1,3}| ?[^\\\\s]+[\\\\r\\\\n]*",
    ] {
        assert!(!super::repeats_a_group(&regex(pattern)), "{pattern}");
    }
    assert!(!super::repeats_a_group("{\"type\":\"ByteLevel\",\"use_regex\":true}"));
}
