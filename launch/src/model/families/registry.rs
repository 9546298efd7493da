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

/// Kinds of models that are not supported: what a name of theirs contains in lower case, and what is missing.
const KNOWN: [(&str, &str); 3] = [
    (
        "gemma",
        "no Gemma model can run (Gemma 1, 2, 3 or a variant): GELU, norms that scale by 1 + weight and the scaled embedding are not \
         implemented, nor are the soft-capping of Gemma 2 and the second rotary embedding of Gemma 3",
    ),
    ("moe", "mixture-of-experts models cannot run"),
    ("mixtral", "mixture-of-experts models cannot run"),
];

/// The family of a configuration: found by `architectures`, or by `model_type` if that is absent. transformers goes by `model_type`, so
/// both must name the same family. One of several `architectures` suffices.
pub(super) fn of(fields: &Fields<'_>) -> Result<&'static dyn Family, InputError> {
    let all = all();
    let architectures = fields.strings("architectures")?.unwrap_or_default();
    let model_type = fields.str("model_type")?;
    if architectures.is_empty() {
        let Some(model_type) = model_type else {
            return Err(fields.error("architectures", format!("missing; {}", supported(&all))));
        };
        let found = all.iter().copied().find(|family| family.model_type() == model_type);
        return found.ok_or_else(|| {
            let what = format!("the model type \"{model_type}\"");
            fields.unsupported("model_type", what, reason(fields, &[model_type], &all))
        });
    }
    let named: Vec<&'static dyn Family> =
        all.iter().copied().filter(|family| architectures.contains(&family.name())).collect();
    let Some(&first) = named.first() else {
        let of_type = model_type.map(|name| format!(" (model type \"{name}\")")).unwrap_or_default();
        let what = format!("the architecture {}{of_type}", architectures.join(", "));
        let names: Vec<&str> = architectures.iter().copied().chain(model_type).collect();
        return Err(fields.unsupported("architectures", what, reason(fields, &names, &all)));
    };
    match model_type {
        Some(name) if named.iter().all(|family| family.model_type() != name) => {
            let problem = format!(
                "{} contradicts `{}`: \"{name}\"; the model type of {} is \"{}\": correct the field that is wrong",
                architectures.join(", "),
                fields.place("model_type"),
                first.name(),
                first.model_type(),
            );
            Err(fields.error("architectures", problem))
        }
        Some(name) => Ok(named.iter().copied().find(|family| family.model_type() == name).unwrap_or(first)),
        None => Ok(first),
    }
}

/// What is supported.
fn supported(all: &[&'static dyn Family]) -> String {
    let listed =
        |name: fn(&&'static dyn Family) -> &'static str| all.iter().map(name).collect::<Vec<_>>().join(", ");
    let (names, types) = (listed(|family| family.name()), listed(|family| family.model_type()));
    format!("supported are {names} (model types {types}), as models of text alone")
}

/// Why a model with one of these names cannot run, if that is known, and what is supported.
fn reason(fields: &Fields<'_>, names: &[&str], all: &[&'static dyn Family]) -> String {
    let has = |part: &str| names.iter().any(|name| name.to_lowercase().contains(part));
    let known = KNOWN.iter().find(|(part, _)| has(part)).map(|&(_, why)| why);
    let of_images = fields
        .get("vision_config")
        .is_some()
        .then_some("models of images and text cannot run, not even for text");
    match known.or(of_images) {
        Some(why) => format!("{why}; {}", supported(all)),
        None => supported(all),
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
