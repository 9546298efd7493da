//! Single tokens, and texts with their special tokens, for clients that ask for tokens.

use super::guard::{bounded, caught};
use super::{LONGEST_CALL, Tokenizer};
use crate::model::error::InputError;
use std::sync::Arc;
use tokenizers::{Decoder, DecoderWrapper};

/// Two tokens that every decoder writes as they are.
const NEIGHBOURS: [&str; 2] = ["a", "b"];

impl Tokenizer {
    /// The text of `ids` with special tokens. Ids that are not in the vocabulary have no text.
    ///
    /// # Errors
    /// The tokenizer cannot decode the ids.
    pub fn decode_with_special(&self, ids: &[u32]) -> Result<String, InputError> {
        caught(|| self.tokenizer.decode(ids, false))
            .and_then(|decoded| decoded.map_err(|e| e.to_string()))
            .map_err(|problem| self.error(format!("cannot decode: {problem}")))
    }

    /// The token `id` as the vocabulary writes it.
    pub fn written(&self, id: u32) -> Option<String> {
        self.tokenizer.id_to_token(id)
    }

    /// True if `id` is a special token, which [`Tokenizer::decode`] leaves out.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// True if [`Tokenizer::decode`] passes `id` to the decoder: it is in the vocabulary, and not special.
    pub fn is_decoded(&self, id: u32) -> bool {
        !self.is_special(id) && self.knows(id)
    }

    /// The byte that `id` stands for, if a `ByteFallback` decoder joins it with its neighbours. Such tokens that follow each other are
    /// a run. Other tokens that are decoded end it. If a run as a whole is not UTF-8, each of its bytes is shown as U+FFFD.
    pub fn byte_of_run(&self, id: u32) -> Option<u8> {
        if !self.byte_fallback {
            return None;
        }
        let written = self.written(id)?;
        let digits = written.strip_prefix("<0x")?.strip_suffix('>')?;
        u8::from_str_radix(digits, 16).ok().filter(|_| digits.len() == 2)
    }

    /// The text of a run of byte tokens that is complete. `first`: the answer begins with it, so the decoder may leave out a space.
    /// `None` if the decoder fails.
    pub fn text_of_run(&self, run: &[u8], first: bool) -> Option<String> {
        let written: Vec<String> = run.iter().map(|byte| format!("<0x{byte:02X}>")).collect();
        self.between((!first).then_some(NEIGHBOURS[0]), &written)
    }

    /// The bytes that `id` adds to a text that has begun. They may be a part of a character. A special token adds its name. What only
    /// tells whether the token begins or ends a word, such as `##` or `</w>`, is no text. The space that it stands for is.
    pub fn bytes_of(&self, id: u32) -> Vec<u8> {
        self.bytes_after(Some(NEIGHBOURS[0]), id)
    }

    /// The bytes of a text that begins with `id` and goes on. Decoders leave out the first space, and the mark of a continuation that
    /// continues nothing is text.
    pub fn first_bytes_of(&self, id: u32) -> Vec<u8> {
        self.bytes_after(None, id)
    }

    fn bytes_after(&self, before: Option<&str>, id: u32) -> Vec<u8> {
        let Some(written) = self.written(id) else { return Vec::new() };
        if self.special.contains(&id) {
            return written.into_bytes();
        }
        if let Some(byte) = self.byte_of_run(id) {
            // The decoder may leave out a first space.
            let left_out =
                before.is_none() && byte == b' ' && self.text_of_run(&[byte], true) == Some(String::new());
            return if left_out { Vec::new() } else { vec![byte] };
        }
        if self.tokenizer.get_decoder().is_some_and(is_byte_level) {
            let bytes: Option<Vec<u8>> = written.chars().map(byte_of).collect();
            // Added tokens are written as they are.
            return bytes.unwrap_or_else(|| written.into_bytes());
        }
        let text = self.between(before, std::slice::from_ref(&written));
        let text = text.unwrap_or_else(|| written.replace('\u{2581}', " "));
        text.into_bytes()
    }

    /// What the decoder makes of the tokens `written` between `before`, if that is a token, and another.
    fn between(&self, before: Option<&str>, written: &[String]) -> Option<String> {
        let [first, after] = NEIGHBOURS;
        let written = written.iter().map(String::as_str);
        let tokens = before.into_iter().chain(written).chain([after]).map(String::from).collect();
        let text = self.joined(tokens)?;
        let after = self.joined(NEIGHBOURS.map(String::from).to_vec())?;
        let own = text.strip_prefix(before.unwrap_or_default())?.strip_suffix(after.strip_prefix(first)?)?;
        Some(own.to_string())
    }

    /// The text of these tokens; `None` if the decoder fails.
    fn joined(&self, tokens: Vec<String>) -> Option<String> {
        let tokenizer = Arc::clone(&self.tokenizer);
        let join = move || match tokenizer.get_decoder() {
            Some(decoder) => decoder.decode(tokens),
            // As the library does.
            None => Ok(tokens.join(" ")),
        };
        let joined = if self.decodes_by_regex { bounded(LONGEST_CALL, join) } else { caught(join) };
        joined.ok()?.ok()
    }
}

fn is_byte_level(decoder: &DecoderWrapper) -> bool {
    match decoder {
        DecoderWrapper::ByteLevel(_) => true,
        DecoderWrapper::Sequence(sequence) => sequence.get_decoders().iter().any(is_byte_level),
        _ => false,
    }
}

/// The byte that `letter` stands for in a byte-level vocabulary. Printable bytes stand for themselves; the others are
/// numbered from 256.
fn byte_of(letter: char) -> Option<u8> {
    let number = letter as u32;
    match number {
        33..=126 | 161..=172 | 174..=255 => Some(number as u8),
        256..=288 => Some((number - 256) as u8),
        289..=322 => Some((number - 289 + 127) as u8),
        323 => Some(173),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::path::Path;

    #[test]
    fn every_byte_has_one_letter() {
        let bytes: BTreeSet<u8> = (0..400).filter_map(|n| byte_of(char::from_u32(n)?)).collect();
        let letters = (0..400).filter(|&n| char::from_u32(n).and_then(byte_of).is_some()).count();
        assert_eq!((bytes.len(), letters), (256, 256));
        assert_eq!((byte_of('Ġ'), byte_of('Ċ')), (Some(b' '), Some(b'\n')));
    }

    /// A tokenizer with this decoder whose vocabulary has these words, numbered from 0.
    fn with_decoder(decoder: &serde_json::Value, words: &[&str]) -> Tokenizer {
        let vocabulary: serde_json::Map<String, serde_json::Value> =
            words.iter().enumerate().map(|(id, word)| (word.to_string(), id.into())).collect();
        let file = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": null, "post_processor": null, "decoder": decoder,
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": words[0]}
        });
        Tokenizer::parse(Path::new("tokenizer.json"), file.to_string().as_bytes()).unwrap()
    }

    /// The marks of continuations and of ends of words are no text. What a client gets is what the decoder makes of all tokens.
    #[test]
    fn marks_of_continuation_are_no_text() {
        use serde_json::json;
        let fused = json!({"type": "Sequence", "decoders": [{"type": "BPEDecoder", "suffix": "</w>"}, {"type": "Fuse"}]});
        for (decoder, words, expected) in [
            (
                json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
                &["play", "##ing", "##s", "the", ".", "##"][..],
                &[" play", "ing", "s", " the", ".", ""][..],
            ),
            (
                json!({"type": "WordPiece", "prefix": "@@", "cleanup": false}),
                &["play", "@@ing", "##s", "."],
                &[" play", "ing", " ##s", " ."],
            ),
            (
                json!({"type": "BPEDecoder", "suffix": "</w>"}),
                &["lo", "w</w>", "</w>", "er</w>"],
                &["lo", "w ", " ", "er "],
            ),
            (fused, &["lo", "w</w>", "er</w>"], &["lo", "w ", "er "]),
            (
                json!({"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": true}),
                &["_lo", "w", "_", "\u{2581}x"],
                &[" lo", "w", " ", "\u{2581}x"],
            ),
            (json!(null), &["a", "b", "##c"], &[" a", " b", " ##c"]),
        ] {
            let tokenizer = with_decoder(&decoder, words);
            let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
            let all: Vec<u32> = (0..words.len() as u32).collect();
            let found: Vec<String> = all.iter().map(|&id| text(tokenizer.bytes_of(id))).collect();
            assert_eq!(found, expected, "{decoder}");
            // A text may begin with any of them. Decoders leave out a space at its end.
            for first in 0..all.len() {
                let ids = [&all[first..], &all[..first]].concat();
                let rest = ids[1..].iter().map(|&id| text(tokenizer.bytes_of(id)));
                let added: String =
                    std::iter::once(text(tokenizer.first_bytes_of(ids[0]))).chain(rest).collect();
                let decoded = tokenizer.decode(&ids).unwrap();
                assert_eq!(added.trim_end(), decoded.trim_end(), "{decoder}, {ids:?}");
            }
        }
    }

    #[test]
    fn the_bytes_of_tokens_add_up_to_the_text() {
        for file in ["byte_level.json", "byte_fallback.json"] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(file);
            let data: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            let tokenizer = Tokenizer::parse(&path, data["tokenizer"].to_string().as_bytes()).unwrap();
            let text = "Grüße, 世界 🦀!";
            let ids = tokenizer.encode_rendered(text).unwrap();
            let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.bytes_of(id)).collect();
            let added = String::from_utf8(bytes).unwrap();
            assert_eq!(added.trim_start(), text, "{file}");
        }
    }
}
