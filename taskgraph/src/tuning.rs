//! Numbers that decide only how fast graphs run: how operators are cut, and which lowering is used. The best value depends on the
//! device and the shape. So each number is a [`Knob`] with a default and candidates, which a program may measure. [`Tuning`] holds
//! the values that replace defaults.
//!
//! A value may change the order in which numbers are summed, and so the last bits of results. All ranks need the same values.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// A number to be measured.
#[derive(Debug, PartialEq, Eq)]
pub struct Knob {
    /// Its name: its owner, a full stop, and its meaning, such as `attention.split_positions`.
    pub name: &'static str,
    /// Its value if nothing was measured.
    pub default: u64,
    /// Values worth measuring, ascending. Values below the first or above the last are not allowed.
    pub candidates: &'static [u64],
    /// What it decides, on one line.
    pub about: &'static str,
}

impl Knob {
    /// True if the value is between the smallest and the largest candidate.
    pub fn allows(&self, value: u64) -> bool {
        let ends = self.candidates.first().zip(self.candidates.last());
        ends.is_some_and(|(&least, &greatest)| (least..=greatest).contains(&value))
    }
}

/// Values that replace the defaults of knobs, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Tuning(BTreeMap<String, u64>);

/// As the values of `--tune`: `name=value`, separated by commas.
impl fmt::Display for Tuning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("the defaults");
        }
        let values: Vec<String> = self.iter().map(|(name, value)| format!("{name}={value}")).collect();
        f.write_str(&values.join(","))
    }
}

impl Tuning {
    /// True if no default is replaced.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The value of a knob.
    pub fn of(&self, knob: &Knob) -> u64 {
        self.get(knob).unwrap_or(knob.default)
    }

    /// The value that replaces the default of a knob. For knobs whose default depends on more than their name.
    pub fn get(&self, knob: &Knob) -> Option<u64> {
        self.0.get(knob.name).copied()
    }

    /// Sets a value.
    pub fn set(&mut self, name: impl Into<String>, value: u64) {
        self.0.insert(name.into(), value);
    }

    /// Adds all values of `other`.
    pub fn extend(&mut self, other: &Tuning) {
        self.0.extend(other.iter().map(|(name, value)| (name.to_string(), value)));
    }

    /// The values, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, u64)> {
        self.0.iter().map(|(name, &value)| (name.as_str(), value))
    }

    /// Checks that every value belongs to one of `knobs` and is allowed.
    ///
    /// # Errors
    /// The first value that is not, with what is allowed.
    pub fn check<'a>(&self, knobs: impl IntoIterator<Item = &'a Knob>) -> Result<(), String> {
        let knobs: BTreeMap<&str, &Knob> = knobs.into_iter().map(|knob| (knob.name, knob)).collect();
        for (name, value) in self.iter() {
            let Some(knob) = knobs.get(name) else {
                let known: Vec<&str> = knobs.keys().copied().collect();
                return Err(format!("there is no knob `{name}`; the knobs are {}", known.join(", ")));
            };
            if !knob.allows(value) {
                let candidates: Vec<String> = knob.candidates.iter().map(u64::to_string).collect();
                return Err(format!(
                    "`{name}` cannot be {value}; the candidates are {}",
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
    fn values_are_shown_as_they_are_given() {
        let mut tuning = Tuning::default();
        assert_eq!(tuning.to_string(), "the defaults");
        tuning.set("b.c", 2);
        tuning.set("a", 1);
        assert_eq!(tuning.to_string(), "a=1,b.c=2");
    }

    #[test]
    fn a_value_replaces_a_default() {
        let mut tuning = Tuning::default();
        assert_eq!((tuning.of(&WIDTH), tuning.is_empty()), (2, true));
        tuning.set("box.width", 8);
        assert_eq!((tuning.of(&WIDTH), tuning.is_empty()), (8, false));
        assert_eq!(tuning.check([&WIDTH]), Ok(()));
    }

    #[test]
    fn values_that_no_knob_allows_are_refused_with_the_allowed_ones() {
        let mut tuning = Tuning::default();
        tuning.set("box.width", 9);
        assert!(tuning.check([&WIDTH]).unwrap_err().contains("1, 2, 8"));
        tuning.set("box.width", 3);
        assert_eq!(tuning.check([&WIDTH]), Ok(()));
        tuning.set("box.height", 1);
        assert!(
            tuning.check([&WIDTH]).unwrap_err().contains("no knob `box.height`; the knobs are box.width")
        );
    }
}
