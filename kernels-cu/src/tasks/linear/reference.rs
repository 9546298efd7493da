//! The product in f64.

/// `x` [rows, k] times `weight` [n, k], plus `bias` [n] and `residual` [rows, n] if given: [rows, n].
pub fn linear(
    x: &[f32],
    weight: &[f32],
    k: usize,
    bias: Option<&[f32]>,
    residual: Option<&[f32]>,
) -> Vec<f64> {
    let n = weight.len() / k;
    let mut out = Vec::with_capacity(x.len() / k * n);
    for (r, row) in x.chunks_exact(k).enumerate() {
        for (c, w) in weight.chunks_exact(k).enumerate() {
            let product: f64 = row.iter().zip(w).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            let bias = bias.map_or(0.0, |b| f64::from(b[c]));
            out.push(product + bias + residual.map_or(0.0, |res| f64::from(res[r * n + c])));
        }
    }
    out
}
