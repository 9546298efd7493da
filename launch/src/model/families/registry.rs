//! The list of model families. Other crates can add to it.

use super::family::Family;
use crate::model::error::InputError;
use crate::model::hf_config::ModelConfig;
use crate::model::json::Fields;
use std::sync::{PoisonError, RwLock};

/// The families of this crate, one per line.
const BUILT_IN: [&dyn Family; 4] =
    [&super::llama::Llama, &super::qwen2::Qwen2, &super::qwen3::Qwen3, &super::mistral::Mistral];

/// The families of other crates, in the order in which they were added.
static ADDED: RwLock<Vec<&'static dyn Family>> = RwLock::new(Vec::new());

/// Adds a family from another crate, for all models that this process opens from now on.
///
/// # Errors
/// A family with this name or model type exists already.
pub fn add(family: &'static dyn Family) -> Result<(), String> {
    let mut added = ADDED.write().unwrap_or_else(PoisonError::into_inner);
    let taken =
        |other: &&dyn Family| other.name() == family.name() || other.model_type() == family.model_type();
    if BUILT_IN.iter().chain(added.iter().map(|f| f as &&dyn Family)).any(taken) {
        return Err(format!("there is a model family {} ({}) already", family.name(), family.model_type()));
    }
    added.push(family);
    Ok(())
}

/// All families.
pub fn all() -> Vec<&'static dyn Family> {
    let added = ADDED.read().unwrap_or_else(PoisonError::into_inner);
    BUILT_IN.into_iter().chain(added.iter().copied()).collect()
}

/// The family of a configuration: found by `architectures`, or by `model_type` if that is absent.
pub(super) fn of(fields: &Fields<'_>) -> Result<&'static dyn Family, InputError> {
    let all = all();
    let names: Vec<&str> = all.iter().map(|family| family.name()).collect();
    let supported = format!("supported are {}", names.join(", "));
    match fields.strings("architectures")? {
        Some(names) if !names.is_empty() => {
            all.into_iter().find(|family| names.contains(&family.name())).ok_or_else(|| {
                let what = format!("the architecture {}", names.join(", "));
                fields.unsupported("architectures", what, supported)
            })
        }
        _ => match fields.str("model_type")? {
            Some(name) => all.into_iter().find(|family| family.model_type() == name).ok_or_else(|| {
                fields.unsupported("model_type", format!("the model type \"{name}\""), supported)
            }),
            None => Err(fields.error("architectures", format!("missing; {supported}"))),
        },
    }
}

/// The family that `config` was read for.
///
/// # Panics
/// Never: a configuration is only read for a family of this list, and families are never removed.
pub(super) fn of_config(config: &ModelConfig) -> &'static dyn Family {
    let of_this_name = |family: &&'static dyn Family| family.name() == config.architecture();
    all().into_iter().find(of_this_name).expect("a configuration is read for a family of the list")
}
