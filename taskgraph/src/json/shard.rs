//! Shardings from and to JSON.

use super::error::GraphFileError;
use super::op_graph_file::{NamedShard, PartsShard, Shard, SplitShard};
use super::parse::parse;
use crate::split::{Part, Sharding, Split};
use crate::words::counted;
use serde_json::Value;

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
    let shard = if fields.contains_key("parts") {
        parse::<PartsShard>(value.clone(), place)?
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
    for part in &shard.parts {
        if let Some(problem) = misfit(part) {
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
    match part.split {
        Split::Even { unit: 0 } => Some("unit must be at least 1".into()),
        Split::Even { .. } => None,
        Split::Queries { heads: 0, .. } => Some("heads must be at least 1".into()),
        Split::Queries { heads, head_dim } => product("heads", heads, head_dim),
        Split::KeyValues { kv_heads: 0, .. } => Some("kv_heads must be at least 1".into()),
        Split::KeyValues { heads, kv_heads, .. } if heads % kv_heads != 0 => {
            Some(format!("kv_heads = {kv_heads} must divide heads = {heads}"))
        }
        Split::KeyValues { kv_heads, head_dim, .. } => product("kv_heads", kv_heads, head_dim),
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
}
