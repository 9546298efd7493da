//! Operators in f64, written from their definitions, and the values that tests use. Matrices are row-major.

/// `count` values between -1 and 1, different for each seed. They are multiples of 1/64, so every float type represents
/// them.
pub fn values(seed: u64, count: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x2545_F491_4F6C_DD1D;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            f64::from((state >> 33) as u32 % 129) / 64.0 - 1.0
        })
        .collect()
}

/// x `[rows, k]` times the transpose of w `[n, k]`, plus bias `[n]`.
pub fn linear(x: &[f64], w: &[f64], k: usize, bias: Option<&[f64]>) -> Vec<f64> {
    let n = w.len() / k;
    let dot = |x: &[f64], w: &[f64]| x.iter().zip(w).map(|(a, b)| a * b).sum::<f64>();
    x.chunks_exact(k)
        .flat_map(|x| (0..n).map(move |j| dot(x, &w[j * k..][..k]) + bias.map_or(0.0, |b| b[j])))
        .collect()
}

/// x `[rows, k]` / sqrt(mean(x^2) + eps) * w `[k]`.
pub fn rmsnorm(x: &[f64], w: &[f64], eps: f64) -> Vec<f64> {
    x.chunks_exact(w.len())
        .flat_map(|x| {
            let scale = 1.0 / (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64 + eps).sqrt();
            x.iter().zip(w).map(move |(v, w)| v * scale * w)
        })
        .collect()
}

/// [gate | up] [rows, 2n] to silu(gate) * up [rows, n].
pub fn silu_mul(gate_up: &[f64], n: usize) -> Vec<f64> {
    gate_up
        .chunks_exact(2 * n)
        .flat_map(|row| (0..n).map(move |i| row[i] / (1.0 + (-row[i]).exp()) * row[n + i]))
        .collect()
}

/// Heads of an attention.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Query heads.
    pub query: usize,
    /// Key/value heads.
    pub key_value: usize,
    /// Elements of a head.
    pub size: usize,
}

/// cos | sin of each position [positions, size], in the layout of the rope table.
pub fn rope_table(positions: usize, size: usize, theta: f64) -> Vec<f64> {
    let half = size / 2;
    let angle = |p: usize, i: usize| p as f64 / theta.powf(2.0 * i as f64 / size as f64);
    (0..positions)
        .flat_map(|p| {
            (0..half).map(move |i| angle(p, i).cos()).chain((0..half).map(move |i| angle(p, i).sin()))
        })
        .collect()
}

/// Causal attention of rows q | k | v at positions 0, 1, ...: optional rmsnorm of each query and key head, rope on
/// halves, softmax of scaled products. A row sees the last `window` rows, itself included; all without a window.
pub fn attention(
    qkv: &[f64],
    heads: Heads,
    rope: &[f64],
    norms: Option<(&[f64], &[f64], f64)>,
    window: Option<usize>,
) -> Vec<f64> {
    let Heads { query, key_value, size } = heads;
    let width = (query + 2 * key_value) * size;
    let rows: Vec<&[f64]> = qkv.chunks_exact(width).collect();
    let turned = |row: usize, first: usize, weight: Option<&[f64]>| {
        let head = &rows[row][first..first + size];
        let head = match (weight, norms) {
            (Some(weight), Some((_, _, eps))) => rmsnorm(head, weight, eps),
            _ => head.to_vec(),
        };
        let half = size / 2;
        let (cos, sin) = rope[row * size..(row + 1) * size].split_at(half);
        let low = (0..half).map(|i| head[i] * cos[i] - head[i + half] * sin[i]);
        let high = (0..half).map(|i| head[i + half] * cos[i] + head[i] * sin[i]);
        low.chain(high).collect::<Vec<f64>>()
    };
    let mut out = Vec::with_capacity(rows.len() * query * size);
    for row in 0..rows.len() {
        let unseen = window.map_or(0, |window| (row + 1).saturating_sub(window));
        for h in 0..query {
            let kv = h * key_value / query;
            let q = turned(row, h * size, norms.map(|n| n.0));
            let scores: Vec<f64> = (unseen..=row)
                .map(|p| {
                    let k = turned(p, (query + kv) * size, norms.map(|n| n.1));
                    q.iter().zip(&k).map(|(a, b)| a * b).sum::<f64>() / (size as f64).sqrt()
                })
                .collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
            let total: f64 = weights.iter().sum();
            let first = (query + key_value + kv) * size;
            out.extend((0..size).map(|i| {
                weights.iter().zip(&rows[unseen..]).map(|(w, row)| w * row[first + i]).sum::<f64>() / total
            }));
        }
    }
    out
}

/// Random weights as `launch::model::random_weights` documents them: the value of tensor `name` [.., columns] at a global
/// index.
pub fn random_weight(seed: u64, name: &str, index: u64) -> f64 {
    let mix64 = |mut x: u64| {
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    };
    let mix32 = |mut x: u32| {
        x = (x ^ (x >> 16)).wrapping_mul(0x7FEB_352D);
        x = (x ^ (x >> 15)).wrapping_mul(0x846C_A68B);
        x ^ (x >> 16)
    };
    let fnv = |key: u64, b: u8| (key ^ u64::from(b)).wrapping_mul(0x100_0000_01B3);
    let key = name.bytes().fold(0xCBF2_9CE4_8422_2325, fnv);
    let key = mix64(key ^ mix64(seed.wrapping_add(0x9E37_79B9_7F4A_7C15)));
    let mut h = mix32(index as u32 ^ key as u32) ^ (key >> 32) as u32 ^ (index >> 32) as u32;
    h = h.wrapping_mul(0x9E37_79B1);
    h ^= h >> 15;
    let sum = [0, 8, 16, 24].iter().map(|s| (h >> s & 127) as i32).sum::<i32>() - 254;
    if name.ends_with("norm.weight") {
        1.0 + f64::from((sum + 16) >> 5) / 128.0
    } else {
        f64::from(sum) / 4096.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: a position attends to itself and to earlier ones, rotated by rope.
    #[test]
    fn attention_of_two_rows() {
        let heads = Heads { query: 1, key_value: 1, size: 2 };
        let rope = [1.0, 0.0, 0.0, 1.0];
        let qkv = [1.0, 0.0, 1.0, 0.0, 5.0, 6.0, 0.0, 1.0, 0.0, 2.0, 7.0, 8.0];
        let out = attention(&qkv, heads, &rope, None, None);
        assert_eq!(out[..2], [5.0, 6.0]);
        // Row 1: q = (0, 1) rotated by 90 degrees is (-1, 0); its keys (1, 0) and (-2, 0) give -1 and 2 over sqrt(2).
        let (a, b) = ((-1.0 / 2f64.sqrt()).exp(), (2.0 / 2f64.sqrt()).exp());
        let expected = (5.0 * a + 7.0 * b) / (a + b);
        assert!((out[2] - expected).abs() < 1e-12, "{out:?}");
    }
}
