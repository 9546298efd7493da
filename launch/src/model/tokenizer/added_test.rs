use super::Tokenizer;
use super::added::Added;
use serde_json::{Value, json};
use std::path::Path;
use tempfile::TempDir;

/// A folder with these files.
fn folder(files: &Value) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, value) in files.as_object().unwrap() {
        std::fs::write(folder.path().join(name), value.to_string()).unwrap();
    }
    folder
}

fn open(folder: &Path) -> Result<Tokenizer, String> {
    Tokenizer::open(folder).map(Option::unwrap).map_err(|error| {
        assert_eq!(error.exit_status(), 2);
        error.whole()
    })
}

/// Ids and texts that transformers' AutoTokenizer gives (testdata/make.py).
#[test]
fn tokens_are_added_as_by_transformers() {
    let cases: Value = serde_json::from_str(include_str!("../../../testdata/added_tokens.json")).unwrap();
    let cases = cases.as_array().unwrap();
    assert!(cases.len() > 20);
    for case in cases {
        let folder = folder(&case["files"]);
        let tokenizer = open(folder.path()).unwrap();
        for result in case["results"].as_array().unwrap() {
            let text = result["text"].as_str().unwrap();
            let what = format!("{}: {text:?}", case["name"]);
            let ids = tokenizer.encode(text).unwrap();
            assert_eq!(json!(ids), result["ids"], "{what}");
            let Some(decoded) = result["decoded"].as_str() else { continue };
            assert_eq!(tokenizer.decode(&ids).unwrap(), decoded, "{what}");
            let mut stream = tokenizer.stream();
            let mut streamed: String = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
            streamed += &stream.finish().unwrap();
            assert_eq!(streamed, decoded, "{what}");
        }
    }
}

fn tokenizer_json() -> Value {
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1, "b": 2}, "unk_token": "[UNK]"}
    })
}

/// transformers gives such tokens another id than the file says, without a word.
#[test]
fn ids_that_contradict_are_warned_of() {
    let decoder =
        |id: u32, content: &str| json!({"added_tokens_decoder": {(id.to_string()): {"content": content}}});
    let config = "tokenizer_config.json";
    for (file, value, token, id, words) in [
        (config, decoder(9, "<X>"), "<X>", 3, &["`added_tokens_decoder.9`", "has id 9", "id 3", "free"][..]),
        (config, decoder(2, "<X>"), "<X>", 3, &["`added_tokens_decoder.2`", "has id 2", "id 3", "free"]),
        (config, decoder(7, "a"), "a", 1, &["`added_tokens_decoder.7`", "\"a\" has id 7", "id 1", "that of"]),
        ("added_tokens.json", json!({"<X>": 3, "<Y>": 5}), "<Y>", 4, &["`<Y>`", "has id 5", "id 4", "free"]),
    ] {
        let folder = folder(&json!({"tokenizer.json": tokenizer_json(), file: value}));
        let mut tokenizer: tokenizers::Tokenizer = tokenizer_json().to_string().parse().unwrap();
        let warnings = Added::read(folder.path()).unwrap().add_to(&mut tokenizer);
        let [warning] = &warnings[..] else { panic!("{warnings:?}") };
        let place = folder.path().join(file).display().to_string();
        assert!(warning.starts_with(&place), "{warning}");
        assert!(words.iter().all(|word| warning.contains(word)), "{warning}");
        assert_eq!(tokenizer.token_to_id(token), Some(id));
        assert_eq!(open(folder.path()).unwrap().encode(token).unwrap(), [id]);
    }
}

#[test]
fn malformed_tokens_are_refused() {
    let entry = |value: Value| json!({"added_tokens_decoder": {"3": value}});
    for (value, place) in [
        (entry(json!("<X>")), "`added_tokens_decoder.3`"),
        (entry(json!({"special": true})), "`added_tokens_decoder.3.content`"),
        (entry(json!({"content": "<X>", "lstrip": 1})), "`added_tokens_decoder.3.lstrip`"),
        (json!({"added_tokens_decoder": {"x": {"content": "<X>"}}}), "`added_tokens_decoder.x`"),
        (json!({"added_tokens_decoder": []}), "`added_tokens_decoder`"),
        (json!({"bos_token": 5}), "`bos_token`"),
        (json!({"extra_special_tokens": "<X>"}), "`extra_special_tokens`"),
        (json!({"additional_special_tokens": ["<X>", 5]}), "`additional_special_tokens[1]`"),
    ] {
        let folder = folder(&json!({"tokenizer.json": tokenizer_json(), "tokenizer_config.json": value}));
        let message = open(folder.path()).unwrap_err();
        assert!(message.contains("tokenizer_config.json: ") && message.contains(place), "{message}");
    }
    let files = json!({"tokenizer.json": tokenizer_json(), "added_tokens.json": {"<X>": "3"}});
    let message = open(folder(&files).path()).unwrap_err();
    assert!(message.contains("added_tokens.json: `<X>`: expected a token id"), "{message}");
    // Null and an empty list add nothing.
    let nothing = json!({"added_tokens_decoder": null, "bos_token": null, "extra_special_tokens": []});
    let files = json!({"tokenizer.json": tokenizer_json(), "tokenizer_config.json": nothing});
    assert_eq!(open(folder(&files).path()).unwrap().encode("a <X>").unwrap(), [1, 0, 0, 0]);
}

/// As in Python's json, the last value of a key counts.
#[test]
fn of_keys_that_are_given_twice_the_last_counts() {
    let folder = folder(&json!({"tokenizer.json": tokenizer_json()}));
    let config = r#"{"pad_token": "<X>", "pad_token": "<Y>",
        "added_tokens_decoder": {"3": {"content": "<X>", "content": "<Z>"}, "3": {"content": "<X>", "content": "<V>"}}}"#;
    std::fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
    let tokenizer = open(folder.path()).unwrap();
    let written = [3, 4, 5].map(|id| tokenizer.written(id));
    assert_eq!(written, [Some("<V>".to_string()), Some("<Y>".to_string()), None]);
}

/// The ids are those of transformers 5.
#[test]
fn special_tokens_are_split_if_the_checkpoint_says_so() {
    let mut json = tokenizer_json();
    json["model"]["vocab"] = json!({"[UNK]": 0, "a": 1, "s": 2});
    let token = |id: u32, content: &str, special: bool| {
        json!({"id": id, "content": content, "special": special, "single_word": false, "lstrip": false,
               "rstrip": false, "normalized": false})
    };
    json["added_tokens"] = json!([token(3, "<s>", true), token(4, "<n>", false)]);
    let ids = |config: Value| {
        let folder = folder(&json!({"tokenizer.json": json, "tokenizer_config.json": config}));
        let tokenizer = open(folder.path())?;
        Ok::<_, String>((tokenizer.encode("a <s> <n>").unwrap(), tokenizer.encode_rendered("<s>a").unwrap()))
    };
    let whole = Ok((vec![1, 3, 4], vec![3, 1]));
    assert_eq!(ids(json!({})), whole);
    assert_eq!(ids(json!({"split_special_tokens": false})), whole);
    let split = Ok((vec![1, 0, 2, 0, 4], vec![0, 2, 0, 1]));
    assert_eq!(ids(json!({"split_special_tokens": true})), split);
    assert_eq!(ids(json!({"split_special_tokens": true, "added_tokens_decoder": {}})), split);
    let error = ids(json!({"split_special_tokens": 1})).unwrap_err();
    assert!(
        error.contains("tokenizer_config.json: `split_special_tokens`: expected true or false"),
        "{error}"
    );
}

#[test]
fn split_special_tokens_are_warned_of() {
    let files = json!({"tokenizer_config.json": {"split_special_tokens": true}});
    let added = Added::read(folder(&files).path()).unwrap();
    let mut tokenizer = tokenizers::Tokenizer::from_bytes(tokenizer_json().to_string()).unwrap();
    let warnings = added.add_to(&mut tokenizer);
    let expected = "tokenizer_config.json: `split_special_tokens`: special tokens in texts are encoded like";
    assert!(matches!(&warnings[..], [one] if one.contains(expected)), "{warnings:?}");
}
