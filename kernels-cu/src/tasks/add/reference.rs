//! The sum, in f64.

/// `a + residual`, element by element.
pub fn add(a: &[f32], residual: &[f32]) -> Vec<f64> {
    a.iter().zip(residual).map(|(a, r)| f64::from(*a) + f64::from(*r)).collect()
}
