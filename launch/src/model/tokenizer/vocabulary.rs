//! Single tokens, and texts with their special tokens, for clients that ask for tokens.

use super::Tokenizer;
use super::guard::caught;
use crate::model::error::InputError;
use tokenizers::DecoderWrapper;

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

    /// The bytes that `id` adds to a text. They may be a part of a character. A special token adds its name.
    pub fn bytes_of(&self, id: u32) -> Vec<u8> {
        let Some(written) = self.written(id) else { return Vec::new() };
        if self.special.contains(&id) {
            return written.into_bytes();
        }
        if self.is_byte(id) {
            return u8::from_str_radix(&written[3..5], 16).map_or_else(|_| Vec::new(), |byte| vec![byte]);
        }
        if self.tokenizer.get_decoder().is_some_and(is_byte_level) {
            let bytes: Option<Vec<u8>> = written.chars().map(byte_of).collect();
            // Added tokens are written as they are.
            return bytes.unwrap_or_else(|| written.into_bytes());
        }
        written.replace('\u{2581}', " ").into_bytes()
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
