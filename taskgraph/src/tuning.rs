//! Numbers that decide how fast graphs run and nothing else: how they are cut, which lowering is taken. What is best depends on the
//! device and the shape, so each is a [`Knob`] with a default and candidates, which a program may measure. [`Tuning`] has the
//! values that replace defaults.
//!
//! A value may change the order in which numbers are summed, and so the last bits of results; all ranks need the same values.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A number that is to be measured.
#[derive(Debug, PartialEq, Eq)]
pub struct Knob {
    /// Its name: what has it, a full stop, and what it is, such as `attention.split_positions`.
    pub name: &'static str,
    /// Its value where nothing was measured.
    pub default: u64,
    /// Values worth measuring, ascending. No value outside them is allowed.
    pub candidates: &'static [u64],
    /// What it decides, in a line.
    pub about: &'static str,
}

impl Knob {
    /// Whether it may have this value: from the least to the greatest candidate.
    pub fn allows(&self, value: u64) -> bool {
        let ends = self.candidates.first().zip(self.candidates.last());
        ends.is_some_and(|(&least, &greatest)| (least..=greatest).contains(&value))
    }
}

/// Values that replace the defaults of knobs, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Tuning(BTreeMap<String, u64>);

impl Tuning {
    /// Nothing replaces a default.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The value of a knob.
    pub fn of(&self, knob: &Knob) -> u64 {
        self.get(knob).unwrap_or(knob.default)
    }

    /// What replaces the default of a knob, for one whose default depends on more than its name.
    pub fn get(&self, knob: &Knob) -> Option<u64> {
        self.0.get(knob.name).copied()
    }

    /// Replaces a value.
    pub fn set(&mut self, name: impl Into<String>, value: u64) {
        self.0.insert(name.into(), value);
    }

    /// Takes over all values of `other`.
    pub fn extend(&mut self, other: &Tuning) {
        self.0.extend(other.iter().map(|(name, value)| (name.to_string(), value)));
    }

    /// The values, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, u64)> {
        self.0.iter().map(|(name, &value)| (name.as_str(), value))
    }

    /// Whether every value belongs to one of `knobs`, and is allowed.
    ///
    /// # Errors
    /// The first that does not, with what would.
    pub fn check<'a>(&self, knobs: impl IntoIterator<Item = &'a Knob>) -> Result<(), String> {
        let knobs: BTreeMap<&str, &Knob> = knobs.into_iter().map(|knob| (knob.name, knob)).collect();
        for (name, value) in self.iter() {
            let Some(knob) = knobs.get(name) else {
                let known: Vec<&str> = knobs.keys().copied().collect();
                return Err(format!("there is no `{name}` to tune; there are {}", known.join(", ")));
            };
            if !knob.allows(value) {
                let candidates: Vec<String> = knob.candidates.iter().map(u64::to_string).collect();
                return Err(format!(
                    "`{name}` can't be {value}; values worth measuring are {}",
                    candidates.join(", ")
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDTH: Knob =
        Knob { name: "box.width", default: 2, candidates: &[1, 2, 8], about: "width of a box" };

    #[test]
    fn a_value_replaces_a_default() {
        let mut tuning = Tuning::default();
        assert_eq!((tuning.of(&WIDTH), tuning.is_empty()), (2, true));
        tuning.set("box.width", 8);
        assert_eq!((tuning.of(&WIDTH), tuning.is_empty()), (8, false));
        assert_eq!(tuning.check([&WIDTH]), Ok(()));
    }

    #[test]
    fn what_no_knob_allows_is_refused_with_what_would_be_allowed() {
        let mut tuning = Tuning::default();
        tuning.set("box.width", 9);
        assert!(tuning.check([&WIDTH]).unwrap_err().contains("1, 2, 8"));
        tuning.set("box.width", 3);
        assert_eq!(tuning.check([&WIDTH]), Ok(()));
        tuning.set("box.height", 1);
        assert!(tuning.check([&WIDTH]).unwrap_err().contains("no `box.height` to tune; there are box.width"));
    }
}
