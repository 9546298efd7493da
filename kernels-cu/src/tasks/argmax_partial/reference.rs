//! The best tokens of a row of logits and their log-probabilities, by sorting, in f64.

/// (token, log-probability) of the first `k`, best first; NaN counts as -infinity.
pub fn top(logits: &[f32], k: usize) -> Vec<(u32, f64)> {
    let values: Vec<f64> =
        logits.iter().map(|v| if v.is_nan() { f64::NEG_INFINITY } else { f64::from(*v) }).collect();
    let mut order: Vec<u32> = (0..values.len() as u32).collect();
    order.sort_by(|a, b| values[*b as usize].total_cmp(&values[*a as usize]).then(a.cmp(b)));
    let highest = values[order[0] as usize];
    let sum: f64 = values.iter().map(|v| if *v == highest { 1.0 } else { (v - highest).exp() }).sum();
    let logprob = |v: f64| if v == highest { -sum.ln() } else { v - highest - sum.ln() };
    order.iter().take(k).map(|t| (*t, logprob(values[*t as usize]))).collect()
}
