//! The gate in f64.

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
