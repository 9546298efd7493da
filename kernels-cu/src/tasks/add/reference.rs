//! The sum, in f64.

/// The sum of all summands, element by element.
pub fn add(summands: &[Vec<f32>]) -> Vec<f64> {
    (0..summands[0].len()).map(|at| summands.iter().map(|s| f64::from(s[at])).sum()).collect()
}
