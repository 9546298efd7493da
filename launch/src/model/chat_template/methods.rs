//! Methods of Python's strings, lists and dictionaries that minijinja lacks, or whose results differ.

use super::python;
use minijinja::value::{ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Maximum width of padded text, so that a typing error does not take all memory.
const MOST_WIDTH: usize = 1 << 24;
/// Maximum width of a tab.
const MOST_TAB: usize = 1 << 10;

/// Calls a method of `value`.
///
/// # Errors
/// There is no such method, or its arguments are wrong.
pub fn call(state: &mut State<'_, '_>, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let own = match (value.kind(), value.as_str()) {
        (_, Some(text)) => of_string(text, method, args)?,
        (ValueKind::Seq | ValueKind::Map, None) if method == "copy" && args.is_empty() => Some(value.clone()),
        (ValueKind::Seq, None) if method == "index" => Some(index(value, args)?),
        _ => None,
    };
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
        "index" | "rindex" => {
            let (wanted,): (&str,) = from_args(args)?;
            let found = if method == "index" { text.find(wanted) } else { text.rfind(wanted) };
            let found =
                found.ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "substring not found"))?;
            text[..found].chars().count().into()
        }
        "zfill" => {
            let (width,): (i64,) = from_args(args)?;
            let sign = if text.starts_with(['+', '-']) { 1 } else { 0 };
            let (sign, digits) = text.split_at(sign);
            format!("{sign}{}{digits}", padding(text, width, '0')?).into()
        }
        "center" => {
            let (width, fill): (i64, Option<char>) = from_args(args)?;
            centered(text, width, fill.unwrap_or(' '))?.into()
        }
        "ljust" => {
            let (width, fill): (i64, Option<char>) = from_args(args)?;
            format!("{text}{}", padding(text, width, fill.unwrap_or(' '))?).into()
        }
        "rjust" => {
            let (width, fill): (i64, Option<char>) = from_args(args)?;
            format!("{}{text}", padding(text, width, fill.unwrap_or(' '))?).into()
        }
        "swapcase" if args.is_empty() => swapcase(text).into(),
        "expandtabs" => {
            let (size,): (Option<i64>,) = from_args(args)?;
            expandtabs(text, size.unwrap_or(8))?.into()
        }
        _ => return Ok(None),
    }))
}

/// Python's `list.index(wanted)`.
fn index(list: &Value, args: &[Value]) -> Result<Value, Error> {
    let (wanted,): (&Value,) = from_args(args)?;
    for (i, item) in list.try_iter()?.checked().enumerate() {
        if item? == *wanted {
            return Ok(i.into());
        }
    }
    Err(Error::new(ErrorKind::InvalidOperation, format!("{} is not in list", python::repr(wanted))))
}

/// What `text` lacks to be `width` characters long.
fn padding(text: &str, width: i64, fill: char) -> Result<String, Error> {
    let width = usize::try_from(width).unwrap_or(0);
    if width > MOST_WIDTH {
        return Err(Error::new(ErrorKind::InvalidOperation, format!("a width of {width} is too large")));
    }
    let missing = width.saturating_sub(text.chars().count());
    Ok(std::iter::repeat_n(fill, missing).collect())
}

/// Python's `str.center`. If the padding is odd, the longer half is on the left only if the width is odd too.
pub fn centered(text: &str, width: i64, fill: char) -> Result<String, Error> {
    let padding = padding(text, width, fill)?;
    let missing = padding.chars().count();
    let left = missing / 2 + usize::from(missing % 2 == 1 && width % 2 == 1);
    let (before, after) = padding.split_at(left * fill.len_utf8());
    Ok(format!("{before}{text}{after}"))
}

fn swapcase(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        if c.is_uppercase() {
            out.extend(c.to_lowercase());
        } else if c.is_lowercase() {
            out.extend(c.to_uppercase());
        } else {
            out.push(c);
        }
    }
    out
}

/// Python's `str.expandtabs`.
fn expandtabs(text: &str, size: i64) -> Result<String, Error> {
    let size = usize::try_from(size).unwrap_or(0);
    if size > MOST_TAB {
        return Err(Error::new(ErrorKind::InvalidOperation, format!("a tab of {size} is too large")));
    }
    let (mut out, mut column) = (String::new(), 0);
    for c in text.chars() {
        match c {
            '\t' if size > 0 => {
                let spaces = size - column % size;
                out.extend(std::iter::repeat_n(' ', spaces));
                column += spaces;
            }
            '\t' => {}
            '\n' | '\r' => {
                out.push(c);
                column = 0;
            }
            c => {
                out.push(c);
                column += 1;
            }
        }
    }
    Ok(out)
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
    use super::super::tests::printed;
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

    /// The expected texts are those of Jinja2 3.1 with Python 3.11.
    #[test]
    fn methods_of_literals_are_python_s() {
        for (expression, expected) in [
            ("'abc'.index('b')", "1"),
            ("'éabc'.index('b')", "2"),
            ("'éabca'.find('a')", "1"),
            ("'éabca'.rindex('a')", "4"),
            ("'a'.zfill(3)", "00a"),
            ("'-5'.zfill(4)", "-005"),
            ("'+5'.zfill(4)", "+005"),
            ("'abcd'.zfill(3)", "abcd"),
            ("''.zfill(2)", "00"),
            ("'é'.zfill(2)", "0é"),
            ("'aBc'.swapcase()", "AbC"),
            ("'éSß'.swapcase()", "ÉsSS"),
            ("'ab'.center(5) ~ '|'", "  ab |"),
            ("'abc'.center(6) ~ '|'", " abc  |"),
            ("'abc'.center(7, '*')", "**abc**"),
            ("'ab'.center(5, 'é')", "ééabé"),
            ("'a'.center(4, '*')", "*a**"),
            ("'abc'.center(2)", "abc"),
            ("'abc'.center(-2)", "abc"),
            ("'ab'.ljust(4) ~ '|'", "ab  |"),
            ("'ab'.ljust(4, '.')", "ab.."),
            ("'ab'.rjust(4, '.')", "..ab"),
            ("'a\\tb'.expandtabs()", "a       b"),
            ("'a\\tbc\\n\\td'.expandtabs(4)", "a   bc\n    d"),
            ("'a\\tb'.expandtabs(0)", "ab"),
            ("{'a': 1}.copy()", "{'a': 1}"),
            ("[1, 2].copy()", "[1, 2]"),
            ("[1, 2, 3].index(2)", "1"),
            ("['a', 'b'].index('b')", "1"),
            ("(1, 2).index(2)", "1"),
            ("{'a': 1}.items()|list", "[('a', 1)]"),
            ("('a',)", "('a',)"),
            ("('a', 1)", "('a', 1)"),
            ("()", "()"),
            ("[('a', 1.0), [none]]", "[('a', 1.0), [None]]"),
        ] {
            assert_eq!(printed(expression).as_deref(), Ok(expected), "{expression}");
        }
        for expression in ["'abc'.index('z')", "[1, 2].index(3)", "'a'.ljust(100000000)", "[1].copy(2)"] {
            assert!(printed(expression).is_err(), "{expression}");
        }
    }
}
