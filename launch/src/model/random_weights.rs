//! Random weights. Each value is a function of seed, tensor name and global index, so it is the same for every number
//! of ranks and on every backend.
//!
//! All arithmetic is on unsigned integers modulo their width, and every result is exact in f32, f16 and bf16, so that
//! a device's own implementation gives the same bits. With `^` for exclusive or:
//!
//! ```text
//! mix64(x): x ^= x >> 30; x *= 0xBF58476D1CE4E5B9; x ^= x >> 27; x *= 0x94D049BB133111EB; x ^= x >> 31
//! mix32(x): x ^= x >> 16; x *= 0x7FEB352D; x ^= x >> 15; x *= 0x846CA68B; x ^= x >> 16
//!
//! once for each tensor, in 64 bits:
//!   key = 0xCBF29CE484222325; for each byte b of the name: key = (key ^ b) * 0x100000001B3      (FNV-1a)
//!   key = mix64(key ^ mix64(seed + 0x9E3779B97F4A7C15))
//! for the element at row r, column c of [rows, columns], in 32 bits:
//!   i = r * columns + c                                                                          (64 bits)
//!   h = mix32(low32(i) ^ low32(key)) ^ high32(key) ^ high32(i)
//!   h *= 0x9E3779B1; h ^= h >> 15
//!   s = (h & 127) + (h >> 8 & 127) + (h >> 16 & 127) + (h >> 24 & 127) - 254          (-254 .. 254, signed)
//! value = s / 4096                               about normal, standard deviation 0.018
//! value = 1 + floor((s + 16) / 32) / 128         where the name ends in "norm.weight": 0.94 .. 1.0625
//! ```
//!
//! FNV-1a is by Fowler, Noll and Vo; mix64 is the finaliser of SplitMix64 (Steele, Lea, Flood), mix32 the
//! "lowbias32" function of C. Wellons.

use std::ops::Range;

use half::{bf16, f16};

use crate::model::{checkpoint::matrix, hf_config::WeightDtype};

/// The weights of a seed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RandomWeights {
    seed: u64,
}

/// The values of one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RandomTensor {
    key: u64,
    norm: bool,
    rows: usize,
    columns: usize,
}

impl RandomWeights {
    /// The weights of `seed`.
    pub const fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// The tensor `name` with this shape. A tensor with one dimension counts as one row.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> RandomTensor {
        let mut key = 0xCBF2_9CE4_8422_2325_u64;
        for byte in name.bytes() {
            key = (key ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3);
        }
        let seed = mix64(self.seed.wrapping_add(0x9E37_79B9_7F4A_7C15));
        let (rows, columns) = matrix(shape);
        RandomTensor { key: mix64(key ^ seed), norm: name.ends_with("norm.weight"), rows, columns }
    }
}

impl RandomTensor {
    /// The key from which the values are computed; see the module's text.
    pub fn key(&self) -> u64 {
        self.key
    }

    /// True if the values are near 1 instead of near 0.
    pub fn is_norm(&self) -> bool {
        self.norm
    }

    /// Number of columns, which is the number of elements in a row.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// The value at a global index (row x columns + column).
    pub fn value(&self, index: u64) -> f32 {
        self.scaled(sum(self.key, index as u32, (index >> 32) as u32))
    }

    fn scaled(&self, sum: i32) -> f32 {
        if self.norm { 1.0 + ((sum + 16) >> 5) as f32 / 128.0 } else { sum as f32 / 4096.0 }
    }

    /// Writes the elements [rows, columns] to `out` as `dtype`, row-major without gaps, little-endian.
    ///
    /// # Panics
    /// The ranges are outside the tensor, or the size of `out` differs from theirs.
    pub fn fill(&self, rows: Range<usize>, columns: Range<usize>, dtype: WeightDtype, out: &mut [u8]) {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        assert!(
            columns.start <= columns.end && columns.end <= self.columns,
            "columns {columns:?} of {}",
            self.columns
        );
        let pitch = columns.len() * dtype.size();
        assert_eq!(out.len(), rows.len() * pitch, "size of the target");
        if out.is_empty() {
            return;
        }
        for (row, out) in rows.zip(out.chunks_exact_mut(pitch)) {
            let first = row as u64 * self.columns as u64 + columns.start as u64;
            match dtype {
                WeightDtype::F32 => self.fill_run(first, out, |v| v.to_le_bytes()),
                WeightDtype::Bf16 => self.fill_run(first, out, |v| bf16_bits(v).to_le_bytes()),
                WeightDtype::F16 => self.fill_run(first, out, |v| f16::from_f32(v).to_le_bytes()),
            }
        }
    }

    /// Writes the elements from index `first` on.
    fn fill_run<const N: usize>(&self, first: u64, out: &mut [u8], bytes: impl Fn(f32) -> [u8; N]) {
        let (out, _) = out.as_chunks_mut::<N>();
        // A run ends where the low half of the index wraps, so that the inner loop needs only 32-bit numbers.
        let until_wrap = (1u64 << 32) - (first & 0xFFFF_FFFF);
        let split = usize::try_from(until_wrap).unwrap_or(usize::MAX).min(out.len());
        let (before, after) = out.split_at_mut(split);
        for (first, run) in [(first, before), (first.wrapping_add(until_wrap), after)] {
            let (low, high) = (first as u32, (first >> 32) as u32);
            for (j, out) in (0u32..).zip(run) {
                *out = bytes(self.scaled(sum(self.key, low.wrapping_add(j), high)));
            }
        }
    }
}

/// The upper half of an f32 that a bf16 holds exactly.
fn bf16_bits(value: f32) -> u16 {
    debug_assert_eq!(bf16::from_f32(value).to_f32(), value);
    (value.to_bits() >> 16) as u16
}

#[inline(always)]
fn sum(key: u64, low: u32, high: u32) -> i32 {
    let mut h = mix32(low ^ key as u32) ^ (key >> 32) as u32 ^ high;
    h = h.wrapping_mul(0x9E37_79B1);
    h ^= h >> 15;
    ((h & 127) + (h >> 8 & 127) + (h >> 16 & 127) + (h >> 24 & 127)) as i32 - 254
}

#[inline(always)]
fn mix32(mut x: u32) -> u32 {
    x ^= x >> 16;
    x = x.wrapping_mul(0x7FEB_352D);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846C_A68B);
    x ^ (x >> 16)
}

fn mix64(mut x: u64) -> u64 {
    x ^= x >> 30;
    x = x.wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x ^= x >> 27;
    x = x.wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(tensor: &RandomTensor, rows: Range<usize>, columns: Range<usize>) -> Vec<f32> {
        let mut out = vec![0; rows.len() * columns.len() * 4];
        tensor.fill(rows, columns, WeightDtype::F32, &mut out);
        out.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }

    /// Values computed by an independent Python implementation of the formula in the module's text.
    #[test]
    fn known_values() {
        for (seed, name, index, value) in KNOWN {
            let tensor = RandomWeights::new(seed).tensor(name, &[1 << 20, 1 << 20]);
            assert_eq!(tensor.value(index), value, "{seed} {name} {index}");
        }
    }

    const KNOWN: [(u64, &str, u64, f32); 9] = [
        (1, "model.embed_tokens.weight", 0, 57.0 / 4096.0),
        (1, "model.embed_tokens.weight", 1, 0.0029296875),
        (1, "model.embed_tokens.weight", 12345, 30.0 / 4096.0),
        (1, "lm_head.weight", 4294967303, -0.00048828125),
        (0, "lm_head.weight", 0, -0.02734375),
        (18446744073709551615, "model.layers.31.self_attn.q_proj.bias", 4095, 49.0 / 4096.0),
        (1, "model.norm.weight", 0, 1.0078125),
        (1, "model.norm.weight", 17, 1.0078125),
        (42, "model.layers.3.self_attn.k_norm.weight", 5, 1.015625),
    ];

    #[test]
    fn a_range_is_the_same_part_of_the_whole() {
        let tensor = RandomWeights::new(7).tensor("model.layers.0.mlp.down_proj.weight", &[13, 31]);
        let whole = read(&tensor, 0..13, 0..31);
        let part = read(&tensor, 3..9, 5..22);
        for (r, row) in part.chunks(17).enumerate() {
            assert_eq!(row, &whole[(r + 3) * 31 + 5..][..17]);
        }
    }

    #[test]
    fn runs_go_on_where_the_low_half_of_the_index_wraps() {
        let columns = (1usize << 32) + 5;
        let tensor = RandomWeights::new(1).tensor("x", &[2, columns]);
        let got = read(&tensor, 0..1, columns - 10..columns);
        let expected: Vec<f32> = (columns - 10..columns).map(|i| tensor.value(i as u64)).collect();
        assert_eq!(got, expected);
        assert_ne!(tensor.value(3), tensor.value((1 << 32) + 3));
    }

    #[test]
    fn all_dtypes_hold_the_same_values() {
        for name in ["lm_head.weight", "model.norm.weight"] {
            let tensor = RandomWeights::new(3).tensor(name, &[4096]);
            let f32s = read(&tensor, 0..1, 0..4096);
            let mut half_bytes = vec![0; 8192];
            tensor.fill(0..1, 0..4096, WeightDtype::Bf16, &mut half_bytes);
            for (b, v) in half_bytes.chunks_exact(2).zip(&f32s) {
                assert_eq!(bf16::from_le_bytes([b[0], b[1]]).to_f32(), *v);
            }
            tensor.fill(0..1, 0..4096, WeightDtype::F16, &mut half_bytes);
            for (b, v) in half_bytes.chunks_exact(2).zip(&f32s) {
                assert_eq!(f16::from_le_bytes([b[0], b[1]]).to_f32(), *v);
            }
        }
    }

    #[test]
    fn values_are_spread_and_uncorrelated() {
        let n = 1 << 18;
        let moments = |a: &[f32], b: &[f32]| -> f64 {
            a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>() / n as f64
        };
        let weights = RandomWeights::new(1);
        let a = read(&weights.tensor("model.layers.0.mlp.up_proj.weight", &[n]), 0..1, 0..n);
        let b = read(&weights.tensor("model.layers.1.mlp.up_proj.weight", &[n]), 0..1, 0..n);
        let mean = a.iter().map(|&v| f64::from(v)).sum::<f64>() / n as f64;
        let deviation = moments(&a, &a).sqrt();
        assert!(mean.abs() < 2e-4, "{mean}");
        assert!((0.0178..0.0183).contains(&deviation), "{deviation}");
        // Correlations of independent samples are about 1 / sqrt(n) = 0.002.
        for lag in [1, 2, 64, 1024, 4096] {
            let correlation = moments(&a[..n - lag], &a[lag..]) / moments(&a, &a);
            assert!(correlation.abs() < 0.01, "lag {lag}: {correlation}");
        }
        let correlation = moments(&a, &b) / moments(&a, &a);
        assert!(correlation.abs() < 0.01, "{correlation}");

        let norm = read(&weights.tensor("model.norm.weight", &[n]), 0..1, 0..n);
        assert!(norm.iter().all(|v| (0.9..1.1).contains(v)));
    }
}
