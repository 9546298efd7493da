//! The gate in f64.

/// The error function, from its series.
fn erf(x: f64) -> f64 {
    let a = x.abs();
    if a > 6.0 {
        return x.signum();
    }
    // erf(x) = 2 / sqrt(pi) e^(-x^2) sum 2^n x^(2n+1) / (2n+1)!!
    let (mut term, mut sum, mut n) = (a, a, 0.0);
    while term > sum * 1e-17 {
        n += 1.0;
        term *= 2.0 * a * a / (2.0 * n + 1.0);
        sum += term;
    }
    x.signum() * 2.0 / std::f64::consts::PI.sqrt() * (-a * a).exp() * sum
}

/// The function that is applied to a gate.
pub fn activated(activation: &str, x: f64) -> f64 {
    match activation {
        "gelu" => 0.5 * x * (1.0 + erf(x / 2f64.sqrt())),
        "gelu-tanh" => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            0.5 * x * (1.0 + u.tanh())
        }
        _ => x / (1.0 + (-x).exp()),
    }
}

/// activation(gate) * up of each row [gate | up] of `gate_up` [rows, 2n]: [rows, n].
pub fn gated(activation: &str, gate_up: &[f32], n: usize) -> Vec<f64> {
    let rows = gate_up.chunks_exact(2 * n);
    rows.flat_map(|row| (0..n).map(|i| activated(activation, f64::from(row[i])) * f64::from(row[n + i])))
        .collect()
}

/// silu(gate) * up of each row [gate | up] of `gate_up` [rows, 2n]: [rows, n].
pub fn silu_mul(gate_up: &[f32], n: usize) -> Vec<f64> {
    let mut out = Vec::with_capacity(gate_up.len() / 2);
    for row in gate_up.chunks_exact(2 * n) {
        out.extend((0..n).map(|i| {
            let gate = f64::from(row[i]);
            gate / (1.0 + (-gate).exp()) * f64::from(row[n + i])
        }));
    }
    out
}
