//! Numbers and nouns in messages.

use std::fmt::Display;

/// `count` things of this name: `1 task`, `2 tasks`. The noun is in the singular and takes its plural by the usual rules; `index` is the
/// one exception that messages need.
pub fn counted<N: Display + PartialEq + From<u8>>(count: N, noun: &str) -> String {
    if count == N::from(1) {
        return format!("{count} {noun}");
    }
    match noun.strip_suffix("index") {
        Some(before) => format!("{count} {before}indices"),
        None => format!("{count} {}", plural(noun)),
    }
}

fn plural(noun: &str) -> String {
    match noun.strip_suffix('y') {
        Some(stem) if !stem.ends_with(['a', 'e', 'o', 'u']) => format!("{stem}ies"),
        _ => format!("{noun}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_and_noun_agree() {
        let words =
            [counted(0, "rank"), counted(1u32, "KV page"), counted(2usize, "event"), counted(1, "entry")];
        assert_eq!(words, ["0 ranks", "1 KV page", "2 events", "1 entry"]);
        let words = [counted(3, "entry"), counted(1, "index"), counted(2, "index"), counted(2u64, "key")];
        assert_eq!(words, ["3 entries", "1 index", "2 indices", "2 keys"]);
    }
}
