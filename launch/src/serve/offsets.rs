//! Where the text of each token of an answer begins.

use crate::model::tokenizer::Tokenizer;

/// Finds where the text of each token of an answer begins, in characters. A stop string that may have begun does not matter.
///
/// The text of a run of byte tokens ([`Tokenizer::byte_of_run`]) is only certain at its end. Until then, its tokens have the run's
/// offset.
#[derive(Debug, Default)]
pub struct Offsets {
    /// Number of whole characters so far, without the run.
    characters: usize,
    /// The bytes after them: the beginning of a character.
    incomplete: Vec<u8>,
    /// The bytes of the run that has not ended.
    run: Vec<u8>,
    /// For each token since the run began, also for those without text: the number of the run's bytes before it.
    waiting: Vec<usize>,
    /// A token was decoded, and its run has ended.
    begun: bool,
    /// What the last call returned.
    found: Vec<usize>,
}

impl Offsets {
    /// Adds the next token. Returns the offsets of the last tokens up to this one: its own, and if it ends a run, also those of the
    /// tokens since the run began. A token that continues a character has the character's offset. Special tokens have no text in an
    /// answer. Without `has_text`, this token has none either.
    pub fn next(&mut self, tokenizer: Option<&Tokenizer>, id: u32, has_text: bool) -> &[usize] {
        self.found.clear();
        let decoded = tokenizer.filter(|tokenizer| has_text && tokenizer.is_decoded(id));
        let byte = decoded.and_then(|tokenizer| tokenizer.byte_of_run(id));
        let offset = match decoded {
            Some(tokenizer) if byte.is_none() => {
                self.end_run(tokenizer);
                let bytes = if self.begun { tokenizer.bytes_of(id) } else { tokenizer.first_bytes_of(id) };
                self.begun = true;
                self.add(&bytes)
            }
            _ => {
                if byte.is_some() || !self.run.is_empty() {
                    self.waiting.push(self.run.len());
                }
                self.run.extend(byte);
                self.characters
            }
        };
        self.found.push(offset);
        &self.found
    }

    /// Ends the answer. If that ends a run, returns the offsets of the tokens since the run began.
    pub fn finish(&mut self, tokenizer: Option<&Tokenizer>) -> &[usize] {
        self.found.clear();
        if let Some(tokenizer) = tokenizer {
            self.end_run(tokenizer);
        }
        &self.found
    }

    /// Ends the run, if there is one. Finds the offsets of the tokens since it began.
    fn end_run(&mut self, tokenizer: &Tokenizer) {
        if self.run.is_empty() {
            return;
        }
        let run = std::mem::take(&mut self.run);
        let first = !std::mem::replace(&mut self.begun, true);
        // The number of whole characters in the first bytes of the run. If it is not UTF-8, each byte is shown as one.
        let text = std::str::from_utf8(&run).ok();
        let (mut whole, mut all) = (vec![0], 0);
        for length in 1..=run.len() {
            all += usize::from(text.is_none_or(|text| text.is_char_boundary(length)));
            whole.push(all);
        }
        // The decoder may leave out a first space.
        let shown = tokenizer.text_of_run(&run, first).map_or(all, |text| text.chars().count());
        let left_out = all.saturating_sub(shown);
        for before in self.waiting.drain(..) {
            self.found.push(self.characters + whole[before].saturating_sub(left_out));
        }
        self.characters += all - left_out;
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

    fn load(file: &str) -> Tokenizer {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(file);
        let data: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        Tokenizer::parse(&path, data["tokenizer"].to_string().as_bytes()).unwrap()
    }

    /// The offsets of an answer's tokens, and the number of its characters. The token `eos` has no text.
    fn of_answer(tokenizer: &Tokenizer, ids: &[u32], eos: Option<u32>) -> (Vec<usize>, usize) {
        fn place(all: &mut [usize], found: &[usize]) {
            let begin = all.len() - found.len();
            all[begin..].copy_from_slice(found);
        }
        let mut offsets = Offsets::default();
        let mut all: Vec<usize> = Vec::new();
        for &id in ids {
            all.push(0);
            place(&mut all, offsets.next(Some(tokenizer), id, eos != Some(id)));
        }
        place(&mut all, offsets.finish(Some(tokenizer)));
        // The beginning of a character at the end is shown as U+FFFD.
        (all, offsets.characters + usize::from(!offsets.incomplete.is_empty()))
    }

    #[test]
    fn offsets_are_places_in_the_decoded_text() {
        for file in ["byte_level.json", "byte_fallback.json"] {
            let tokenizer = load(file);
            let ids = tokenizer.encode_rendered("Grüße, 世界 🦀! The end").unwrap();
            let text: Vec<char> = tokenizer.decode(&ids).unwrap().chars().collect();
            let (offsets, end) = of_answer(&tokenizer, &ids, None);
            for (i, (&id, &offset)) in ids.iter().zip(&offsets).enumerate() {
                let Ok(token) = String::from_utf8(tokenizer.bytes_of(id)) else { continue };
                let token = if i == 0 && offset == 0 { token.trim_start() } else { token.as_str() };
                let found: String = text[offset..].iter().take(token.chars().count()).collect();
                assert_eq!(found, token, "{file}, token {i}");
            }
            assert_eq!(end, text.len(), "{file}");
        }
    }

    /// `The` is 272, `▁The` is 273, `<s>` is 1, and the byte b is 3 + b.
    #[test]
    fn a_run_of_bytes_is_valid_or_not_as_a_whole() {
        let tokenizer = load("byte_fallback.json");
        let bytes = |bytes: &[u8]| -> Vec<u32> { bytes.iter().map(|&byte| 3 + u32::from(byte)).collect() };
        for (ids, expected, text) in [
            (
                [vec![272], bytes(b"\xC5\x0E\xF2\xA9\x3C"), vec![272]].concat(),
                vec![0, 3, 4, 5, 6, 7, 8],
                "The\u{FFFD}\u{FFFD}\u{FFFD}\u{FFFD}\u{FFFD}The",
            ),
            (
                [vec![272], bytes("é世".as_bytes()), vec![272]].concat(),
                vec![0, 3, 3, 4, 4, 4, 5],
                "Theé世The",
            ),
            // Neither a special token nor an unknown one ends a run. The end of the answer does.
            ([bytes(b"\xC3"), vec![1, 4000], bytes(b"\xA9")].concat(), vec![0, 0, 0, 0], "é"),
            (
                [bytes(b"A\xC3"), vec![1], bytes(b"A"), vec![273]].concat(),
                vec![0, 1, 2, 2, 3],
                "\u{FFFD}\u{FFFD}\u{FFFD} The",
            ),
            // The decoder leaves out a first space.
            ([bytes(b" A"), vec![273]].concat(), vec![0, 0, 1], "A The"),
            ([bytes(b" \xFF"), vec![272]].concat(), vec![0, 1, 2], "\u{FFFD}\u{FFFD}The"),
            ([bytes(b" "), vec![273]].concat(), vec![0, 0], " The"),
        ] {
            assert_eq!(tokenizer.decode(&ids).unwrap(), text, "{ids:?}");
            assert_eq!(of_answer(&tokenizer, &ids, None), (expected, text.chars().count()), "{ids:?}");
        }
    }

    #[test]
    fn tokens_of_a_run_have_its_offset_until_it_ends() {
        let tokenizer = load("byte_fallback.json");
        let mut offsets = Offsets::default();
        assert_eq!(offsets.next(Some(&tokenizer), 272, true), [0]);
        assert_eq!(offsets.next(Some(&tokenizer), 3 + 0x41, true), [3]);
        assert_eq!(offsets.next(Some(&tokenizer), 1, true), [3]);
        assert_eq!(offsets.next(Some(&tokenizer), 3 + 0x42, true), [3]);
        assert_eq!(offsets.next(Some(&tokenizer), 272, true), [3, 4, 4, 5]);
        assert!(offsets.finish(Some(&tokenizer)).is_empty());
    }

    /// Numbers that are the same in every run of a test (xorshift).
    struct Random(u64);

    impl Random {
        fn below(&mut self, end: u32) -> u32 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 % u64::from(end)) as u32
        }
    }

    #[test]
    fn offsets_of_random_tokens_are_places_in_the_decoded_text() {
        /// A word of both vocabularies that has no text, as an end of sequence.
        const EOS: u32 = 264;
        for file in ["byte_level.json", "byte_fallback.json"] {
            let tokenizer = load(file);
            let all: Vec<Vec<u8>> = (0..300).map(|id| tokenizer.bytes_of(id)).collect();
            let of_byte = |byte: u8| all.iter().position(|bytes| bytes[..] == [byte]).unwrap() as u32;
            let decode = |ids: &[u32]| {
                let kept: Vec<u32> = ids.iter().copied().filter(|&id| id != EOS).collect();
                tokenizer.decode(&kept).unwrap()
            };
            let mut random = Random(0x9E37_79B9_7F4A_7C15);
            let mut checked = 0;
            for _ in 0..300 {
                let mut ids = Vec::new();
                for _ in 0..random.below(24) {
                    match random.below(7) {
                        0 => ids.push(of_byte(random.below(256) as u8)),
                        1 | 2 => {
                            let text = ["é", "世", "🦀", " a"][random.below(4) as usize];
                            ids.extend(text.bytes().map(of_byte));
                        }
                        3 => ids.push(random.below(3)),
                        4 => ids.push([300, 4000, EOS][random.below(3) as usize]),
                        _ => ids.push(259 + random.below(18)),
                    }
                }
                let text = decode(&ids);
                let (offsets, end) = of_answer(&tokenizer, &ids, Some(EOS));
                assert_eq!(end, text.chars().count(), "{file}, {ids:?}");
                for (i, (&id, &offset)) in ids.iter().zip(&offsets).enumerate() {
                    let is_word = tokenizer.is_decoded(id) && tokenizer.byte_of_run(id).is_none();
                    let Ok(word) = String::from_utf8(tokenizer.bytes_of(id)) else { continue };
                    if id == EOS || !is_word {
                        continue;
                    }
                    assert_eq!(offset, decode(&ids[..i]).chars().count(), "{file}, token {i} of {ids:?}");
                    let rest: String = text.chars().skip(offset).collect();
                    let is_there = rest.starts_with(word.as_str())
                        || (offset == 0 && rest.starts_with(word.trim_start()));
                    assert!(is_there, "{file}, token {i} of {ids:?}: {text:?}");
                    checked += 1;
                }
            }
            assert!(checked > 500, "{file}: only {checked}");
        }
    }
}
