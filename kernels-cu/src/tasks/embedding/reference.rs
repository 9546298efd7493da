//! The look-up.

/// Rows `tokens` of `table` [vocabulary, k]; zeros for a token that is not in the table.
pub fn embedding(table: &[f32], k: usize, tokens: &[i32]) -> Vec<f64> {
    let mut out = Vec::with_capacity(tokens.len() * k);
    for token in tokens {
        match usize::try_from(*token).ok().and_then(|t| table.get(t * k..(t + 1) * k)) {
            Some(row) => out.extend(row.iter().map(|v| f64::from(*v))),
            None => out.extend(std::iter::repeat_n(0.0, k)),
        }
    }
    out
}
