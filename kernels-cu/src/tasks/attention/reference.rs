//! Attention in f64, one row and head at a time.

/// Norm (weight, eps) and rope (half cosines, half sines) of one query or key.
pub fn prepare(x: &[f32], norm: Option<(&[f32], f64)>, rope: &[f32]) -> Vec<f64> {
    let mut x: Vec<f64> = x.iter().map(|v| f64::from(*v)).collect();
    if let Some((weight, eps)) = norm {
        let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
        for (v, w) in x.iter_mut().zip(weight) {
            *v = *v / (mean + eps).sqrt() * f64::from(*w);
        }
    }
    let half = x.len() / 2;
    (0..x.len())
        .map(|i| {
            let (cos, sin) = (f64::from(rope[i % half]), f64::from(rope[half + i % half]));
            if i < half { x[i] * cos - x[i + half] * sin } else { x[i] * cos + x[i - half] * sin }
        })
        .collect()
}

/// softmax(scale q . keys) values.
pub fn attend(q: &[f32], keys: &[&[f32]], values: &[&[f32]], scale: f64) -> Vec<f64> {
    let scores: Vec<f64> = keys
        .iter()
        .map(|k| scale * q.iter().zip(*k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>())
        .collect();
    let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - highest).exp()).collect();
    let sum: f64 = weights.iter().sum();
    (0..q.len())
        .map(|c| weights.iter().zip(values).map(|(w, v)| w * f64::from(v[c])).sum::<f64>() / sum)
        .collect()
}
