//! Methods of Python's strings that minijinja lacks, or whose results differ.

use minijinja::value::from_args;
use minijinja::{Error, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Calls a method of `value`.
///
/// # Errors
/// There is no such method, or its arguments are wrong.
pub fn call(state: &mut State<'_, '_>, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let own = value.as_str().map(|text| of_string(text, method, args)).transpose()?.flatten();
    own.map_or_else(|| unknown_method_callback(state, value, method, args), Ok)
}

/// The result of a string's method; `None` if minijinja's own is right.
fn of_string(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let plain = args.iter().all(Value::is_none);
    Ok(Some(match method {
        "strip" if plain => text.trim_matches(is_space).into(),
        "lstrip" if plain => text.trim_start_matches(is_space).into(),
        "rstrip" if plain => text.trim_end_matches(is_space).into(),
        "split" | "rsplit" if plain => list(text.split(is_space).filter(|word| !word.is_empty())),
        "splitlines" if args.is_empty() => list(lines(text).into_iter()),
        "title" if args.is_empty() => title(text).into(),
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            text.strip_prefix(prefix).unwrap_or(text).into()
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            text.strip_suffix(suffix).unwrap_or(text).into()
        }
        "partition" => {
            let (separator,): (&str,) = from_args(args)?;
            let (before, after) = text.split_once(separator).map_or((text, None), |(a, b)| (a, Some(b)));
            list([before, after.map_or("", |_| separator), after.unwrap_or("")].into_iter())
        }
        "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            let (before, after) = text.rsplit_once(separator).map_or((None, text), |(a, b)| (Some(a), b));
            list([before.unwrap_or(""), before.map_or("", |_| separator), after].into_iter())
        }
        "rsplit" => {
            let (separator, most): (&str, Option<i64>) = from_args(args)?;
            let most = most.and_then(|most| usize::try_from(most).ok());
            let most = most.map_or(usize::MAX, |most| most.saturating_add(1));
            let mut parts: Vec<&str> = text.rsplitn(most, separator).collect();
            parts.reverse();
            list(parts.into_iter())
        }
        _ => return Ok(None),
    }))
}

fn list<'a>(parts: impl Iterator<Item = &'a str>) -> Value {
    parts.map(Value::from).collect()
}

/// Python's `str.isspace` of a character: also the separators of ASCII.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Python's `str.splitlines()`.
fn lines(text: &str) -> Vec<&str> {
    let ends = |c: char| {
        matches!(
            c,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let (mut lines, mut rest) = (Vec::new(), text);
    while let Some(end) = rest.find(ends) {
        lines.push(&rest[..end]);
        let length = match &rest[end..] {
            both if both.starts_with("\r\n") => 2,
            one => one.chars().next().map_or(1, char::len_utf8),
        };
        rest = &rest[end + length..];
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}

/// Python's `str.title()`: a letter is in upper case unless it follows another one.
fn title(text: &str) -> String {
    let (mut out, mut inside) = (String::new(), false);
    for c in text.chars() {
        if inside {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
        inside = c.is_uppercase() || c.is_lowercase();
    }
    out
}

/// Jinja's `escape`.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use crate::model::chat_template::{ChatTemplate, Rendering};
    use serde_json::json;
    use std::path::Path;

    fn rendered(expression: &str, text: &str) -> String {
        let template = format!("{{{{ {expression} }}}}");
        let template = ChatTemplate::parse(Path::new("a test"), &template).unwrap();
        let rendering =
            Rendering { arguments: json!({"x": text}).as_object().cloned().unwrap(), ..Rendering::default() };
        template.render(&[], &rendering).unwrap()
    }

    /// The expected texts are those of Python 3.12.
    #[test]
    fn methods_are_python_s() {
        for (expression, text, expected) in [
            ("x.strip()", "\u{1c} a\u{a0}b \u{1f}\u{2028}", "a\u{a0}b"),
            ("x.lstrip()", "\u{1d}a\u{1d}", "a\u{1d}"),
            ("x.rstrip()", "\u{1d}a\u{1d}", "\u{1d}a"),
            ("x.strip('a')", "abca", "bc"),
            ("x|trim", "\u{1e}a ", "a"),
            ("x.split()|join('|')", " a\u{1c}b  c\n", "a|b|c"),
            ("x.split(',')|join('|')", "a,b,", "a|b|"),
            ("x.rsplit(',', 1)|join('|')", "a,b,c", "a,b|c"),
            ("x.rsplit(',')|join('|')", "a,b,c", "a|b|c"),
            ("x.splitlines()|join('|')", "a\r\nb\u{85}c\u{2028}\u{b}d\u{1f}e\n", "a|b|c||d\u{1f}e"),
            ("x.title()", "they're ÉCOLE über-x2y 東a", "They'Re École Über-X2Y 東A"),
            ("x.removeprefix('ab')", "abab", "ab"),
            ("x.removesuffix('ab')", "abab", "ab"),
            ("x.partition('=')|join('|')", "a=b=c", "a|=|b=c"),
            ("x.partition('=')|join('|')", "abc", "abc||"),
            ("x.rpartition('=')|join('|')", "a=b=c", "a=b|=|c"),
            ("x.rpartition('=')|join('|')", "abc", "||abc"),
            ("x|e", "<\"it's\" & more>", "&lt;&#34;it&#39;s&#34; &amp; more&gt;"),
        ] {
            assert_eq!(rendered(expression, text), expected, "{expression} of {text:?}");
        }
    }
}
