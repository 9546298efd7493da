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
        load(include_str!("../../testdata/byte_level.json")),
        load(include_str!("../../testdata/byte_fallback.json")),
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

/// Ids and text that Hugging Face's tokenizers gives (testdata/make.py): special tokens added and recognised, no
/// truncation although the file asks for it.
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

    // Three bytes of a character, then another: only then are they known to be replacement characters.
    let bytes = |text: &str| -> Vec<u32> { text.bytes().map(|b| 3 + u32::from(b)).collect() };
    let mut ids = bytes("中");
    ids.push(3 + 0xFF);
    let mut stream = byte_fallback.stream();
    for id in &ids {
        assert_eq!(stream.push(*id).unwrap(), "");
    }
    // Neither an id that the vocabulary lacks nor a special token ends the run.
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
    assert!(message.contains("not a tokenizer.json"), "{message}");
    let folder = tempfile::tempdir().unwrap();
    assert!(Tokenizer::open(folder.path()).unwrap().is_none());
    std::fs::create_dir(folder.path().join("tokenizer.json")).unwrap();
    assert!(Tokenizer::open(folder.path()).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..Default::default() })]
    /// Any ids, also ones that the vocabulary lacks, special ones and stray bytes: the pieces are the whole.
    #[test]
    fn any_stream_adds_up(fallback: bool, ids in prop::collection::vec(0u32..310, 0..200)) {
        let [(byte_level, _), (byte_fallback, _)] = both();
        let tokenizer = if fallback { byte_fallback } else { byte_level };
        prop_assert_eq!(pieces(&tokenizer, &ids).concat(), tokenizer.decode(&ids).unwrap());
    }
}
