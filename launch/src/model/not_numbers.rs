//! Finds weights that are not numbers, and weights that are too large for the type that they are converted to. The tokens would be
//! meaningless. The former mean that a download or conversion is broken; the latter, that the model needs another type.
//!
//! Every value is checked right after it was read, while it is still in the core's cache. So the check causes no memory
//! traffic on any target.

use crate::model::convert::convert;
use crate::model::hf_config::WeightDtype;
use distributed::World;
use half::{bf16, f16};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

/// Number of tensor names in a warning.
const NAMED: usize = 8;

/// The names of the tensors with such values.
#[derive(Debug, Default)]
pub struct NotNumbers(Mutex<Found>);

/// What was found.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
struct Found {
    /// Tensors with NaN or infinity.
    not_numbers: BTreeSet<String>,
    /// Tensors with values that are too large for a type, by the type's name. Each has its largest such value.
    too_large: BTreeMap<String, BTreeMap<String, f32>>,
}

impl NotNumbers {
    /// Records values of tensor `name`, stored as `stored`, that are not numbers or become infinite as `target`.
    pub fn look(&self, name: &str, stored: WeightDtype, values: &[u8], target: WeightDtype) {
        let mut wide = vec![0; values.len() / stored.size() * 4];
        convert(stored, values, WeightDtype::F32, &mut wide);
        let (wide, _) = wide.as_chunks::<4>();
        let (mut not_a_number, mut largest) = (false, 0.0f32);
        for value in wide.iter().map(|bytes| f32::from_le_bytes(*bytes)) {
            if !value.is_finite() {
                not_a_number = true;
            } else if !fits(value, target) && value.abs() > largest.abs() {
                largest = value;
            }
        }
        let mut found = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if not_a_number {
            found.not_numbers.insert(name.into());
        }
        if largest != 0.0 {
            found.add_too_large(target.name(), name, largest);
        }
    }

    /// Collective: rank 0 warns about everything that any rank found.
    pub fn warn(&self, world: &World) {
        let own = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let all = world.gather(serde_json::to_vec(&*own).unwrap_or_default());
        let mut found = Found::default();
        for bytes in &all {
            found.merge(serde_json::from_slice(bytes).unwrap_or_default());
        }
        for message in found.messages() {
            tracing::warn!("{message}");
        }
    }
}

#[cfg(test)]
impl NotNumbers {
    /// The warnings about what this rank found.
    pub(crate) fn messages(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).messages()
    }
}

impl Found {
    fn add_too_large(&mut self, target: &str, name: &str, value: f32) {
        let tensors = self.too_large.entry(target.into()).or_default();
        let largest = tensors.entry(name.into()).or_insert(value);
        if value.abs() > largest.abs() {
            *largest = value;
        }
    }

    fn merge(&mut self, other: Found) {
        self.not_numbers.extend(other.not_numbers);
        for (target, tensors) in other.too_large {
            for (name, value) in tensors {
                self.add_too_large(&target, &name, value);
            }
        }
    }

    /// The warnings.
    fn messages(&self) -> Vec<String> {
        let mut messages = Vec::new();
        if !self.not_numbers.is_empty() {
            messages.push(format!(
                "some weights are not numbers (NaN or infinity), in {}: results that depend on them are meaningless; download or \
                 convert their file again",
                listed(self.not_numbers.iter().cloned())
            ));
        }
        for (target, tensors) in &self.too_large {
            let (most, [others, of_graph]) = match target.as_str() {
                "f16" => (f16::MAX.to_f32(), ["\"bfloat16\" or \"float32\"", "\"bf16\" or \"f32\""]),
                _ => (bf16::MAX.to_f32(), ["\"float32\"", "\"f32\""]),
            };
            let named = tensors.iter().map(|(name, value)| format!("{name} (value {value:?})"));
            messages.push(format!(
                "some weights are outside the range of {target} (-{most:?} to {most:?}), in {}: they become infinite, and results that \
                 depend on them are meaningless; use another dtype: set `dtype` in config.json to {others}, or in a graph of your \
                 own the weight's `dtype` to {of_graph}",
                listed(named)
            ));
        }
        messages
    }
}

/// The first names, and how many others there are.
fn listed(names: impl ExactSizeIterator<Item = String>) -> String {
    let more = names.len().saturating_sub(NAMED);
    let named: Vec<String> = names.take(NAMED).collect();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more}", named.join(", "))
}

/// True if the number `value` stays finite as `target`.
fn fits(value: f32, target: WeightDtype) -> bool {
    match target {
        WeightDtype::F32 => true,
        WeightDtype::F16 => f16::from_f32(value).is_finite(),
        WeightDtype::Bf16 => bf16::from_f32(value).is_finite(),
    }
}

/// True if every value, stored as `stored`, is finite and stays finite as `target`.
///
/// Without their sign, the bits of floating-point values are ordered like their magnitudes, and NaN and infinity come last. So one
/// comparison suffices.
pub(crate) fn all_fit(stored: WeightDtype, values: &[u8], target: WeightDtype) -> bool {
    use WeightDtype::{Bf16, F16, F32};
    match stored {
        F32 => {
            let limit: u32 = match target {
                F32 => 0x7f80_0000,
                // 65520 and the first value above bf16's range: from here on, rounding gives infinity.
                F16 => 0x477f_f000,
                Bf16 => 0x7f7f_8000,
            };
            none(values, |v: [u8; 4]| u32::from_le_bytes(v) & 0x7fff_ffff >= limit)
        }
        F16 => none(values, |v: [u8; 2]| u16::from_le_bytes(v) & 0x7fff >= 0x7c00),
        Bf16 => {
            // 65536 is the first bf16 value above f16's range.
            let limit: u16 = if target == F16 { 0x4780 } else { 0x7f80 };
            none(values, |v: [u8; 2]| u16::from_le_bytes(v) & 0x7fff >= limit)
        }
    }
}

/// True if no value is `bad`. Has no branch per value, so that the compiler can vectorise it.
fn none<const N: usize>(values: &[u8], bad: impl Fn([u8; N]) -> bool) -> bool {
    let (values, _) = values.as_chunks::<N>();
    values.chunks(1024).all(|block| !block.iter().fold(false, |any, value| any | bad(*value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_numbers(dtype: WeightDtype, values: &[u8]) -> bool {
        all_fit(dtype, values, dtype)
    }

    #[test]
    fn one_value_that_is_no_number_is_found_wherever_it_lies() {
        for place in [0, 1, 7, 1023, 1024, 2999] {
            for value in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut values = vec![f32::MAX; 3000];
                let bytes = |v: &[f32]| v.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
                assert!(all_numbers(WeightDtype::F32, &bytes(&values)));
                values[place] = value;
                assert!(!all_numbers(WeightDtype::F32, &bytes(&values)));

                let mut values = vec![f16::MAX; 3000];
                let bytes = |v: &[f16]| v.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
                assert!(all_numbers(WeightDtype::F16, &bytes(&values)));
                values[place] = f16::from_f32(value);
                assert!(!all_numbers(WeightDtype::F16, &bytes(&values)));

                let mut values = vec![bf16::MIN; 3000];
                let bytes = |v: &[bf16]| v.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
                assert!(all_numbers(WeightDtype::Bf16, &bytes(&values)));
                values[place] = bf16::from_f32(value);
                assert!(!all_numbers(WeightDtype::Bf16, &bytes(&values)));
            }
        }
        let found = NotNumbers::default();
        found.look("good", WeightDtype::F32, &1f32.to_le_bytes(), WeightDtype::F16);
        found.look("bad", WeightDtype::F32, &f32::NAN.to_le_bytes(), WeightDtype::F16);
        let found = found.0.lock().unwrap();
        assert!(found.not_numbers.iter().eq(["bad"]));
        assert!(found.too_large.is_empty());
    }

    /// The quick check agrees with the conversion, near each limit and for values of every magnitude.
    #[test]
    fn values_fit_if_their_conversion_is_finite() {
        let around =
            |value: f32| (-3..=3).map(move |i: i32| f32::from_bits(value.to_bits().wrapping_add_signed(i)));
        let limits = [1.0f32, 65_504.0, 65_520.0, 65_536.0, 3.389e38, f32::from_bits(0x7f7f_8000)];
        let every = (0..=0xffff_u32).map(|high| f32::from_bits((high << 16) | 0x7fff));
        for value in limits.into_iter().flat_map(around).chain(every) {
            for value in [value, -value] {
                for (target, finite) in [
                    (WeightDtype::F32, value.is_finite()),
                    (WeightDtype::F16, f16::from_f32(value).is_finite()),
                    (WeightDtype::Bf16, bf16::from_f32(value).is_finite()),
                ] {
                    assert_eq!(
                        all_fit(WeightDtype::F32, &value.to_le_bytes(), target),
                        finite,
                        "{value:?} {target}"
                    );
                }
            }
        }
        for bits in 0..=u16::MAX {
            let (brief, short) = (bf16::from_bits(bits).to_f32(), f16::from_bits(bits).to_f32());
            for (target, finite) in [
                (WeightDtype::F32, [brief.is_finite(), short.is_finite()]),
                (WeightDtype::F16, [f16::from_f32(brief).is_finite(), short.is_finite()]),
                (WeightDtype::Bf16, [brief.is_finite(), bf16::from_f32(short).is_finite()]),
            ] {
                let fit =
                    [WeightDtype::Bf16, WeightDtype::F16].map(|s| all_fit(s, &bits.to_le_bytes(), target));
                assert_eq!(fit, finite, "{bits:#x} {target}");
            }
        }
    }

    /// A value that f16 cannot hold is a number. The message says which value it is, and which types hold it.
    #[test]
    fn values_that_are_too_large_for_their_type_are_told_from_those_that_are_no_numbers() {
        let bytes = |v: &[f32]| v.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let found = NotNumbers::default();
        found.look("x.weight", WeightDtype::F32, &bytes(&[1.0, 65_520.0, -70_000.0, 2.0]), WeightDtype::F16);
        found.look("small", WeightDtype::F32, &bytes(&[65_504.0, 65_519.0]), WeightDtype::F16);
        found.look("y", WeightDtype::Bf16, &bf16::from_f32(1e30).to_le_bytes(), WeightDtype::Bf16);
        found.look("y", WeightDtype::F32, &f32::MAX.to_le_bytes(), WeightDtype::Bf16);
        let mut all = Found::default();
        // As rank 0 gets what the ranks found.
        let sent = serde_json::to_vec(&*found.0.lock().unwrap()).unwrap();
        all.merge(serde_json::from_slice(&sent).unwrap());
        all.add_too_large("f16", "x.weight", 66_000.0);
        let messages = all.messages();
        assert_eq!(messages.len(), 2, "{messages:?}");
        for (message, words) in [
            (
                &messages[1],
                &[
                    "of f16 (-65504.0 to 65504.0)",
                    "x.weight (value -70000.0)",
                    "`dtype`",
                    "bfloat16",
                    "in a graph of your own the weight's `dtype` to \"bf16\" or \"f32\"",
                ][..],
            ),
            (&messages[0], &["of bf16 (", "y (value 3.4028235e38)", "float32"]),
        ] {
            assert!(words.iter().all(|word| message.contains(word)), "{message}");
            assert!(!message.contains("not numbers"), "{message}");
        }
    }

    /// Measures the speed: `cargo test --release -p mpk-launch speed_of_the_look -- --ignored --nocapture`.
    #[test]
    #[ignore = "a measurement"]
    fn speed_of_the_look() {
        let values = vec![0x3fu8; 256 << 10];
        for dtype in [WeightDtype::F32, WeightDtype::F16, WeightDtype::Bf16] {
            let begin = std::time::Instant::now();
            let mut good = 0u32;
            for _ in 0..20_000 {
                good += u32::from(all_numbers(dtype, std::hint::black_box(&values)));
            }
            assert_eq!(good, 20_000);
            let rate = 20_000.0 * values.len() as f64 / begin.elapsed().as_secs_f64();
            println!("{dtype}: {:.1} GB/s", rate / 1e9);
        }
    }
}
