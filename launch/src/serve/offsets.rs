//! Where the text of each token of an answer begins.

use crate::model::tokenizer::Tokenizer;

/// Finds where the text of each token of an answer begins, in characters. A stop string that may have begun does not matter.
#[derive(Debug, Default)]
pub struct Offsets {
    /// Number of whole characters so far.
    characters: usize,
    /// The bytes after them: the beginning of a character.
    incomplete: Vec<u8>,
    /// There was a token that is not special.
    begun: bool,
}

impl Offsets {
    /// Adds the next token. Returns its offset. If it continues a character, that is the character's offset. Special tokens have no
    /// text in an answer.
    pub fn next(&mut self, tokenizer: Option<&Tokenizer>, id: u32) -> usize {
        let Some(tokenizer) = tokenizer.filter(|tokenizer| !tokenizer.is_special(id)) else {
            return self.characters;
        };
        let bytes = if self.begun { tokenizer.bytes_of(id) } else { tokenizer.first_bytes_of(id) };
        self.begun = true;
        self.add(&bytes)
    }

    /// Adds the bytes of the next token. Returns the offset of the character that contains the first of them.
    fn add(&mut self, bytes: &[u8]) -> usize {
        let mut all = std::mem::take(&mut self.incomplete);
        let before = all.len();
        all.extend_from_slice(bytes);
        let (mut offset, mut end) = (self.characters, 0);
        while let Some(length) = first_character(&all[end..]) {
            end += length;
            self.characters += 1;
            // The earlier tokens' bytes were no beginning of a character of this token.
            if end <= before {
                offset = self.characters;
            }
        }
        self.incomplete = all.split_off(end);
        offset
    }
}

/// Length in bytes of the first character. Bytes that cannot become one are shown as U+FFFD, and are a character too. Returns `None`
/// if the character is incomplete.
fn first_character(bytes: &[u8]) -> Option<usize> {
    let whole = (1..=4usize)
        .find(|&length| bytes.get(..length).is_some_and(|begin| std::str::from_utf8(begin).is_ok()));
    whole.or_else(|| std::str::from_utf8(bytes).err()?.error_len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use std::path::Path;

    fn offsets(tokens: &[&[u8]]) -> Vec<usize> {
        let mut offsets = Offsets::default();
        tokens.iter().map(|token| offsets.add(token)).collect()
    }

    #[test]
    fn the_offset_of_a_token_is_where_its_text_begins() {
        let tokens = [" and", ",", " the", " begin", "ning", " of", " his", " glory"];
        let bytes: Vec<&[u8]> = tokens.iter().map(|token| token.as_bytes()).collect();
        assert_eq!(offsets(&bytes), [0, 4, 5, 9, 15, 19, 22, 26]);
        let text = tokens.concat();
        for (token, offset) in tokens.iter().zip(offsets(&bytes)) {
            assert!(text[offset..].starts_with(token), "{token:?}");
        }
        // Characters, not bytes; the parts of a character have its offset.
        assert_eq!(offsets(&["é".as_bytes(), "世".as_bytes(), b"x"]), [0, 1, 2]);
        assert_eq!(offsets(&[b"a\xF0", b"\x9F", b"\xA6\x80", b"b"]), [0, 1, 1, 2]);
        assert_eq!(offsets(&[b"\xE4\xB8", b"\xADa\xE4", b"\xB8\xAD", b"b"]), [0, 0, 2, 3]);
        // The first bytes become U+FFFD.
        assert_eq!(offsets(&[b"\xE4\xB8", b"a", b"\xFF", b"b"]), [0, 1, 2, 3]);
        assert_eq!(offsets(&[b"", b"a", b"", b"b"]), [0, 0, 1, 1]);
    }

    #[test]
    fn offsets_are_places_in_the_decoded_text() {
        for file in ["byte_level.json", "byte_fallback.json"] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(file);
            let data: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            let tokenizer = Tokenizer::parse(&path, data["tokenizer"].to_string().as_bytes()).unwrap();
            let ids = tokenizer.encode_rendered("Grüße, 世界 🦀! The end").unwrap();
            let text: Vec<char> = tokenizer.decode(&ids).unwrap().chars().collect();
            let mut offsets = Offsets::default();
            for (i, &id) in ids.iter().enumerate() {
                let offset = offsets.next(Some(&tokenizer), id);
                let Ok(token) = String::from_utf8(tokenizer.bytes_of(id)) else { continue };
                let token = if i == 0 && offset == 0 { token.trim_start() } else { token.as_str() };
                let found: String = text[offset..].iter().take(token.chars().count()).collect();
                assert_eq!(found, token, "{file}, token {i}");
            }
            assert_eq!(offsets.characters, text.len(), "{file}");
        }
    }
}
