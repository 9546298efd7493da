//! The operands of a case: values of tokens, the pages of its slots, and the batch of its iteration.

use super::Case;
use crate::tasks::attention::reference::prepare;
use crate::testing::{TestBatch, random_values, rounded};

/// Values of one slot: every position's key and value (after norm, rope and rounding) by kv head.
pub struct Slot {
    pub keys: Vec<Vec<Vec<f32>>>,
    pub values: Vec<Vec<Vec<f32>>>,
}

/// Artificial operands of a case. A token's values depend only on (seed, slot, position).
pub struct Data {
    pub(super) qkv: Vec<f32>,
    pub(super) rope: Vec<f32>,
    pub(super) q_norm: Vec<f32>,
    pub(super) k_norm: Vec<f32>,
    pub slots: Vec<Slot>,
    pub(super) rows: u32,
    pub(super) active: u32,
    pub(super) max_seq: u32,
    pub(super) num_pages: u32,
    pub pages_per_slot: u32,
    pub page_table: Vec<i32>,
}

impl Case {
    /// The row of `qkv` of a token.
    pub(super) fn token(&self, slot: usize, position: u32) -> Vec<f32> {
        let seed = 1 + slot as u64 * 100_003 + u64::from(position);
        let values: Vec<f32> = random_values(seed, self.width()).iter().map(|v| v * 1.5).collect();
        rounded(self.dtype, &values)
    }

    pub fn data(&self) -> Data {
        let d = self.head_dim as usize;
        let max_seq = self.slots.iter().map(|(c, n)| c + n).max().unwrap_or(1) + 3;
        let rope: Vec<f32> = (0..max_seq)
            .flat_map(|p| {
                let angle = move |i: usize| f64::from(p) * 10_000f64.powf(-2.0 * i as f64 / d as f64);
                let cos = (0..d / 2).map(move |i| angle(i).cos() as f32);
                cos.chain((0..d / 2).map(move |i| angle(i).sin() as f32))
            })
            .collect();
        let weight =
            |seed| rounded(self.dtype, &random_values(seed, d).iter().map(|v| v + 1.5).collect::<Vec<_>>());
        let (q_norm, k_norm) = (weight(7), weight(8));
        let mut qkv = Vec::new();
        let mut slots = Vec::new();
        for (s, (context, new)) in self.slots.iter().enumerate() {
            let (mut keys, mut values) = (Vec::new(), Vec::new());
            for position in 0..context + new {
                let token = self.token(s, position);
                let rope_row = &rope[position as usize * d..][..d];
                let at = |head: u32| &token[(head * self.head_dim) as usize..][..d];
                keys.push(
                    (0..self.kv_heads)
                        .map(|h| {
                            let k = prepare(at(self.heads + h), self.norm(&k_norm), rope_row);
                            rounded(self.dtype, &k.iter().map(|v| *v as f32).collect::<Vec<_>>())
                        })
                        .collect(),
                );
                values
                    .push((0..self.kv_heads).map(|h| at(self.heads + self.kv_heads + h).to_vec()).collect());
                if position >= *context {
                    qkv.extend(token);
                }
            }
            slots.push(Slot { keys, values });
        }
        let active = self.slots.len() as u32 + 1; // one slot takes no part
        let used = (qkv.len() / self.width()) as u32;
        let rows = (used + 2).max(active);
        qkv.resize(rows as usize * self.width(), f32::NAN);
        let pages_per_slot = max_seq.div_ceil(self.page_size);
        let num_pages = pages_per_slot * active + 1;
        // Pages in a shuffled order: a step that is coprime to the number of pages.
        let step =
            (1..num_pages).rev().find(|s| gcd(*s, num_pages) == 1 && *s < num_pages / 2 + 1).unwrap_or(1);
        let page_table = (0..pages_per_slot * active).map(|i| (i * step % num_pages) as i32).collect();
        Data {
            qkv,
            rope,
            q_norm,
            k_norm,
            slots,
            rows,
            active,
            max_seq,
            num_pages,
            pages_per_slot,
            page_table,
        }
    }

    pub fn batch(&self, data: &Data) -> TestBatch {
        let n = self.slots.len();
        let mut first = 0;
        let mut batch = TestBatch {
            iteration: 1,
            epoch: 1,
            num_active: n as u32,
            page_size: self.page_size,
            num_pages: data.num_pages,
            pages_per_slot: data.pages_per_slot,
            page_table: data.page_table.clone(),
            ..TestBatch::default()
        };
        for (a, (context, rows)) in self.slots.iter().enumerate() {
            batch.row_active.extend((0..*rows).map(|_| a as i32));
            batch.row_position.extend((*context..context + rows).map(|p| p as i32));
            batch.active_slot.push((n - a) as i32);
            batch.active_first_row.push(first);
            batch.active_num_rows.push(*rows as i32);
            batch.active_context.push(*context as i32);
            first += *rows as i32;
        }
        batch.num_rows = first as u32;
        batch
    }

    /// Index of position `p` of active slot `a` in a cache with `kv` local heads.
    pub fn cache_at(&self, data: &Data, a: usize, p: u32, kv: u32, head: u32, value: bool) -> usize {
        let slot = self.slots.len() - a;
        let page =
            data.page_table[slot * data.pages_per_slot as usize + (p / self.page_size) as usize] as u32;
        let plane = page * 2 * kv + u32::from(value) * kv + head;
        ((plane * self.page_size + p % self.page_size) * self.head_dim) as usize
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}
