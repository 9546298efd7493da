//! Names that people give, and how messages show them.

/// The longest accepted name in bytes.
const LONGEST_NAME: usize = 256;
/// The longest message in characters. What a message quotes may be of any length.
const LONGEST_MESSAGE: usize = 4096;

/// What is wrong with a name, if it would garble messages and timelines.
pub(super) fn problem_of_name(name: &str) -> Option<String> {
    if name.len() > LONGEST_NAME {
        return Some(format!("has {} bytes; use a name of at most {LONGEST_NAME}", name.len()));
    }
    name.chars().find(|&c| acts(c)).map(|bad| {
        format!(
            "contains {}, a control character or one that changes the direction of text; remove it",
            bad.escape_unicode()
        )
    })
}

/// Text for messages: characters that act on a terminal are escaped, and very long text is cut.
pub fn clean(text: &str) -> String {
    let mut out = String::with_capacity(text.len().min(LONGEST_MESSAGE));
    for (i, c) in text.chars().enumerate() {
        if i == LONGEST_MESSAGE {
            out.push_str("...");
            break;
        }
        if acts(c) {
            out.extend(c.escape_unicode());
        } else {
            out.push(c);
        }
    }
    out
}

/// True for control characters, line separators, and characters that change the direction of text.
fn acts(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_do_not_act_on_the_terminal() {
        assert_eq!(clean("a\u{1b}[2J\n\u{202e}b é"), "a\\u{1b}[2J\\u{a}\\u{202e}b é");
        assert_eq!(clean(&"x".repeat(100_000)), "x".repeat(LONGEST_MESSAGE) + "...");
        assert_eq!(clean(&"x".repeat(LONGEST_MESSAGE)), "x".repeat(LONGEST_MESSAGE));
    }

    #[test]
    fn names_have_no_control_characters_and_a_limit() {
        for good in ["x", "model.layers.0.q_proj", "naïve 名", "x".repeat(256).as_str()] {
            assert_eq!(problem_of_name(good), None);
        }
        for (bad, problem) in [
            ("a\u{1b}[2J", "contains \\u{1b}, a control character"),
            ("a\0", "contains \\u{0}, a control character"),
            ("a\nb", "contains \\u{a}, a control character"),
            ("a\u{202e}b", "contains \\u{202e}, a control character"),
            ("x".repeat(257).as_str(), "has 257 bytes; use a name of at most 256"),
        ] {
            let found = problem_of_name(bad).unwrap();
            assert!(found.starts_with(problem), "{found}");
        }
    }
}
