//! Filters of Jinja that minijinja lacks, or whose results differ.

use super::methods::{self, centered, is_space};
use super::python;
use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Environment, Error, ErrorKind, Value, filters};

/// Adds them to `environment`.
pub fn add(environment: &mut Environment<'static>) {
    environment.add_filter("tojson", python::to_json);
    environment.add_filter("string", |value: Value| python::text(&value));
    for name in ["e", "escape"] {
        environment.add_filter(name, |value: Value| methods::escape(&python::text(&value)));
    }
    environment.add_filter("trim", |value: Value, characters: Option<String>| {
        let text = python::text(&value);
        match characters {
            Some(characters) => text.trim_matches(|c| characters.contains(c)).to_string(),
            None => text.trim_matches(is_space).to_string(),
        }
    });
    environment.add_filter("upper", |value: Value| python::text(&value).to_uppercase());
    environment.add_filter("lower", |value: Value| python::text(&value).to_lowercase());
    environment.add_filter("title", |value: Value| filters::title(python::text(&value).into()));
    environment.add_filter("capitalize", |value: Value| capitalize(&python::text(&value)));
    environment.add_filter("replace", replace);
    environment.add_filter("join", join);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    for name in ["length", "count"] {
        environment.add_filter(name, |value: Value| match value.is_undefined() {
            true => Ok(0),
            false => filters::length(&value),
        });
    }
    environment.add_filter("first", |value: Value| match value.is_undefined() {
        true => Ok(Value::UNDEFINED),
        false => filters::first(&value),
    });
    environment.add_filter("last", last);
    environment.add_filter("items", |value: Value| match value.is_undefined() {
        true => Ok(Value::from(Vec::<Value>::new())),
        false => filters::items(&value),
    });
    environment.add_filter("wordcount", |value: Value| {
        let text = python::text(&value);
        text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty()).count()
    });
    environment.add_filter("center", |value: Value, width: Option<i64>, options: Kwargs| {
        let width = width.or(options.get::<Option<i64>>("width")?).unwrap_or(80);
        options.assert_all_used()?;
        centered(&python::text(&value), width, ' ')
    });
    environment.add_filter("truncate", truncate);
    environment.add_filter("urlencode", urlencode);
}

fn capitalize(text: &str) -> String {
    let mut characters = text.chars();
    let first = characters.next().map(|first| first.to_uppercase().to_string()).unwrap_or_default();
    first + &characters.as_str().to_lowercase()
}

fn replace(value: Value, from: Value, to: Value, count: Option<i64>) -> String {
    let (text, from, to) = (python::text(&value), python::text(&from), python::text(&to));
    match count.and_then(|count| usize::try_from(count).ok()) {
        Some(count) => text.replacen(&from, &to, count),
        None => text.replace(&from, &to),
    }
}

fn join(
    value: Value,
    between: Option<Value>,
    attribute: Option<Value>,
    options: Kwargs,
) -> Result<String, Error> {
    let between = match between {
        Some(between) => Some(between),
        None => options.get::<Option<Value>>("d")?,
    };
    let attribute = match attribute {
        Some(attribute) => Some(attribute),
        None => options.get::<Option<Value>>("attribute")?,
    };
    options.assert_all_used()?;
    let between = between.as_ref().map(python::text).unwrap_or_default();
    let attribute = attribute.as_ref().map(python::text);
    let mut joined = String::new();
    for (i, item) in value.try_iter()?.checked().enumerate() {
        let item = item?;
        if i > 0 {
            joined.push_str(&between);
        }
        match &attribute {
            Some(path) => joined.push_str(&python::text(&attribute_of(&item, path)?)),
            None => joined.push_str(&python::text(&item)),
        }
    }
    Ok(joined)
}

/// The attribute at a path such as `function.name` or `0.id`.
fn attribute_of(value: &Value, path: &str) -> Result<Value, Error> {
    path.split('.').try_fold(value.clone(), |value, name| match name.parse::<usize>() {
        Ok(index) => value.get_item(&Value::from(index)),
        Err(_) => value.get_attr(name),
    })
}

fn last(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(Value::UNDEFINED),
        ValueKind::Map => Ok(value.try_iter()?.last().unwrap_or_default()),
        _ => filters::last(value),
    }
}

fn int(value: Value, default: Option<Value>, base: Option<u32>, options: Kwargs) -> Result<Value, Error> {
    let default = match default {
        Some(default) => default,
        None => options.get::<Option<Value>>("default")?.unwrap_or(Value::from(0)),
    };
    let base = match base {
        Some(base) => base,
        None => options.get::<Option<u32>>("base")?.unwrap_or(10),
    };
    options.assert_all_used()?;
    if value.is_integer() {
        return Ok(value);
    }
    if let Some(number) = value.as_str().and_then(|text| integer(text, base)) {
        return Ok(whole(number));
    }
    // Larger numbers have more digits than minijinja's integers.
    let number = number(&value).map(f64::trunc).filter(|number| number.abs() < 1e38);
    Ok(number.map_or(default, |number| whole(number as i128)))
}

fn whole(number: i128) -> Value {
    i64::try_from(number).map_or_else(|_| Value::from(number), Value::from)
}

fn float(value: Value, default: Option<Value>, options: Kwargs) -> Result<Value, Error> {
    let default = match default {
        Some(default) => default,
        None => options.get::<Option<Value>>("default")?.unwrap_or(Value::from(0.0)),
    };
    options.assert_all_used()?;
    Ok(number(&value).map_or(default, Value::from))
}

/// Python's `float(value)`.
fn number(value: &Value) -> Option<f64> {
    match value.kind() {
        ValueKind::Bool => Some(if value.is_true() { 1.0 } else { 0.0 }),
        ValueKind::Number => f64::try_from(value.clone()).ok(),
        ValueKind::String => without_underscores(value.as_str()?.trim_matches(is_space))?.parse().ok(),
        _ => None,
    }
}

/// Python's `int(text, base)`.
fn integer(text: &str, base: u32) -> Option<i128> {
    let text = text.trim_matches(is_space);
    let (negative, text) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let prefix = match base {
        2 => "0b",
        8 => "0o",
        16 => "0x",
        3..=36 => "",
        _ => return None,
    };
    let digits = match text.get(..prefix.len()) {
        Some(begin) if !prefix.is_empty() && begin.eq_ignore_ascii_case(prefix) => {
            let digits = &text[prefix.len()..];
            digits.strip_prefix('_').unwrap_or(digits)
        }
        _ => text,
    };
    if digits.starts_with(['+', '-']) {
        return None;
    }
    let number = i128::from_str_radix(&without_underscores(digits)?, base).ok()?;
    Some(if negative { -number } else { number })
}

/// Python allows single underscores between digits.
fn without_underscores(text: &str) -> Option<String> {
    let parts = text.split('_');
    let between = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let mut before: Option<&str> = None;
    for part in parts {
        if let Some(before) = before
            && !(between(before.chars().next_back()) && between(part.chars().next()))
        {
            return None;
        }
        before = Some(part);
    }
    Some(text.replace('_', ""))
}

/// The arguments are `length`, `killwords`, `end` and `leeway`. A function of minijinja has at most five.
fn truncate(value: Value, arguments: Rest<ValueOrKwargs>) -> Result<String, Error> {
    type Arguments = (Option<usize>, Option<bool>, Option<String>, Option<usize>, Kwargs);
    let arguments = arguments.into_values();
    let (length, kill_words, end, leeway, options): Arguments = from_args(&arguments)?;
    let length = length.or(options.get::<Option<usize>>("length")?).unwrap_or(255);
    let kill_words = kill_words.or(options.get::<Option<bool>>("killwords")?).unwrap_or(false);
    let end = end.or(options.get::<Option<String>>("end")?).unwrap_or_else(|| "...".into());
    let leeway = leeway.or(options.get::<Option<usize>>("leeway")?).unwrap_or(5);
    options.assert_all_used()?;
    let text = python::text(&value);
    let Some(kept) = length.checked_sub(end.chars().count()) else {
        let problem = format!("truncate: the length {length} is less than that of {end:?}");
        return Err(Error::new(ErrorKind::InvalidOperation, problem));
    };
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text);
    }
    let kept: String = text.chars().take(kept).collect();
    let whole_words = kept.rsplit_once(' ').map_or(kept.as_str(), |(before, _)| before);
    Ok(if kill_words { kept + &end } else { format!("{whole_words}{end}") })
}

fn urlencode(value: Value) -> Result<String, Error> {
    let pair = |key: &Value, value: &Value| {
        format!("{}={}", quoted(&python::text(key), true), quoted(&python::text(value), true))
    };
    let mut pairs = Vec::new();
    match value.kind() {
        ValueKind::Map => {
            for key in value.try_iter()?.checked() {
                let key = key?;
                pairs.push(pair(&key, &value.get_item(&key)?));
            }
        }
        ValueKind::Seq | ValueKind::Iterable => {
            for item in value.try_iter()?.checked() {
                let item = item?;
                pairs.push(pair(&item.get_item_by_index(0)?, &item.get_item_by_index(1)?));
            }
        }
        _ => return Ok(quoted(&python::text(&value), false)),
    }
    Ok(pairs.join("&"))
}

/// Python's `urllib.parse.quote(text)`, or `quote_plus(text)` for a query.
fn quoted(text: &str, query: bool) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        match byte {
            b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | b'_' | b'.' | b'-' | b'~' => out.push(byte as char),
            b'/' if !query => out.push('/'),
            b' ' if query => out.push('+'),
            byte => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::tests::printed;

    /// The expected texts are those of Jinja2 3.1.
    #[test]
    fn filters_are_jinja_s() {
        for (expression, expected) in [
            ("nope|length", "0"),
            ("nope|count", "0"),
            ("nope|first", ""),
            ("nope|last", ""),
            ("nope|items|list", "[]"),
            ("nope|list", "[]"),
            ("nope|join", ""),
            ("nope|join(',')", ""),
            ("nope|trim", ""),
            ("nope|upper", ""),
            ("nope|lower", ""),
            ("nope|string", ""),
            ("nope|capitalize", ""),
            ("nope|title", ""),
            ("nope|replace('a', 'b')", ""),
            ("nope|reverse|list", "[]"),
            ("nope|sort", "[]"),
            ("nope|unique|list", "[]"),
            ("nope|sum", "0"),
            ("nope|min", ""),
            ("nope|max", ""),
            ("nope|map('upper')|list", "[]"),
            ("nope|selectattr('a')|list", "[]"),
            ("nope|rejectattr('a')|list", "[]"),
            ("nope|select|list", "[]"),
            ("nope|wordcount", "0"),
            ("nope|urlencode", ""),
            ("nope|truncate", ""),
            ("(nope|first) is defined", "False"),
            ("none|upper", "NONE"),
            ("none|lower", "none"),
            ("none|title", "None"),
            ("none|capitalize", "None"),
            ("none|replace('o', '0')", "N0ne"),
            ("none|int", "0"),
            ("none|int(3)", "3"),
            ("none|float", "0.0"),
            ("5|replace('5', '6')", "6"),
            ("1.0|upper", "1.0"),
            ("true|lower", "true"),
            ("[1, 'a']|upper", "[1, 'A']"),
            ("'aXbX'|replace('X', '-', 1)", "a-bX"),
            ("'éCOLE école'|capitalize", "École école"),
            ("\"they're fine-ish\"|title", "They're Fine-Ish"),
            ("[1, 2]|join(',')", "1,2"),
            ("[1.0, true, none, nope]|join('-')", "1.0-True-None-"),
            ("[1.0, true]|join(d='-')", "1.0-True"),
            ("['a', 'b']|join", "ab"),
            ("'abc'|join('-')", "a-b-c"),
            ("{'a': 1, 'b': 2}|join('-')", "a-b"),
            ("[{'x': 1}, {'x': {'y': 2}}]|join(',', attribute='x')", "1,{'y': 2}"),
            ("[{'x': {'y': [3]}}]|join(',', 'x.y.0')", "3"),
            ("'x'|int", "0"),
            ("'x'|int(7)", "7"),
            ("'x'|int(default=7)", "7"),
            ("'x'|int('y')", "y"),
            ("'12'|int", "12"),
            ("' 12 '|int", "12"),
            ("'12.7'|int", "12"),
            ("'-12.7'|int", "-12"),
            ("'1_000'|int", "1000"),
            ("'1__0'|int", "0"),
            ("'_1'|int", "0"),
            ("'+5'|int", "5"),
            ("'5 5'|int", "0"),
            ("''|int", "0"),
            ("'1e3'|int", "1000"),
            ("'inf'|int", "0"),
            ("'nan'|int(2)", "2"),
            ("'0x1f'|int(0, 16)", "31"),
            ("'1f'|int(base=16)", "31"),
            ("'0b11'|int(0, 2)", "3"),
            ("'77'|int(0, 8)", "63"),
            ("12.7|int", "12"),
            ("-12.7|int", "-12"),
            ("true|int", "1"),
            ("[]|int", "0"),
            ("'x'|float", "0.0"),
            ("'x'|float(1.5)", "1.5"),
            ("'x'|float(default=2.0)", "2.0"),
            ("'1.5'|float", "1.5"),
            ("' 1e3 '|float", "1000.0"),
            ("'1_0.5'|float", "10.5"),
            ("'inf'|float", "inf"),
            ("5|float", "5.0"),
            ("false|float", "0.0"),
            ("{}|float", "0.0"),
            ("''|first", ""),
            ("[]|last", ""),
            ("'abc'|first", "a"),
            ("'abc'|last", "c"),
            ("[1, 2]|last", "2"),
            ("{'a': 1, 'b': 2}|first", "a"),
            ("{'a': 1, 'b': 2}|last", "b"),
            ("'é'|length", "1"),
            ("{'a': 1}|length", "1"),
            ("{'a': 1}|items|list", "[('a', 1)]"),
            ("'a b  c'|wordcount", "3"),
            ("\"it's a-b, ok_1 é\"|wordcount", "6"),
            ("'ab'|center(6) ~ '|'", "  ab  |"),
            ("'abc'|center(width=6) ~ '|'", " abc  |"),
            (
                "'ab'|center ~ '|'",
                "                                       ab                                       |",
            ),
            ("'a b/c?d=é&~.-_'|urlencode", "a%20b/c%3Fd%3D%C3%A9%26~.-_"),
            ("{'a b': 'c/d', 'e': 1}|urlencode", "a+b=c%2Fd&e=1"),
            ("[('a', 'b c'), ('d', 2)]|urlencode", "a=b+c&d=2"),
            ("5|urlencode", "5"),
            ("'foo bar baz qux'|truncate(9)", "foo..."),
            ("'foo bar baz qux'|truncate(9, true)", "foo ba..."),
            ("'foo bar baz qux'|truncate(11)", "foo bar baz qux"),
            ("'foo bar baz qux'|truncate(11, false, '...', 0)", "foo bar..."),
            ("'foo bar baz qux'|truncate(8, leeway=0, end='..')", "foo.."),
            ("'foo bar baz qux'|truncate(8, killwords=true, leeway=0, end='..')", "foo ba.."),
            ("'foobarbazqux'|truncate(8, leeway=0)", "fooba..."),
            ("'foo  bar'|truncate(7, leeway=0)", "foo..."),
            ("'ééééééééé'|truncate(4)", "ééééééééé"),
            ("'ééééééééé'|truncate(3)", "..."),
        ] {
            assert_eq!(printed(expression).as_deref(), Ok(expected), "{expression}");
        }
    }

    #[test]
    fn wrong_arguments_of_filters_are_refused() {
        for expression in
            ["5|length", "'x'|int(bas=3)", "'x'|truncate(2)", "'x'|center(100000000)", "5|items"]
        {
            assert!(printed(expression).is_err(), "{expression}");
        }
    }
}
