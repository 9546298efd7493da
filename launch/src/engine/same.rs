//! Checks that all ranks run the same: the options and the model of every rank are compared with rank 0's before
//! anything depends on them.

use crate::engine::agreement::together;
use crate::engine::error::Error;
use crate::model::app_error::AppError;
use crate::model::model_json::ModelJson;
use crate::model::model_source::ModelSource;
use crate::model::weights::WeightSource;
use distributed::World;
use std::hash::{Hash, Hasher};
use xxhash_rust::xxh3::Xxh3;

/// Maximum number of characters of a value in a message.
const SHOWN: usize = 60;
/// Number of a checkpoint's tensors that are sampled.
const SAMPLED_TENSORS: usize = 64;
/// Bytes that are read in the middle of each sampled tensor.
const SAMPLED_BYTES: usize = 64;

/// A named value.
pub type Value = (String, String);

/// Collective: checks that every rank was started with the same options, given by name and value.
///
/// # Errors
/// Status 2, with the first option that differs.
pub fn same_options(world: &World, mut values: Vec<Value>) -> Result<(), Error> {
    values.push(("the program's version".into(), env!("CARGO_PKG_VERSION").into()));
    compare(world, "was started with other options", "start all ranks with the same command line", &values)
}

/// Collective: checks that every rank opened the same model. For a checkpoint's weights, it compares names, shapes and
/// samples.
///
/// # Errors
/// Status 2, with the first difference.
pub fn same_model(world: &World, model: &ModelJson, source: &ModelSource) -> Result<(), Error> {
    let mut file = model.clone();
    // The checkpoint may have a different path on each node.
    file.checkpoint = file.checkpoint.map(|_| "checkpoint".into());
    let mut values = vec![(model_file_name(model), serde_json::to_string(&file).unwrap_or_default())];
    if let ModelSource::Model(model) = source {
        let _reads = model.weights.reads(world.rank());
        values.push(("config.json".into(), format!("{:?}", model.config)));
        values.push(("the weights (digest of names, shapes and samples)".into(), weights(&model.weights)));
    }
    compare(world, "has another model", "give all ranks the same model", &values)
}

fn model_file_name(model: &ModelJson) -> String {
    model.path.file_name().map_or_else(|| "model.json".into(), |name| name.to_string_lossy().into_owned())
}

/// Distinguishes one checkpoint's weights from another's without reading them all.
fn weights(source: &WeightSource) -> String {
    let WeightSource::Checkpoint(checkpoint) = source else { return format!("{source:?}") };
    let mut names: Vec<&str> = checkpoint.names().collect();
    names.sort_unstable();
    let mut hash = Xxh3::new();
    let every = names.len().div_ceil(SAMPLED_TENSORS).max(1);
    for (index, name) in names.iter().enumerate() {
        name.hash(&mut hash);
        let Ok(tensor) = checkpoint.tensor(name) else { continue };
        (&tensor.shape, tensor.dtype as u32).hash(&mut hash);
        if index % every == 0 {
            let bytes = tensor.bytes();
            let begin = bytes.len() / 2;
            bytes[begin..bytes.len().min(begin + SAMPLED_BYTES)].hash(&mut hash);
        }
    }
    format!("{:016x}", hash.finish())
}

/// Collective: the first difference between a rank's values and rank 0's ends all ranks.
fn compare(world: &World, what: &str, fix: &str, values: &[Value]) -> Result<(), Error> {
    if world.size() == 1 {
        return Ok(());
    }
    let text = serde_json::to_vec(values).unwrap_or_default();
    let all = world.gather(text);
    let all: Vec<Vec<Value>> =
        all.iter().map(|text| serde_json::from_slice(text).unwrap_or_default()).collect();
    let difference = (1..all.len()).find_map(|rank| Some((rank, difference(&all[0], &all[rank])?)));
    let result = match difference {
        None => Ok(()),
        Some((rank, text)) => {
            Err(AppError::input(format!("rank {rank} {what} than rank 0: {text}")).with_help(fix))
        }
    };
    together(world, result)
}

/// The first difference, as text.
fn difference(first: &[Value], other: &[Value]) -> Option<String> {
    let value = |list: &[Value], name: &str| {
        list.iter().find(|(n, _)| n == name).map_or("not given".to_string(), |(_, value)| value.clone())
    };
    let names = first.iter().chain(other).map(|(name, _)| name);
    let mut names = names.filter(|name| value(first, name) != value(other, name));
    let name = names.next()?;
    let (first, other) = apart(&value(first, name), &value(other, name));
    Some(format!("{name}: {other} at this rank, {first} at rank 0"))
}

/// Both texts. Long ones are cut down to where they differ.
fn apart(first: &str, other: &str) -> (String, String) {
    let (first, other): (Vec<char>, Vec<char>) = (first.chars().collect(), other.chars().collect());
    let common = first.iter().zip(&other).take_while(|(a, b)| a == b).count();
    let begin = if first.len().max(other.len()) > SHOWN { common.saturating_sub(SHOWN / 3) } else { 0 };
    let cut = |text: &[char]| {
        let part: String = text.iter().skip(begin).take(SHOWN).collect();
        let (before, after) =
            (if begin > 0 { "..." } else { "" }, if text.len() > begin + SHOWN { "..." } else { "" });
        format!("`{before}{part}{after}`")
    };
    (cut(&first), cut(&other))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(list: &[(&str, &str)]) -> Vec<Value> {
        list.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
    }

    #[test]
    fn the_first_difference_is_named() {
        let first = values(&[("--a", "1"), ("--b", "2")]);
        assert_eq!(difference(&first, &first), None);
        let other = values(&[("--a", "1"), ("--b", "3")]);
        assert_eq!(difference(&first, &other).as_deref(), Some("--b: `3` at this rank, `2` at rank 0"));
        let more = values(&[("--a", "1"), ("--b", "2"), ("--trace", "t.json")]);
        let text = "--trace: `t.json` at this rank, `not given` at rank 0";
        assert_eq!(difference(&first, &more).as_deref(), Some(text));
    }

    #[test]
    fn long_values_are_cut_to_where_they_differ() {
        let (first, other) =
            ("x".repeat(500) + "1" + &"y".repeat(500), "x".repeat(500) + "2" + &"y".repeat(500));
        let (first, other) = apart(&first, &other);
        assert!(first.len() < 80 && first.contains('1') && !first.contains('2'), "{first}");
        assert!(other.contains('2') && other.starts_with("`...") && other.ends_with("...`"), "{other}");
    }
}
