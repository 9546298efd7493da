//! Compares what a case's run wrote with the reference.

use super::data::Data;
use super::{Case, LocalHeads};
use crate::isa::Isa;
use crate::tasks::attention::reference::{attend, prepare};
use crate::testing::{TestTensor, rounded};
use taskgraph::DType;

impl Case {
    /// The largest errors of output and cache: half a unit in the last place of the act dtype, plus the effect of a query or key that is
    /// rounded the other way.
    fn errors(&self) -> (f64, f64) {
        match self.dtype {
            DType::Bf16 => (2e-2, 1.0 / 128.0),
            DType::F16 => (3e-3, 1.0 / 1024.0),
            _ => (1e-5, 1e-5),
        }
    }

    /// Compares output and cache with the reference.
    pub fn check(&self, data: &Data, rank: u32, out: &TestTensor, cache: &TestTensor) {
        let (local, (output_error, cache_error)) = (self.local_heads(rank), self.errors());
        self.check_output(data, &local, out, output_error);
        self.check_cache(data, &local, cache, cache_error);
    }

    fn check_output(&self, data: &Data, local: &LocalHeads, out: &TestTensor, largest: f64) {
        let d = self.head_dim as usize;
        let readers = u64::from(self.heads / self.kv_heads);
        let out_values = out.values();
        let out_width = (local.queries.end - local.queries.start) as usize * d;
        let mut row = 0;
        for (a, (context, new)) in self.slots.iter().enumerate() {
            let slot = &data.slots[a];
            for p in *context..context + new {
                let token = self.token(a, p);
                for (number, head) in local.queries.clone().enumerate() {
                    let q = prepare(
                        &token[head as usize * d..][..d],
                        self.norm(&data.q_norm),
                        &data.rope[p as usize * d..][..d],
                    );
                    let q = rounded(self.dtype, &q.iter().map(|v| *v as f32).collect::<Vec<_>>());
                    let seen = if self.window == 0 { p + 1 } else { self.window.min(p + 1) };
                    let of = |all: &'_ Vec<Vec<Vec<f32>>>| -> Vec<Vec<f32>> {
                        all[(p + 1 - seen) as usize..=p as usize]
                            .iter()
                            .map(|k| k[(head / readers) as usize].clone())
                            .collect()
                    };
                    let (keys, values) = (of(&slot.keys), of(&slot.values));
                    let expected = attend(
                        &q,
                        &keys.iter().map(Vec::as_slice).collect::<Vec<_>>(),
                        &values.iter().map(Vec::as_slice).collect::<Vec<_>>(),
                        f64::from(self.head_dim).powf(-0.5),
                    );
                    let got = &out_values[row * out_width + number * d..][..d];
                    for (c, (g, e)) in got.iter().zip(&expected).enumerate() {
                        let error = (f64::from(*g) - e).abs();
                        assert!(
                            error <= largest * e.abs().max(1.0),
                            "{self:?} slot {a} position {p} head {head} [{c}]: {g}, expected {e}"
                        );
                    }
                }
                row += 1;
            }
        }
        assert!(
            out_values[row * out_width..].iter().all(|v| v.is_nan()),
            "rows that are not in use were written"
        );
    }

    fn check_cache(&self, data: &Data, local: &LocalHeads, cache: &TestTensor, largest: f64) {
        let (d, local_kv) = (self.head_dim as usize, local.num_key_values());
        let values = cache.values();
        let mut expected = vec![f32::NAN; values.len()];
        for (a, (context, new)) in self.slots.iter().enumerate() {
            let slot = &data.slots[a];
            for p in 0..context + new {
                for (head, global) in local.key_values.clone().enumerate() {
                    for (value, from) in [(false, &slot.keys), (true, &slot.values)] {
                        let at = self.cache_at(data, a, p, local_kv, head as u32, value);
                        expected[at..at + d].copy_from_slice(&from[p as usize][global as usize]);
                    }
                }
            }
        }
        for (i, (g, e)) in values.iter().zip(&expected).enumerate() {
            let close = (g.is_nan() && e.is_nan())
                || f64::from((g - e).abs()) <= largest * f64::from(e.abs()).max(0.1);
            assert!(close, "{self:?}: cache element {i} is {g}, expected {e}");
        }
    }

    /// Checks all ranks and levels; the levels give the same bits.
    pub fn verify(&self) {
        let data = self.data();
        for rank in 0..self.world {
            let mut first: Option<(Vec<u8>, Vec<u8>)> = None;
            for isa in [Isa::Avx512, Isa::Avx2, Isa::Scalar] {
                let Some((out, cache)) = isa.with(|| self.run(&data, rank)) else { continue };
                match &first {
                    None => {
                        self.check(&data, rank, &out, &cache);
                        first = Some((out.data.bytes().to_vec(), cache.data.bytes().to_vec()));
                    }
                    Some((o, c)) => {
                        assert!(
                            o == out.data.bytes() && c == cache.data.bytes(),
                            "{self:?}: {isa:?} gives other bits"
                        );
                    }
                }
            }
        }
    }
}
