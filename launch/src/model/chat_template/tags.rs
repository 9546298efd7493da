//! Adapts a template's tags, so that minijinja renders what Jinja with transformers' extensions renders.

/// `{% generation %}` and `{% endgeneration %}` mark the assistant's part for training. They print nothing, but the
/// white-space rules apply to them. So they are replaced by a block that prints its content.
///
/// `a ~ b` formats numbers minijinja's way; `a|string ~ b|string` formats them Python's way.
pub fn adapted(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    let mut raw = false;
    while let Some(begin) = rest.find('{') {
        let (before, tag) = rest.split_at(begin);
        out.push_str(before);
        let close = match tag.as_bytes().get(1) {
            Some(b'%') => "%}",
            Some(b'{') => "}}",
            Some(b'#') => "#}",
            _ => "{",
        };
        let length = if close == "#}" { tag.find(close).map(|at| at + 2) } else { length_of(tag, close) };
        let Some(length) = length.filter(|_| close != "{") else {
            out.push('{');
            rest = &tag[1..];
            continue;
        };
        let (whole, after) = tag.split_at(length);
        let inner = whole[2..length - 2].trim_matches(['-', '+']).trim();
        match (close, inner) {
            ("%}", "raw") => raw = true,
            ("%}", "endraw") => raw = false,
            _ => {}
        }
        match (close, inner) {
            _ if raw => out.push_str(whole),
            ("%}", "generation") => out.push_str(&whole.replacen("generation", "if true", 1)),
            ("%}", "endgeneration") => out.push_str(&whole.replacen("endgeneration", "endif", 1)),
            ("#}", _) => out.push_str(whole),
            _ => push_with_texts(&mut out, whole),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Length in bytes of the tag at the beginning of `text`. It ends at `close` outside of string literals.
fn length_of(text: &str, close: &str) -> Option<usize> {
    let mut at = 2;
    while at < text.len() {
        if text[at..].starts_with(close) {
            return Some(at + close.len());
        }
        at += token(&text[at..]);
    }
    None
}

/// Length in bytes of the token at the beginning of `text`: a string literal, a word, or one character.
fn token(text: &str) -> usize {
    let mut characters = text.char_indices();
    let Some((_, first)) = characters.next() else { return 0 };
    if matches!(first, '"' | '\'') {
        let mut escaped = false;
        for (at, c) in characters {
            match c {
                _ if escaped => escaped = false,
                '\\' => escaped = true,
                c if c == first => return at + 1,
                _ => {}
            }
        }
        // The string does not end; minijinja reports that.
        return 1;
    }
    let is_word = |c: char| c.is_alphanumeric() || c == '_' || c == '.';
    match is_word(first) {
        true => text.find(|c| !is_word(c)).unwrap_or(text.len()),
        false => first.len_utf8(),
    }
}

/// The tokens between two operators, in one pair of brackets.
#[derive(Default)]
struct Operand {
    /// Where it ends; 0 if it has no token yet.
    end: usize,
    tokens: usize,
    /// It follows a `~`.
    concatenated: bool,
    /// A filter after it would not apply to all of it, or is not needed.
    skipped: bool,
}

/// Appends a tag in which the filter `string` turns the operands of `~` into text.
fn push_with_texts(out: &mut String, tag: &str) {
    let mut places = Vec::new();
    let mut open = vec![Operand::default()];
    let mut at = 2;
    let end = tag.len() - 2;
    let finish = |operand: &Operand, concatenates: bool, places: &mut Vec<usize>| {
        if (operand.concatenated || concatenates) && operand.end > 0 && !operand.skipped {
            places.push(operand.end);
        }
    };
    while at < end {
        let length = token(&tag[at..end]);
        let word = &tag[at..at + length];
        at += length;
        let depth = open.len();
        let Some(operand) = open.last_mut() else { break };
        match word {
            _ if word.trim().is_empty() => {}
            "(" | "[" | "{" => open.push(Operand::default()),
            ")" | "]" | "}" if depth > 1 => {
                if let Some(inner) = open.pop() {
                    finish(&inner, false, &mut places);
                }
                if let Some(outer) = open.last_mut() {
                    outer.end = at;
                    outer.tokens += 1;
                }
            }
            "~" => {
                finish(operand, true, &mut places);
                *operand = Operand { concatenated: true, ..Operand::default() };
            }
            // A sign, or a minus of the tag itself.
            "-" | "+" if operand.end == 0 => operand.skipped |= operand.concatenated,
            "," | ":" | "+" | "-" | "=" | "!" | "<" | ">" | "and" | "or" | "not" | "in" | "if" | "else" => {
                finish(operand, false, &mut places);
                *operand = Operand::default();
            }
            "*" | "/" | "%" | "is" => operand.skipped = true,
            _ => {
                // A string literal alone is already text.
                operand.skipped |= operand.tokens == 0 && word.starts_with(['"', '\'']);
                operand.end = at;
                operand.tokens += 1;
            }
        }
    }
    if let Some(operand) = open.first().filter(|_| open.len() == 1) {
        finish(operand, false, &mut places);
    }
    let mut from = 0;
    for place in places {
        out.push_str(&tag[from..place]);
        out.push_str("|string");
        from = place;
    }
    out.push_str(&tag[from..]);
}

#[cfg(test)]
mod tests {
    use super::adapted;

    #[test]
    fn operands_of_a_concatenation_become_text() {
        for (given, wanted) in [
            ("{{ a ~ b }}", "{{ a|string ~ b|string }}"),
            ("{{- 'x' ~ b[1] ~ f(c, d) -}}", "{{- 'x' ~ b[1]|string ~ f(c, d)|string -}}"),
            ("{{ f(a ~ b, c) }}", "{{ f(a|string ~ b|string, c) }}"),
            ("{{ a + b ~ c|upper }}", "{{ a + b|string ~ c|upper|string }}"),
            ("{% set x = ['\"' ~ en ~ '\"'] %}", "{% set x = ['\"' ~ en|string ~ '\"'] %}"),
            ("{% if a ~ b == c %}", "{% if a|string ~ b|string == c %}"),
            ("{{ a * b ~ -c ~ d }}", "{{ a * b ~ -c ~ d|string }}"),
            ("{{ {'k': a ~ 1.5} }}", "{{ {'k': a|string ~ 1.5|string} }}"),
            ("{{ a - b }} ~ {# a ~ b #} { ~ }", "{{ a - b }} ~ {# a ~ b #} { ~ }"),
            (
                "{% raw %}{{ a ~ b }}{% endraw %}{{ a ~ b }}",
                "{% raw %}{{ a ~ b }}{% endraw %}{{ a|string ~ b|string }}",
            ),
            ("{{ '}}' ~ a", "{{ '}}' ~ a"),
            ("{{ \"a ~ b\" }}", "{{ \"a ~ b\" }}"),
            ("{%- generation -%}x{% endgeneration %}", "{%- if true -%}x{% endif %}"),
        ] {
            assert_eq!(adapted(given), wanted);
        }
    }
}
