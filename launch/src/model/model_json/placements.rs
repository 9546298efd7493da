//! `runtime.placement`: one placement for all graphs, or one per class of graphs.

use schemars::JsonSchema;
use serde::de::value::{MapAccessDeserializer, StrDeserializer};
use serde::de::{Deserializer, Error, MapAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use std::fmt;

/// How tasks are assigned to workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Placement {
    /// Each worker has a fixed list of tasks.
    #[default]
    Static,
    /// Schedulers assign tasks when their events complete.
    Dynamic,
}

/// How tasks are assigned to workers, per class of graphs. In model.json it is one name for all classes, or an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Placements {
    /// For graphs in which every row is sampled.
    pub decode: Placement,
    /// For graphs with rows for prompts.
    pub prefill: Placement,
}

/// The form in model.json.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
#[schemars(rename = "Placements")]
pub(super) enum Form {
    /// The same for all graphs.
    All(Placement),
    /// One for each class of graphs.
    ByClass(ByClass),
}

/// One placement per class of graphs.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[derive(Default)]
pub(super) struct ByClass {
    /// Placement of graphs of iterations in which every request yields a token.
    decode: Placement,
    /// Placement of graphs of iterations with prompt rows.
    prefill: Placement,
}

impl Placements {
    /// The placement of all graphs; `None` if they differ.
    pub fn of_all(self) -> Option<Placement> {
        (self.decode == self.prefill).then_some(self.decode)
    }
}

impl From<Placement> for Placements {
    fn from(all: Placement) -> Placements {
        Placements { decode: all, prefill: all }
    }
}

impl Serialize for Placements {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let by_class = || Form::ByClass(ByClass { decode: self.decode, prefill: self.prefill });
        self.of_all().map_or_else(by_class, Form::All).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Placements {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Forms)
    }
}

/// Reads both forms. The errors of an untagged enum would not say what is wrong.
struct Forms;

impl<'de> Visitor<'de> for Forms {
    type Value = Placements;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(r#""static", "dynamic" or an object with "decode" and "prefill""#)
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<Placements, E> {
        Placement::deserialize(StrDeserializer::new(name)).map(Placements::from)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Placements, A::Error> {
        let ByClass { decode, prefill } = ByClass::deserialize(MapAccessDeserializer::new(map))?;
        Ok(Placements { decode, prefill })
    }
}
