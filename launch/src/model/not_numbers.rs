//! Finds weights that are not numbers. They mean that a download or conversion is broken, and the tokens would be
//! meaningless.
//!
//! Every value is checked right after it was read, while it is still in the core's cache. So the check causes no memory
//! traffic on any target.

use crate::model::hf_config::WeightDtype;
use distributed::World;
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

/// Number of tensor names in the warning.
const NAMED: usize = 8;

/// The names of the tensors with such values.
#[derive(Debug, Default)]
pub struct NotNumbers(Mutex<BTreeSet<String>>);

impl NotNumbers {
    /// Checks values of tensor `name`.
    pub fn look(&self, name: &str, dtype: WeightDtype, values: &[u8]) {
        if !all_numbers(dtype, values) {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(name.into());
        }
    }

    /// Collective: rank 0 warns about everything that any rank found.
    pub fn warn(&self, world: &World) {
        let own = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let own: Vec<&str> = own.iter().map(String::as_str).collect();
        let all = world.gather(own.join("\n").into_bytes());
        let all: Vec<String> =
            all.into_iter().map(|names| String::from_utf8_lossy(&names).into_owned()).collect();
        let names: BTreeSet<&str> = all.iter().flat_map(|names| names.lines()).collect();
        if names.is_empty() {
            return;
        }
        let named: Vec<&str> = names.iter().copied().take(NAMED).collect();
        let more = names.len() - named.len();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        tracing::warn!(
            "some weights are not numbers (NaN or infinity), in {}{more}: tokens that depend on them are meaningless; download or convert the checkpoint again",
            named.join(", ")
        );
    }
}

/// True if every value is finite. Only NaN and the infinities have all exponent bits set.
fn all_numbers(dtype: WeightDtype, values: &[u8]) -> bool {
    match dtype {
        WeightDtype::F32 => {
            const EXPONENT: u32 = 0x7f80_0000;
            none(values, |v: [u8; 4]| u32::from_le_bytes(v) & EXPONENT == EXPONENT)
        }
        WeightDtype::F16 => {
            const EXPONENT: u16 = 0x7c00;
            none(values, |v: [u8; 2]| u16::from_le_bytes(v) & EXPONENT == EXPONENT)
        }
        WeightDtype::Bf16 => {
            const EXPONENT: u16 = 0x7f80;
            none(values, |v: [u8; 2]| u16::from_le_bytes(v) & EXPONENT == EXPONENT)
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
    use half::{bf16, f16};

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
        found.look("good", WeightDtype::F32, &1f32.to_le_bytes());
        found.look("bad", WeightDtype::F32, &f32::NAN.to_le_bytes());
        assert!(found.0.lock().unwrap().iter().eq(["bad"]));
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
