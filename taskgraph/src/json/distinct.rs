//! JSON values without repeated keys. serde_json's own values keep the last of several, so a mistake would go unnoticed.

use super::error::GraphFileError;
use super::parse::{plain, under};
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::fmt;

/// Reads any JSON value, and refuses an object that has a key twice. Null counts as absent. For serde's `deserialize_with`.
///
/// # Errors
/// Invalid JSON, or a repeated key.
pub fn distinct_keys<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Ok(Option::<Distinct>::deserialize(deserializer)?.map(|Distinct(value)| value))
}

/// Parses `text`. `place` is its path, for messages.
pub(super) fn value_from_str(text: &str, place: &str) -> Result<Value, GraphFileError> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let Distinct(value) =
        serde_path_to_error::deserialize::<_, Distinct>(&mut deserializer).map_err(|error| {
            let path = error.path().to_string();
            let inner = error.into_inner();
            if inner.is_data() {
                GraphFileError::at(under(place, &path), plain(&inner.to_string()))
            } else {
                GraphFileError::Json(inner)
            }
        })?;
    deserializer.end()?;
    Ok(value)
}

/// A value without repeated keys.
struct Distinct(Value);

impl<'de> Deserialize<'de> for Distinct {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyValue).map(Distinct)
    }
}

struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Distinct(item)) = items.next_element::<Distinct>()? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = fields.next_key::<String>()? {
            if map.contains_key(&key) {
                return Err(A::Error::custom(format!("duplicate field `{key}`")));
            }
            let Distinct(value) = fields.next_value::<Distinct>()?;
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}
