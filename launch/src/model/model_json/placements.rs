//! `runtime.placement`: one for all graphs, or one for each class of them.

use schemars::JsonSchema;
use serde::de::value::{MapAccessDeserializer, StrDeserializer};
use serde::de::{Deserializer, Error, MapAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use std::fmt;

/// How tasks get to workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Placement {
    /// Each worker has its list.
    #[default]
    Static,
    /// Events launch tasks through schedulers.
    Dynamic,
}

/// How tasks get to workers, for each class of graphs. In model.json it is a name for both, or an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Placements {
    /// Of the graphs in which every row is sampled.
    pub decode: Placement,
    /// Of the graphs with room for prompts.
    pub prefill: Placement,
}

/// As model.json has it.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
#[schemars(rename = "Placements")]
pub(super) enum Form {
    /// The same for all graphs.
    All(Placement),
    /// One for each class of graphs.
    ByClass(ByClass),
}

/// Which graphs are placed how.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[derive(Default)]
pub(super) struct ByClass {
    /// Graphs of iterations in which every request yields a token.
    decode: Placement,
    /// Graphs of iterations with rows of prompts.
    prefill: Placement,
}

impl Placements {
    /// The one placement of all graphs; `None` where they differ.
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

/// Reads either form. An untagged enum would not say what is wrong.
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
