//! Artificial attention operators, run through the contract and the kernels, and compared with the reference.

use super::reference::{attend, prepare};
use super::{kv_region_dims, kv_sharding, qkv_sharding};
use crate::isa::Isa;
use crate::layout::{narrow_index, wide_index};
use crate::registry::registry;
use crate::tasks::wide::{narrow_dims, wide_dims};
use crate::testing::{
    Call, TestBatch, TestRank, TestTask, TestTensor, assert_covered_once, random_values, rounded, run_task,
};
use serde_json::json;
use taskgraph::op_graph::{Attrs, Role};
use taskgraph::task_type::{Expansion, ExpansionOperand, LocalOp, OpView, OperandView, TensorType};
use taskgraph::{Backend, Capacity, DType, Rows, Sharding, Split, Target};

#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) dtype: DType,
    pub(super) heads: u32,
    pub(super) kv_heads: u32,
    pub(super) head_dim: u32,
    pub(super) page_size: u32,
    pub(super) splits: u32,
    pub(super) qk_norm: bool,
    /// (tokens in the cache, new rows) of each slot.
    pub(super) slots: Vec<(u32, u32)>,
    pub(super) world: u32,
    /// The steps for many rows, divided among this number of workers.
    pub(super) prefill: Option<u32>,
    /// Maximum number of key-value heads per task, as on a GPU.
    pub(super) kv_heads_of_task: u32,
    /// Positions that a query sees; 0: all.
    pub(super) window: u32,
    /// Columns of a column tile of the output, in `MPK_LAYOUT_WIDE`; 0: it is written as rows.
    pub(super) wide: u32,
}

const EPS: f64 = 1e-5;

/// Values of one slot: every position's key and value (after norm, rope and rounding) by kv head.
pub(super) struct Slot {
    pub(super) keys: Vec<Vec<Vec<f32>>>,
    pub(super) values: Vec<Vec<Vec<f32>>>,
}

/// Artificial operands of a case. A token's values depend only on (seed, slot, position).
pub(super) struct Data {
    qkv: Vec<f32>,
    rope: Vec<f32>,
    q_norm: Vec<f32>,
    k_norm: Vec<f32>,
    pub(super) slots: Vec<Slot>,
    rows: u32,
    active: u32,
    max_seq: u32,
    num_pages: u32,
    pub(super) pages_per_slot: u32,
    pub(super) page_table: Vec<i32>,
}

impl Case {
    fn width(&self) -> usize {
        ((self.heads + 2 * self.kv_heads) * self.head_dim) as usize
    }

    fn token(&self, slot: usize, position: u32) -> Vec<f32> {
        let seed = 1 + slot as u64 * 100_003 + u64::from(position);
        let values: Vec<f32> = random_values(seed, self.width()).iter().map(|v| v * 1.5).collect();
        rounded(self.dtype, &values)
    }

    fn norm<'a>(&self, weight: &'a [f32]) -> Option<(&'a [f32], f64)> {
        self.qk_norm.then_some((weight, EPS))
    }

    pub(super) fn data(&self) -> Data {
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
        let active = self.slots.len() as u32 + 1; // one slot more than takes part
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

    pub(super) fn batch(&self, data: &Data) -> TestBatch {
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
    pub(super) fn cache_at(&self, data: &Data, a: usize, p: u32, kv: u32, head: u32, value: bool) -> usize {
        let slot = self.slots.len() - a;
        let page =
            data.page_table[slot * data.pages_per_slot as usize + (p / self.page_size) as usize] as u32;
        let plane = page * 2 * kv + u32::from(value) * kv + head;
        ((plane * self.page_size + p % self.page_size) * self.head_dim) as usize
    }

    fn attrs(&self) -> Attrs {
        let attrs = json!({"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim,
            "qk_norm": self.qk_norm, "eps": EPS, "splits": self.splits, "prefill": self.prefill.is_some()});
        let mut attrs = attrs.as_object().unwrap().clone();
        if self.window != 0 {
            attrs.insert("window".to_string(), self.window.into());
        }
        attrs
    }

    /// Runs the operator on one rank; returns the output and the cache.
    pub(super) fn run(&self, data: &Data, rank: u32) -> (TestTensor, TestTensor) {
        self.run_with(data, rank, &mut self.batch(data), |_, _| true)
    }

    /// The same with another batch, and with only some tasks, given by their type and number.
    pub(super) fn run_with(
        &self,
        data: &Data,
        rank: u32,
        batch: &mut TestBatch,
        runs: impl Fn(&str, usize) -> bool,
    ) -> (TestTensor, TestTensor) {
        let registry = registry();
        let attention = registry.get("attention").unwrap();
        let (h, kv, d) = (u64::from(self.heads), u64::from(self.kv_heads), self.head_dim);
        let (qkv_split, kv_split, out_split) = if self.world == 1 {
            (Sharding::Replicated, Sharding::Replicated, Sharding::Replicated)
        } else {
            let queries = Split::Queries { heads: h, head_dim: u64::from(d) };
            let out = Sharding::split(1, h * u64::from(d), queries);
            (qkv_sharding(1, h, kv, u64::from(d)), kv_sharding(h, kv), out)
        };
        let queries = Split::Queries { heads: h, head_dim: 1 }.range(h, rank, self.world);
        let key_values = Split::KeyValues { heads: h, kv_heads: kv, head_dim: 1 }.range(kv, rank, self.world);
        let local_kv = (key_values.end - key_values.start) as u32;
        let columns: Vec<usize> = [
            queries.clone(),
            h + key_values.start..h + key_values.end,
            h + kv + key_values.start..h + kv + key_values.end,
        ]
        .into_iter()
        .flatten()
        .flat_map(|head| (0..d as usize).map(move |c| head as usize * d as usize + c))
        .collect();
        let local_qkv: Vec<f32> =
            data.qkv.chunks(self.width()).flat_map(|row| columns.iter().map(|c| row[*c])).collect();
        let cache_dims = [data.num_pages, 2 * local_kv, self.page_size, d];
        let mut cache_values = vec![f32::NAN; cache_dims.iter().product::<u32>() as usize];
        for (a, (context, _)) in self.slots.iter().enumerate() {
            for p in 0..*context {
                for head in 0..local_kv {
                    let global = key_values.start as usize + head as usize;
                    for (value, from) in [(false, &data.slots[a].keys), (true, &data.slots[a].values)] {
                        let at = self.cache_at(data, a, p, local_kv, head, value);
                        cache_values[at..at + d as usize].copy_from_slice(&from[p as usize][global]);
                    }
                }
            }
        }
        let persistent =
            Role::Persistent { region_dims: Some(kv_region_dims(data.active, u64::from(self.kv_heads))) };
        let mut inputs = vec![
            TestTensor::new(self.dtype, &[data.rows, columns.len() as u32], &local_qkv),
            TestTensor::new(self.dtype, &cache_dims, &cache_values)
                .with_rows(Rows::Fixed)
                .with_role(persistent),
            TestTensor::new(DType::F32, &[data.max_seq, d], &data.rope).with_rows(Rows::Fixed),
        ];
        if self.qk_norm {
            inputs.push(TestTensor::weight(self.dtype, &[d], &data.q_norm));
            inputs.push(TestTensor::weight(self.dtype, &[d], &data.k_norm));
        }
        let roles: Vec<Role> = inputs.iter().map(|t| t.role.clone()).collect();
        let attrs = self.attrs();
        let types: Vec<TensorType> = inputs
            .iter()
            .enumerate()
            .map(|(i, t)| {
                let mut ty = t.ty();
                match i {
                    0 => ty.dims[1] = self.width() as u64,
                    1 => ty.dims[1] = 2 * kv,
                    _ => {}
                }
                ty
            })
            .collect();
        let shardings = [&qkv_split, &kv_split];
        let operand =
            |name, ty: &TensorType, sharding, role| OperandView { name, ty: ty.clone(), sharding, role };
        let mut view = OpView {
            name: "test",
            attrs: &attrs,
            inputs: (0..inputs.len())
                .map(|i| {
                    let sharding = shardings.get(i).copied().unwrap_or(&Sharding::Replicated);
                    operand("input", &types[i], sharding, &roles[i])
                })
                .collect(),
            outputs: Vec::new(),
            capacity: Capacity { rows: data.rows, samples: data.active, active: data.active },
        };
        let out_types = attention.infer(&view).unwrap();
        let rule = attention.shard(&view, self.world).unwrap();
        assert_eq!(rule.outputs, vec![out_split.clone(), kv_split.clone()]);
        view.outputs = vec![
            operand("out", &out_types[0], &out_split, &Role::Activation),
            operand("cache", &out_types[1], &kv_split, &roles[1]),
        ];
        let local_out = TensorType {
            dims: vec![u64::from(data.rows), (queries.end - queries.start) * u64::from(d)],
            ..out_types[0].clone()
        };
        let mut local = LocalOp {
            global: &view,
            inputs: inputs.iter().map(TestTensor::ty).collect(),
            outputs: vec![local_out.clone(), inputs[1].ty()],
            rank,
            world: self.world,
        };
        if self.wide != 0 {
            let dims_of = if self.wide == 64 { wide_dims } else { narrow_dims };
            let dims = dims_of(local_out.dims[0], local_out.dims[1]);
            let ty = TensorType { dims, rows: Rows::Fixed, ..local_out.clone() };
            assert!(attention.writes_as(&local, 0, &ty, &Target::cpu(3)), "{ty:?}");
            local.outputs[0] = ty;
        }
        let mut target = Target::cpu(self.prefill.unwrap_or(3));
        if self.kv_heads_of_task > 1 {
            target = Target { backend: Backend::Cuda, workers: 1, ..target };
            target.tuning.set("attention.kv_heads", self.kv_heads_of_task.into());
        }
        let expansion = attention.expand(&local, &target).unwrap();
        assert_eq!(expansion.is_some(), self.splits > 1 || self.prefill.is_some());
        let mut out = TestTensor::poisoned(
            local_out.dtype,
            &local.outputs[0].dims.iter().map(|d| *d as u32).collect::<Vec<_>>(),
        );
        let expansion = expansion.unwrap_or_else(|| Expansion {
            temporaries: Vec::new(),
            ops: vec![taskgraph::task_type::ExpandedOp {
                op_type: "attention",
                suffix: "",
                inputs: (0..inputs.len()).map(ExpansionOperand::Input).collect(),
                outputs: vec![ExpansionOperand::Output(0), ExpansionOperand::Output(1)],
                attrs: Attrs::new(),
            }],
        });
        let mut temporaries: Vec<TestTensor> = expansion
            .temporaries
            .iter()
            .map(|t| {
                TestTensor::poisoned(t.ty.dtype, &t.ty.dims.iter().map(|d| *d as u32).collect::<Vec<_>>())
            })
            .collect();
        for op in &expansion.ops {
            let mut attrs = attrs.clone();
            attrs.extend(op.attrs.clone());
            let temporary_types: Vec<TensorType> = temporaries.iter().map(TestTensor::ty).collect();
            let global = |o: &ExpansionOperand| match *o {
                ExpansionOperand::Input(i) => {
                    let sharding = shardings.get(i).copied().unwrap_or(&Sharding::Replicated);
                    operand("input", &types[i], sharding, &roles[i])
                }
                ExpansionOperand::Output(0) => operand("out", &out_types[0], &out_split, &Role::Activation),
                ExpansionOperand::Output(_) => operand("cache", &out_types[1], &kv_split, &roles[1]),
                ExpansionOperand::Temporary(t) => {
                    operand("temporary", &temporary_types[t], &Sharding::Replicated, &Role::Activation)
                }
            };
            let local_type = |o: &ExpansionOperand| match *o {
                ExpansionOperand::Input(i) => local.inputs[i].clone(),
                ExpansionOperand::Output(i) => local.outputs[i].clone(),
                ExpansionOperand::Temporary(t) => temporary_types[t].clone(),
            };
            let view = OpView {
                name: "test",
                attrs: &attrs,
                inputs: op.inputs.iter().map(global).collect(),
                outputs: op.outputs.iter().map(global).collect(),
                capacity: local.global.capacity,
            };
            let expanded = LocalOp {
                global: &view,
                inputs: op.inputs.iter().map(local_type).collect(),
                outputs: op.outputs.iter().map(local_type).collect(),
                rank,
                world: self.world,
            };
            let contract = registry.get(op.op_type).unwrap();
            if op.op_type == "attention_merge" {
                assert_eq!(contract.infer(&view).unwrap(), vec![local_out.clone()]);
            }
            let partition = contract.partition(&expanded, &target).unwrap();
            for (i, o) in op.outputs.iter().enumerate() {
                if *o != ExpansionOperand::Output(1) {
                    let dims: Vec<u32> = expanded.outputs[i].dims.iter().map(|d| *d as u32).collect();
                    assert_covered_once(&partition, i as u8, &dims);
                }
            }
            // The order does not matter: last first here.
            let numbered = partition.tasks.iter().enumerate();
            for (_, spec) in numbered.rev().filter(|(number, _)| runs(op.op_type, *number)) {
                let mut task = TestTask {
                    params: partition.params.clone(),
                    args: spec.args,
                    scratch_bytes: partition.scratch_bytes,
                    ..TestTask::default()
                };
                let mut tensor = |o: &ExpansionOperand, access| match *o {
                    ExpansionOperand::Input(i) => inputs[i].view(access),
                    ExpansionOperand::Output(0) => out.view(access),
                    ExpansionOperand::Output(_) => inputs[1].view(access),
                    ExpansionOperand::Temporary(t) => temporaries[t].view(access),
                };
                task.inputs =
                    spec.reads.iter().map(|r| tensor(&op.inputs[usize::from(r.operand)], r)).collect();
                task.outputs =
                    spec.writes.iter().map(|w| tensor(&op.outputs[usize::from(w.operand)], w)).collect();
                let code = run_task(op.op_type, &task, batch, &TestRank::default(), Call::Run);
                assert_eq!(code, 0, "{self:?}");
            }
        }
        if self.wide != 0 {
            out = rows_of(self.wide, &local_out, &out);
        }
        (out, inputs.swap_remove(1))
    }

    /// Compares output and cache with the reference.
    pub(super) fn check(&self, data: &Data, rank: u32, out: &TestTensor, cache: &TestTensor) {
        let d = self.head_dim as usize;
        let (h, kv) = (u64::from(self.heads), u64::from(self.kv_heads));
        let queries = Split::Queries { heads: h, head_dim: 1 }.range(h, rank, self.world);
        let key_values = Split::KeyValues { heads: h, kv_heads: kv, head_dim: 1 }.range(kv, rank, self.world);
        let local_kv = (key_values.end - key_values.start) as u32;
        // Half a unit in the last place of the act dtype, plus the effect of a query or key that is rounded
        // the other way.
        let (output_error, cache_error) = match self.dtype {
            DType::Bf16 => (2e-2, 1.0 / 128.0),
            DType::F16 => (3e-3, 1.0 / 1024.0),
            _ => (1e-5, 1e-5),
        };
        let mut expected_cache = vec![f32::NAN; cache.values().len()];
        let out_values = out.values();
        let out_width = (queries.end - queries.start) as usize * d;
        let mut row = 0;
        for (a, (context, new)) in self.slots.iter().enumerate() {
            let slot = &data.slots[a];
            for p in 0..context + new {
                for (head, global) in key_values.clone().enumerate() {
                    for (value, from) in [(false, &slot.keys), (true, &slot.values)] {
                        let at = self.cache_at(data, a, p, local_kv, head as u32, value);
                        expected_cache[at..at + d].copy_from_slice(&from[p as usize][global as usize]);
                    }
                }
            }
            for p in *context..context + new {
                let token = self.token(a, p);
                for (local, head) in queries.clone().enumerate() {
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
                            .map(|k| k[(head / (h / kv)) as usize].clone())
                            .collect()
                    };
                    let (keys, values) = (of(&slot.keys), of(&slot.values));
                    let expected = attend(
                        &q,
                        &keys.iter().map(Vec::as_slice).collect::<Vec<_>>(),
                        &values.iter().map(Vec::as_slice).collect::<Vec<_>>(),
                        f64::from(self.head_dim).powf(-0.5),
                    );
                    let got = &out_values[row * out_width + local * d..][..d];
                    for (c, (g, e)) in got.iter().zip(&expected).enumerate() {
                        let error = (f64::from(*g) - e).abs();
                        assert!(
                            error <= output_error * e.abs().max(1.0),
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
        for (i, (g, e)) in cache.values().iter().zip(&expected_cache).enumerate() {
            let close = (g.is_nan() && e.is_nan())
                || f64::from((g - e).abs()) <= cache_error * f64::from(e.abs()).max(0.1);
            assert!(close, "{self:?}: cache element {i} is {g}, expected {e}");
        }
    }

    /// Checks all ranks and levels; the levels give the same bits.
    pub(super) fn verify(&self) {
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

/// A tensor in `MPK_LAYOUT_WIDE` as rows. Rows of its tiles that the tensor does not have must be unwritten.
fn rows_of(width: u32, ty: &TensorType, wide: &TestTensor) -> TestTensor {
    let (rows, columns) = (ty.dims[0] as usize, ty.dims[1] as usize);
    let index = if width == 64 { wide_index } else { narrow_index };
    let values = wide.values();
    let mut known = vec![false; values.len()];
    let mut found = Vec::with_capacity(rows * columns);
    for row in 0..rows {
        for column in 0..columns {
            let at = index(row, column, columns);
            assert!(!std::mem::replace(&mut known[at], true));
            found.push(values[at]);
        }
    }
    assert!(values.iter().zip(&known).all(|(value, known)| *known || value.is_nan()));
    TestTensor::new(ty.dtype, &[rows as u32, columns as u32], &found)
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}
