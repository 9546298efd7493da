//! JSON parsing, and typed fields of Hugging Face's open-ended objects.

use std::path::Path;

use serde_json::{Map, Value};

use crate::model::{error::InputError, files};

/// Parses `bytes`. A syntax error names the line and column in `file`. If a key occurs twice in an object, the last value counts, as in
/// Python's json.
pub(crate) fn parse(file: &str, bytes: &[u8]) -> Result<Value, InputError> {
    serde_json::from_slice(bytes).map_err(|error| match not_json(bytes) {
        Some(problem) => InputError::field(file, ".", problem),
        None => syntax_error(file, &error),
    })
}

/// Recognises files that the parser would refuse at their first byte without a useful reason.
fn not_json(bytes: &[u8]) -> Option<&'static str> {
    match bytes {
        [] => Some("is empty"),
        [0xef, 0xbb, 0xbf, ..] => Some("begins with a byte order mark; save it as UTF-8 without one"),
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => Some("is UTF-16; save it as UTF-8"),
        _ if files::is_lfs_pointer(bytes) => {
            Some("is a Git LFS pointer, not the file itself; run `git lfs pull`")
        }
        _ => None,
    }
}

/// Parses the JSON object in `bytes`.
pub(crate) fn parse_object(file: &str, bytes: &[u8]) -> Result<Map<String, Value>, InputError> {
    match parse(file, bytes)? {
        Value::Object(map) => Ok(map),
        other => Err(InputError::field(file, ".", format!("expected an object, found {}", kind(&other)))),
    }
}

/// The JSON object in the file `path`; `None` if the file does not exist.
pub(crate) fn object_if_there(path: &Path) -> Result<Option<Map<String, Value>>, InputError> {
    let bytes = files::read_if_there(path)?;
    bytes.map(|bytes| parse_object(&path.display().to_string(), &bytes)).transpose()
}

pub(crate) fn syntax_error(file: &str, error: &serde_json::Error) -> InputError {
    InputError::Syntax {
        file: file.into(),
        line: error.line(),
        column: error.column(),
        problem: without_position(error),
    }
}

/// serde_json's message without the " at line L column C" that it appends.
pub(crate) fn without_position(error: &serde_json::Error) -> String {
    let message = error.to_string();
    match message.rfind(" at line ") {
        Some(end) => message[..end].to_string(),
        None => message,
    }
}

/// The JSON type of `value`, with the value if it is short.
pub(crate) fn kind(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(b) => format!("the boolean {b}"),
        Value::Number(n) => format!("the number {n}"),
        Value::String(s) if s.chars().count() <= 40 => format!("the string {s:?}"),
        Value::String(_) => "a string".into(),
        Value::Array(_) => "a list".into(),
        Value::Object(_) => "an object".into(),
    }
}

/// Typed access to the fields of an object that may also have unknown fields. A null field counts as absent, because
/// transformers writes optional fields that way.
#[derive(Clone, Debug)]
pub struct Fields<'a> {
    pub(crate) file: &'a str,
    prefix: String,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(file: &'a str, prefix: &str, map: &'a Map<String, Value>) -> Self {
        Self { file, prefix: prefix.into(), map }
    }

    pub(crate) fn place(&self, name: &str) -> String {
        if self.prefix.is_empty() { name.into() } else { format!("{}.{name}", self.prefix) }
    }

    /// The error for a wrong value.
    pub fn error(&self, name: &str, problem: impl Into<String>) -> InputError {
        InputError::field(self.file, self.place(name), problem)
    }

    /// The error for a value that is not implemented: the field, what it asks for, and what is supported.
    pub fn unsupported(&self, name: &str, what: impl Into<String>, fix: impl Into<String>) -> InputError {
        InputError::Unsupported {
            file: self.file.into(),
            place: self.place(name),
            what: what.into(),
            fix: fix.into(),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// The value, unless it is absent or null.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|v| !v.is_null())
    }

    /// The field as it is, null included.
    pub fn raw(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name)
    }

    fn typed<T>(
        &self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, InputError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match read(value) {
            Some(v) => Ok(Some(v)),
            None => Err(self.error(name, format!("expected {expected}, found {}", kind(value)))),
        }
    }

    /// As an integer.
    ///
    /// # Errors
    /// It has another type.
    pub fn u32(&self, name: &str) -> Result<Option<u32>, InputError> {
        self.typed(name, "an integer between 0 and 4294967295", |v| {
            v.as_u64().and_then(|v| u32::try_from(v).ok())
        })
    }

    /// As a number.
    ///
    /// # Errors
    /// It has another type.
    pub fn f64(&self, name: &str) -> Result<Option<f64>, InputError> {
        self.typed(name, "a number", Value::as_f64)
    }

    /// As true or false.
    ///
    /// # Errors
    /// It has another type.
    pub fn bool(&self, name: &str) -> Result<Option<bool>, InputError> {
        self.typed(name, "true or false", Value::as_bool)
    }

    /// As a string.
    ///
    /// # Errors
    /// It has another type.
    pub fn str(&self, name: &str) -> Result<Option<&'a str>, InputError> {
        self.typed(name, "a string", Value::as_str)
    }

    /// As a list.
    ///
    /// # Errors
    /// It has another type.
    pub fn list(&self, name: &str) -> Result<Option<&'a Vec<Value>>, InputError> {
        self.typed(name, "a list", Value::as_array)
    }

    /// As an object.
    ///
    /// # Errors
    /// It has another type.
    pub fn object(&self, name: &str) -> Result<Option<Fields<'a>>, InputError> {
        let map = self.typed(name, "an object", Value::as_object)?;
        Ok(map.map(|map| Fields { file: self.file, prefix: self.place(name), map }))
    }

    /// A list of strings; `None` if the field is absent.
    ///
    /// # Errors
    /// It has another type.
    pub fn strings(&self, name: &str) -> Result<Option<Vec<&'a str>>, InputError> {
        let Some(list) = self.list(name)? else { return Ok(None) };
        let mut strings = Vec::with_capacity(list.len());
        for (i, value) in list.iter().enumerate() {
            strings.push(value.as_str().ok_or_else(|| {
                self.error(&format!("{name}[{i}]"), format!("expected a string, found {}", kind(value)))
            })?);
        }
        Ok(Some(strings))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_fail_at_their_first_byte_say_what_they_are() {
        for (bytes, problem) in [
            (&b""[..], "x.json: is empty"),
            (b"\xef\xbb\xbf{}", "x.json: begins with a byte order mark; save it as UTF-8 without one"),
            (b"\xff\xfe{\0}\0", "x.json: is UTF-16; save it as UTF-8"),
            (
                b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
                "x.json: is a Git LFS pointer, not the file itself; run `git lfs pull`",
            ),
            (b"{\n1}", "x.json:2:1: not valid JSON: key must be a string"),
        ] {
            assert_eq!(parse("x.json", bytes).unwrap_err().to_string(), problem);
        }
    }
}
