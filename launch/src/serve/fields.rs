//! Reads the fields of a request one by one. Error messages name the field and what it should be.

use super::error::ApiError;
use serde_json::{Map, Value};

/// The fields of a request that have not been read yet. `null` counts as absent. Fields that are never read are
/// ignored.
pub struct Fields(pub Map<String, Value>);

impl Fields {
    /// Takes the value of `name`.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name).filter(|value| !value.is_null())
    }

    /// Returns the value of `name` without taking it.
    pub fn look(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    /// True or false; false if absent.
    ///
    /// # Errors
    /// It is something else.
    pub fn flag(&mut self, name: &str) -> Result<bool, ApiError> {
        Ok(self.optional_flag(name)?.unwrap_or(false))
    }

    /// True, false or absent.
    ///
    /// # Errors
    /// It is something else.
    pub fn optional_flag(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        self.take(name).map(|v| v.as_bool().ok_or_else(|| wrong(name, "true or false", &v))).transpose()
    }

    /// Text.
    ///
    /// # Errors
    /// It is something else.
    pub fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong(name, "a string", &other)),
        }
    }

    /// A number that `fits` in the 32 bits that the engine takes; `range` says in words which do.
    ///
    /// # Errors
    /// It is something else.
    pub fn number(
        &mut self,
        name: &str,
        range: &str,
        fits: impl Fn(f32) -> bool,
    ) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_f64().map(|number| number as f32) {
            Some(number) if fits(number) => Ok(Some(number)),
            _ => Err(wrong(name, &format!("a number {range}"), &value)),
        }
    }

    /// A whole number from `least` to `most`.
    ///
    /// # Errors
    /// It is something else.
    pub fn integer(&mut self, name: &str, least: i64, most: i64) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        integer(&value)
            .filter(|number| (least..=most).contains(number))
            .map(Some)
            .ok_or_else(|| wrong(name, &format!("a whole number from {least} to {most}"), &value))
    }

    /// One string or a list of them.
    ///
    /// # Errors
    /// It is something else.
    pub fn strings(&mut self, name: &str) -> Result<Vec<String>, ApiError> {
        let expected = "a string or a list of strings";
        match self.take(name) {
            None => Ok(Vec::new()),
            Some(Value::String(text)) => Ok(vec![text]),
            Some(Value::Array(list)) => list
                .into_iter()
                .map(|entry| match entry {
                    Value::String(text) => Ok(text),
                    other => Err(wrong(name, expected, &other)),
                })
                .collect(),
            Some(other) => Err(wrong(name, expected, &other)),
        }
    }

    /// A list of token ids below `vocab_size`.
    ///
    /// # Errors
    /// It is something else.
    pub fn ids(&mut self, name: &str, vocab_size: u32) -> Result<Vec<u32>, ApiError> {
        match self.take(name) {
            None => Ok(Vec::new()),
            Some(Value::Array(list)) => ids(name, &list, vocab_size),
            Some(other) => Err(wrong(name, "a list of token ids", &other)),
        }
    }

    /// An object.
    ///
    /// # Errors
    /// It is something else.
    pub fn object(&mut self, name: &str) -> Result<Option<Map<String, Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(object)),
            Some(other) => Err(wrong(name, "an object", &other)),
        }
    }
}

/// The token ids of `list`, each below `vocab_size`.
///
/// # Errors
/// One of them is not.
pub fn ids(name: &str, list: &[Value], vocab_size: u32) -> Result<Vec<u32>, ApiError> {
    let id = |(i, value): (usize, &Value)| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|&id| id < vocab_size);
        let expected = || format!("a token id from 0 to {}", vocab_size.saturating_sub(1));
        id.ok_or_else(|| wrong(&format!("{name}[{i}]"), &expected(), value))
    };
    list.iter().enumerate().map(id).collect()
}

/// The JSON writers of some languages write 1 as 1.0.
fn integer(value: &Value) -> Option<i64> {
    let whole = |number: &f64| number.fract() == 0.0 && number.abs() < 9e15;
    value.as_i64().or_else(|| value.as_f64().filter(whole).map(|number| number as i64))
}

/// The error for a field `name` that should have been `expected`.
pub fn wrong(name: &str, expected: &str, found: &Value) -> ApiError {
    /// Maximum number of characters of a value in a message.
    const SHOWN: usize = 60;
    let shown = match found {
        Value::Array(list) if list.is_empty() => "an empty list".to_string(),
        Value::Array(_) => "a list".to_string(),
        Value::Object(_) => "an object".to_string(),
        Value::String(text) => {
            let begin: String = text.chars().take(SHOWN).collect();
            let more = if begin.len() < text.len() { "..." } else { "" };
            format!("{begin:?}{more}")
        }
        other => other.to_string(),
    };
    ApiError::field(name, format!("`{name}` must be {expected}, found {shown}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fields(value: Value) -> Fields {
        match value {
            Value::Object(object) => Fields(object),
            _ => panic!("an object"),
        }
    }

    #[test]
    fn null_is_absent_and_other_types_are_named() {
        let mut f = fields(json!({"a": null, "b": "x", "c": 1, "d": [1], "e": 1.0, "f": 1e300}));
        assert_eq!(f.flag("a"), Ok(false));
        let error = f.flag("b").unwrap_err();
        assert_eq!((error.param.as_deref(), error.status.as_u16()), (Some("b"), 400));
        assert_eq!(error.message, "`b` must be true or false, found \"x\"");
        assert!(f.text("c").is_err());
        assert!(f.object("d").is_err());
        assert_eq!(f.integer("e", 0, 5), Ok(Some(1)));
        // No f32 is so large.
        let error = f.number("f", "from 0 to 9", |n| (0.0..=9.0).contains(&n)).unwrap_err();
        assert_eq!(error.message, "`f` must be a number from 0 to 9, found 1e+300");
        assert_eq!(f.integer("absent", 0, 5), Ok(None));
    }

    #[test]
    fn lists_and_ids() {
        let mut f = fields(
            json!({"one": "a", "two": ["a", "b"], "bad": ["a", 1], "ids": [0, 9], "far": [10], "neg": [-1]}),
        );
        assert_eq!(f.strings("one").unwrap(), ["a"]);
        assert_eq!(f.strings("two").unwrap(), ["a", "b"]);
        assert!(f.strings("bad").is_err());
        assert_eq!(f.ids("ids", 10).unwrap(), [0, 9]);
        assert_eq!(f.ids("far", 10).unwrap_err().param.as_deref(), Some("far[0]"));
        assert!(f.ids("neg", 10).is_err());
    }

    #[test]
    fn long_values_are_cut_in_messages() {
        let error = wrong("x", "a number", &json!("y".repeat(10_000)));
        assert!(error.message.len() < 200, "{}", error.message);
        assert!(wrong("x", "a list of two", &json!([])).message.ends_with("found an empty list"));
    }
}
