//! Shardings from and to JSON.

use super::error::GraphFileError;
use super::op_graph_file::{NamedShard, PartsShard, Shard, SplitShard};
use crate::split::{Part, Sharding, Split};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

pub(super) fn parse<T: DeserializeOwned>(value: Value, place: &str) -> Result<T, GraphFileError> {
    serde_json::from_value(value).map_err(|e| GraphFileError::at(place, e.to_string()))
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
    let shard = if fields.contains_key("parts") {
        parse::<PartsShard>(value.clone(), place)?
    } else {
        let mut split = fields.clone();
        let dim = match split.remove("dim") {
            Some(dim) => usize::deserialize(dim)
                .map_err(|e| GraphFileError::at(format!("{place}.dim"), e.to_string()))?,
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
            format!("do not add up to the {len} indices of dimension {}", shard.dim),
        ));
    }
    for part in &shard.parts {
        let fits = match part.split {
            Split::Even { unit } => unit > 0,
            Split::Queries { heads, head_dim } => heads > 0 && heads.checked_mul(head_dim) == Some(part.len),
            Split::KeyValues { heads, kv_heads, head_dim } => {
                kv_heads > 0 && heads % kv_heads == 0 && kv_heads.checked_mul(head_dim) == Some(part.len)
            }
        };
        if !fits {
            return Err(GraphFileError::at(
                place,
                format!("{:?} does not make up {} indices: heads x head_dim must", part.split, part.len),
            ));
        }
    }
    Ok(Sharding::Split { dim: shard.dim, parts: shard.parts })
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
