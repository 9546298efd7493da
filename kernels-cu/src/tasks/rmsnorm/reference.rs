//! The norm in f64.

/// Each row of `x` [rows, k] divided by sqrt(mean(x^2) + eps), times `weight` [k].
pub fn rmsnorm(x: &[f32], weight: &[f32], eps: f64) -> Vec<f64> {
    let k = weight.len();
    let mut out = Vec::with_capacity(x.len());
    for row in x.chunks_exact(k) {
        let mean = row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / k as f64;
        let scale = (mean + eps).sqrt();
        out.extend(row.iter().zip(weight).map(|(v, w)| f64::from(*v) / scale * f64::from(*w)));
    }
    out
}
