//! Shardings from and to JSON.

use super::error::GraphFileError;
use super::op_graph_file::{NamedShard, PartsShard, Shard, SplitShard};
use super::parse::{parse, parse_object};
use crate::split::{Part, Sharding, Split};
use crate::words::counted;
use serde::Deserialize;
use serde_json::Value;

/// A [`PartsShard`] with parts that are read one by one, so that unknown fields and lists of fields are refused.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GivenParts {
    dim: usize,
    parts: Vec<Value>,
}

/// A [`Part`], read strictly.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GivenPart {
    len: u64,
    split: Value,
}

/// Reads the `shard` of a tensor with these dimensions. `place` is its path, for messages.
///
/// # Errors
/// The sharding is malformed or does not fit the dimensions.
pub fn shard_from_value(value: &Value, dims: &[u64], place: &str) -> Result<Sharding, GraphFileError> {
    let fields = match value {
        Value::String(name) if name == "replicated" => return Ok(Sharding::Replicated),
        Value::String(name) if name == "partial" => return Ok(Sharding::Partial),
        Value::Object(fields) => fields,
        _ => {
            return Err(GraphFileError::at(
                place,
                r#"must be "replicated", "partial" or {"dim": .., "kind": ..}"#,
            ));
        }
    };
    let in_parts = fields.contains_key("parts");
    let shard = if in_parts {
        let given = parse::<GivenParts>(value.clone(), place)?;
        let mut parts = Vec::with_capacity(given.parts.len());
        for (i, part) in given.parts.into_iter().enumerate() {
            let place = format!("{place}.parts[{i}]");
            let GivenPart { len, split } = parse_object(part, &place)?;
            parts.push(Part { len, split: parse_object(split, &format!("{place}.split"))? });
        }
        PartsShard { dim: given.dim, parts }
    } else {
        let mut split = fields.clone();
        let dim = match split.remove("dim") {
            Some(dim) => parse::<usize>(dim, &format!("{place}.dim"))?,
            None => {
                return Err(GraphFileError::at(
                    place,
                    "needs `dim`, the dimension that is split over the ranks",
                ));
            }
        };
        let split = parse::<Split>(Value::Object(split), place)?;
        let len = dims.get(dim).copied().unwrap_or(0);
        PartsShard { dim, parts: vec![Part { len, split }] }
    };
    let Some(&len) = dims.get(shard.dim) else {
        return Err(GraphFileError::at(
            format!("{place}.dim"),
            format!("there is no dimension {} in {dims:?}", shard.dim),
        ));
    };
    let sum = shard.parts.iter().try_fold(0u64, |sum, p| sum.checked_add(p.len));
    if sum != Some(len) {
        return Err(GraphFileError::at(
            format!("{place}.parts"),
            format!(
                "have {} together, but dimension {} has {len}",
                counted(sum.unwrap_or(u64::MAX), "index"),
                shard.dim
            ),
        ));
    }
    for (i, part) in shard.parts.iter().enumerate() {
        if let Some(problem) = misfit(part) {
            let place = if in_parts { format!("{place}.parts[{i}]") } else { place.to_string() };
            return Err(GraphFileError::at(place, problem));
        }
    }
    Ok(Sharding::Split { dim: shard.dim, parts: shard.parts })
}

/// Why the indices of `part` cannot be split like this, if they cannot.
fn misfit(part: &Part) -> Option<String> {
    let product = |name: &str, heads: u64, head_dim: u64| match heads.checked_mul(head_dim) {
        Some(product) if product == part.len => None,
        _ => Some(format!(
            "{name} x head_dim is {heads} x {head_dim}, but there {} to split",
            if part.len == 1 { "is 1 index".into() } else { format!("are {} indices", part.len) }
        )),
    };
    // Products with a rank fit into 64 bits then.
    let outside = |name: &str, value: u64| {
        let problem = || format!("{name} must be from 1 to {}, found {value}", u32::MAX);
        (value == 0 || value > u64::from(u32::MAX)).then(problem)
    };
    match part.split {
        Split::Even { unit: 0 } => Some("unit must be at least 1".into()),
        Split::Even { .. } => None,
        Split::Queries { heads, head_dim } => outside("heads", heads)
            .or_else(|| outside("head_dim", head_dim))
            .or_else(|| product("heads", heads, head_dim)),
        Split::KeyValues { heads, kv_heads, head_dim } => outside("heads", heads)
            .or_else(|| outside("kv_heads", kv_heads))
            .or_else(|| outside("head_dim", head_dim))
            .or_else(|| {
                let divides = heads % kv_heads == 0;
                (!divides).then(|| format!("kv_heads = {kv_heads} must divide heads = {heads}"))
            })
            .or_else(|| product("kv_heads", kv_heads, head_dim)),
    }
}

/// The JSON form of a sharding; `None` for replicated, the default.
pub fn shard_to_value(sharding: &Sharding) -> Option<Value> {
    let shard = match sharding {
        Sharding::Replicated => return None,
        Sharding::Partial => Shard::Named(NamedShard::Partial),
        Sharding::Split { dim, parts } => match parts.as_slice() {
            [part] => Shard::Split(SplitShard { dim: *dim, split: part.split }),
            _ => Shard::Parts(PartsShard { dim: *dim, parts: parts.clone() }),
        },
    };
    serde_json::to_value(shard).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn shardings_that_do_not_fit_say_why() {
        for (value, problem) in [
            (json!({"dim": 1, "kind": "even", "unit": 0}), "unit must be at least 1"),
            (
                json!({"dim": 1, "kind": "queries", "heads": 3, "head_dim": 2}),
                "heads x head_dim is 3 x 2, but there are 4 indices to split",
            ),
            (
                json!({"dim": 1, "kind": "key_values", "heads": 3, "kv_heads": 2, "head_dim": 2}),
                "kv_heads = 2 must divide heads = 3",
            ),
            (
                json!({"dim": 1, "parts": [{"len": 1, "split": {"kind": "even"}}]}),
                "have 1 index together, but dimension 1 has 4",
            ),
        ] {
            let error = shard_from_value(&value, &[2, 4], "shard").unwrap_err().to_string();
            assert!(error.ends_with(problem), "{value}: {error}");
        }
    }

    /// Only bounded numbers of heads can be multiplied by a rank.
    #[test]
    fn heads_have_bounds() {
        let most = u64::from(u32::MAX);
        for (field, value) in [
            ("heads", 13_835_058_055_282_163_712),
            ("heads", 0),
            ("kv_heads", 0),
            ("kv_heads", most + 1),
            ("head_dim", most + 1),
        ] {
            let mut shard = json!({"dim": 1, "kind": "key_values", "heads": 4, "kv_heads": 2, "head_dim": 2});
            shard_from_value(&shard, &[2, 4], "shard").unwrap();
            shard[field] = json!(value);
            let error = shard_from_value(&shard, &[2, 4], "shard").unwrap_err().to_string();
            assert_eq!(error, format!("shard: {field} must be from 1 to 4294967295, found {value}"));
        }
        for field in ["heads", "head_dim"] {
            let mut shard = json!({"dim": 1, "kind": "queries", "heads": 2, "head_dim": 2});
            shard[field] = json!(most + 1);
            let error = shard_from_value(&shard, &[2, 4], "shard").unwrap_err().to_string();
            assert!(error.starts_with(&format!("shard: {field} must be")), "{error}");
        }
    }

    #[test]
    fn parts_are_read_strictly() {
        let right = json!({"len": 4, "split": {"kind": "even", "unit": 2}});
        let read = |part: Value| shard_from_value(&json!({"dim": 1, "parts": [part]}), &[2, 4], "shard");
        read(right).unwrap();
        for (part, problem) in [
            (json!({"len": 4, "split": {"kind": "even"}, "unit": 2}), "shard.parts[0]"),
            (json!({"len": 4, "split": {"kind": "even", "foo": 1}}), "shard.parts[0].split"),
            (json!([4, {"kind": "even"}]), "shard.parts[0]: invalid type: list, expected an object"),
            (
                json!({"len": 4, "split": ["even", 2]}),
                "shard.parts[0].split: invalid type: list, expected an object",
            ),
            (
                json!({"len": 4, "split": {"kind": "queries", "heads": 0, "head_dim": 4}}),
                "shard.parts[0]: heads must be from 1",
            ),
        ] {
            let error = read(part.clone()).unwrap_err().to_string();
            assert!(error.starts_with(problem), "{part}: {error}");
        }
    }
}
