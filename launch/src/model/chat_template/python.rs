//! Formats values as Python does.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};
use std::io;

/// `str(value)`.
pub fn text(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_string(),
        None if value.is_undefined() => String::new(),
        None => repr(value),
    }
}

/// `repr(value)`.
pub fn repr(value: &Value) -> String {
    match value.kind() {
        ValueKind::Undefined | ValueKind::None => "None".into(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.into(),
        ValueKind::Number => match f64::try_from(value.clone()) {
            Ok(number) if !value.is_integer() => float(number),
            _ => value.to_string(),
        },
        ValueKind::String => quoted(value.as_str().unwrap_or_default()),
        ValueKind::Seq => match value.try_iter() {
            Ok(items) => {
                let items = items.map(|item| repr(&item)).collect::<Vec<_>>();
                match (value.is_tuple(), items.as_slice()) {
                    (false, items) => format!("[{}]", items.join(", ")),
                    (true, [item]) => format!("({item},)"),
                    (true, items) => format!("({})", items.join(", ")),
                }
            }
            Err(_) => value.to_string(),
        },
        ValueKind::Map => match value.try_iter() {
            Ok(keys) => {
                let pairs = keys.map(|key| {
                    let item = value.get_item(&key).unwrap_or_default();
                    format!("{}: {}", repr(&key), repr(&item))
                });
                format!("{{{}}}", pairs.collect::<Vec<_>>().join(", "))
            }
            Err(_) => value.to_string(),
        },
        _ => value.to_string(),
    }
}

/// A string literal: in single quotes, or in double quotes if it contains single quotes and no double quotes.
fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if (c as u32) < 0x20 || c as u32 == 0x7f => out.push_str(&format!("\\x{:02x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

/// The shortest digits that read back as the same number. As in Python, with an exponent from 1e16 up and below 1e-4.
fn float(number: f64) -> String {
    if number.is_nan() {
        return "nan".into();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.into();
    }
    let size = number.abs();
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let scientific = format!("{number:e}");
        let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
        let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |e| ('-', e));
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    let plain = number.to_string();
    if plain.contains('.') { plain } else { format!("{plain}.0") }
}

/// The `tojson` filter of transformers: `json.dumps(value, ensure_ascii=False, indent, separators, sort_keys)`.
pub fn to_json(value: &Value, indent: Option<Value>, options: Kwargs) -> Result<String, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<Value>>("indent")?,
    };
    let ensure_ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    options.assert_all_used()?;
    let indent = match indent {
        Some(value) if !value.is_none() => match value.as_str() {
            Some(text) => Some(text.to_string()),
            None => Some(" ".repeat(usize::try_from(value)?)),
        },
        _ => None,
    };
    let (item, key) = match separators.as_deref() {
        None if indent.is_some() => (",".to_string(), ": ".to_string()),
        None => (", ".to_string(), ": ".to_string()),
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => {
            return Err(Error::new(ErrorKind::InvalidOperation, "tojson: `separators` must be a pair"));
        }
    };
    if value.is_undefined() {
        return Err(Error::new(ErrorKind::UndefinedError, "tojson: the value is undefined"));
    }
    let failed = |e: serde_json::Error| Error::new(ErrorKind::BadSerialization, e.to_string());
    let mut json = serde_json::to_value(value).map_err(failed)?;
    if sort_keys {
        json.sort_all_objects();
    }
    let mut out = Vec::new();
    let format = Dumps { item, key, indent, ensure_ascii, depth: 0, filled: Vec::new() };
    json.serialize(&mut Serializer::with_formatter(&mut out, format)).map_err(failed)?;
    String::from_utf8(out).map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))
}

/// The layout of `json.dumps`.
struct Dumps {
    item: String,
    key: String,
    indent: Option<String>,
    ensure_ascii: bool,
    depth: usize,
    /// For each open list or object, whether it has an element.
    filled: Vec<bool>,
}

impl Dumps {
    fn begin(&mut self, writer: &mut (impl io::Write + ?Sized), bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.filled.push(false);
        writer.write_all(bracket)
    }

    fn end(&mut self, writer: &mut (impl io::Write + ?Sized), bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if self.filled.pop() == Some(true) {
            self.line(writer)?;
        }
        writer.write_all(bracket)
    }

    fn element(&mut self, writer: &mut (impl io::Write + ?Sized), first: bool) -> io::Result<()> {
        if let Some(filled) = self.filled.last_mut() {
            *filled = true;
        }
        if !first {
            writer.write_all(self.item.as_bytes())?;
        }
        self.line(writer)
    }

    fn line(&self, writer: &mut (impl io::Write + ?Sized)) -> io::Result<()> {
        let Some(indent) = &self.indent else { return Ok(()) };
        writer.write_all(b"\n")?;
        (0..self.depth).try_for_each(|_| writer.write_all(indent.as_bytes()))
    }
}

impl Formatter for Dumps {
    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        writer.write_all(float(value).as_bytes())
    }

    fn write_string_fragment<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        if !self.ensure_ascii {
            return writer.write_all(fragment.as_bytes());
        }
        for c in fragment.chars() {
            if c.is_ascii() {
                writer.write_all(&[c as u8])?;
            } else {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    write!(writer, "\\u{unit:04x}")?;
                }
            }
        }
        Ok(())
    }

    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.begin(writer, b"[")
    }
    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.end(writer, b"]")
    }
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.element(writer, first)
    }
    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.begin(writer, b"{")
    }
    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.end(writer, b"}")
    }
    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.element(writer, first)
    }
    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.key.as_bytes())
    }
}
