//! Runs a case on one rank: the contract makes the tasks, and the kernels run them.

use super::data::Data;
use super::{Case, EPS, LocalHeads};
use crate::abi::{self, mpk_operand};
use crate::layout::{narrow_index, wide_index};
use crate::registry::registry;
use crate::tasks::attention::{kv_region_dims, kv_sharding, qkv_sharding};
use crate::tasks::wide::{narrow_dims, wide_dims};
use crate::testing::{Call, TestBatch, TestRank, TestTask, TestTensor, assert_covered_once, run_task};
use serde_json::json;
use taskgraph::op_graph::{Attrs, Role};
use taskgraph::task_type::{
    Access, ExpandedOp, Expansion, ExpansionOperand, LocalOp, OpView, OperandView, TensorType,
};
use taskgraph::{Backend, Capacity, DType, Rows, Sharding, Split, Target};

/// The operator's operands with all heads.
struct Global {
    inputs: Vec<TensorType>,
    roles: Vec<Role>,
    /// Empty until they are inferred.
    outputs: Vec<TensorType>,
    qkv_sharding: Sharding,
    cache_sharding: Sharding,
    out_sharding: Sharding,
    capacity: Capacity,
}

impl Global {
    fn input(&self, i: usize) -> OperandView<'_> {
        let sharding = match i {
            0 => &self.qkv_sharding,
            1 => &self.cache_sharding,
            _ => &Sharding::Replicated,
        };
        OperandView { name: "input", ty: self.inputs[i].clone(), sharding, role: &self.roles[i] }
    }

    fn output(&self, i: usize) -> OperandView<'_> {
        let ty = self.outputs[i].clone();
        match i {
            0 => OperandView { name: "out", ty, sharding: &self.out_sharding, role: &Role::Activation },
            _ => OperandView { name: "cache", ty, sharding: &self.cache_sharding, role: &self.roles[1] },
        }
    }

    /// The operator, with the outputs that are known.
    fn op<'a>(&'a self, attrs: &'a Attrs) -> OpView<'a> {
        OpView {
            name: "test",
            attrs,
            inputs: (0..self.inputs.len()).map(|i| self.input(i)).collect(),
            outputs: (0..self.outputs.len()).map(|i| self.output(i)).collect(),
            capacity: self.capacity,
        }
    }
}

/// The tensors of a rank. Output 1 is the cache, which is input 1.
struct Tensors {
    inputs: Vec<TestTensor>,
    out: TestTensor,
    temporaries: Vec<TestTensor>,
}

impl Tensors {
    fn view(&mut self, operand: ExpansionOperand, access: &Access) -> mpk_operand {
        let tensor = match operand {
            ExpansionOperand::Input(i) => &mut self.inputs[i],
            ExpansionOperand::Output(0) => &mut self.out,
            ExpansionOperand::Output(_) => &mut self.inputs[1],
            ExpansionOperand::Temporary(t) => &mut self.temporaries[t],
        };
        tensor.view(access)
    }

    fn views(&mut self, operands: &[ExpansionOperand], accesses: &[Access]) -> Vec<mpk_operand> {
        accesses.iter().map(|access| self.view(operands[usize::from(access.operand)], access)).collect()
    }
}

impl Case {
    fn attrs(&self) -> Attrs {
        let attrs = json!({"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim,
            "qk_norm": self.qk_norm, "eps": EPS, "splits": self.splits, "prefill": self.prefill.is_some()});
        let mut attrs = attrs.as_object().unwrap().clone();
        if self.window != 0 {
            attrs.insert("window".to_string(), self.window.into());
        }
        attrs
    }

    fn target(&self) -> Target {
        let mut target = Target::cpu(self.prefill.unwrap_or(3));
        if self.kv_heads_of_task > 1 {
            target = Target { backend: Backend::Cuda, workers: 1, ..target };
            target.tuning.set("attention.kv_heads", self.kv_heads_of_task.into());
        }
        target
    }

    /// The operator's inputs on a rank with these heads. The cache has the tokens of earlier iterations.
    fn inputs(&self, data: &Data, local: &LocalHeads) -> Vec<TestTensor> {
        let (h, kv, d) = (u64::from(self.heads), u64::from(self.kv_heads), self.head_dim);
        let (queries, key_values, local_kv) = (&local.queries, &local.key_values, local.num_key_values());
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
        let persistent = Role::Persistent { region_dims: Some(kv_region_dims(data.active, kv)) };
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
        inputs
    }

    /// The operands with all heads, of which a rank has these inputs.
    fn global(&self, data: &Data, inputs: &[TestTensor]) -> Global {
        let (h, kv, d) = (u64::from(self.heads), u64::from(self.kv_heads), u64::from(self.head_dim));
        let (qkv_sharding, cache_sharding, out_sharding) = if self.world == 1 {
            (Sharding::Replicated, Sharding::Replicated, Sharding::Replicated)
        } else {
            let out = Sharding::split(1, h * d, Split::Queries { heads: h, head_dim: d });
            (qkv_sharding(1, h, kv, d), kv_sharding(h, kv), out)
        };
        let mut types: Vec<TensorType> = inputs.iter().map(TestTensor::ty).collect();
        types[0].dims[1] = self.width() as u64;
        types[1].dims[1] = 2 * kv;
        Global {
            inputs: types,
            roles: inputs.iter().map(|t| t.role.clone()).collect(),
            outputs: Vec::new(),
            qkv_sharding,
            cache_sharding,
            out_sharding,
            capacity: Capacity { rows: data.rows, samples: data.active, active: data.active },
        }
    }

    /// Runs the operator on one rank; returns the output and the cache.
    pub fn run(&self, data: &Data, rank: u32) -> (TestTensor, TestTensor) {
        self.run_with(data, rank, &mut self.batch(data), |_, _| true)
    }

    /// The same with another batch, and with only some tasks, given by their type and number.
    pub fn run_with(
        &self,
        data: &Data,
        rank: u32,
        batch: &mut TestBatch,
        runs: impl Fn(&str, usize) -> bool,
    ) -> (TestTensor, TestTensor) {
        let registry = registry();
        let attention = registry.get("attention").unwrap();
        let (attrs, target, heads) = (self.attrs(), self.target(), self.local_heads(rank));
        let inputs = self.inputs(data, &heads);
        let mut global = self.global(data, &inputs);
        let (outputs, rule) = {
            let op = global.op(&attrs);
            (attention.infer(&op).unwrap(), attention.shard(&op, self.world).unwrap())
        };
        assert_eq!(rule.outputs, vec![global.out_sharding.clone(), global.cache_sharding.clone()]);
        global.outputs = outputs;
        let op = global.op(&attrs);
        let columns = (heads.queries.end - heads.queries.start) * u64::from(self.head_dim);
        let local_out = TensorType { dims: vec![u64::from(data.rows), columns], ..global.outputs[0].clone() };
        let mut local = LocalOp {
            global: &op,
            inputs: inputs.iter().map(TestTensor::ty).collect(),
            outputs: vec![local_out.clone(), inputs[1].ty()],
            rank,
            world: self.world,
        };
        if self.wide != 0 {
            let tiled = match self.wide {
                abi::MPK_WIDE_COLUMNS => wide_dims,
                abi::MPK_WIDE_NARROW => narrow_dims,
                columns => panic!("no layout has column tiles of {columns}"),
            };
            let dims = tiled(local_out.dims[0], local_out.dims[1]);
            let ty = TensorType { dims, rows: Rows::Fixed, ..local_out.clone() };
            assert!(attention.writes_as(&local, 0, &ty, &Target::cpu(3)), "{ty:?}");
            local.outputs[0] = ty;
        }
        let expansion = attention.expand(&local, &target).unwrap();
        assert_eq!(expansion.is_some(), self.splits > 1 || self.prefill.is_some());
        let expansion = expansion.unwrap_or_else(|| unexpanded(inputs.len()));
        let out = poisoned(&local.outputs[0]);
        let temporaries = expansion.temporaries.iter().map(|t| poisoned(&t.ty)).collect();
        let mut tensors = Tensors { inputs, out, temporaries };
        let temporary_types: Vec<TensorType> = tensors.temporaries.iter().map(TestTensor::ty).collect();
        for step in &expansion.ops {
            let mut attrs = attrs.clone();
            attrs.extend(step.attrs.clone());
            let global_view = |o: &ExpansionOperand| match *o {
                ExpansionOperand::Input(i) => global.input(i),
                ExpansionOperand::Output(i) => global.output(i),
                ExpansionOperand::Temporary(t) => OperandView {
                    name: "temporary",
                    ty: temporary_types[t].clone(),
                    sharding: &Sharding::Replicated,
                    role: &Role::Activation,
                },
            };
            let local_type = |o: &ExpansionOperand| match *o {
                ExpansionOperand::Input(i) => local.inputs[i].clone(),
                ExpansionOperand::Output(i) => local.outputs[i].clone(),
                ExpansionOperand::Temporary(t) => temporary_types[t].clone(),
            };
            let view = OpView {
                name: "test",
                attrs: &attrs,
                inputs: step.inputs.iter().map(global_view).collect(),
                outputs: step.outputs.iter().map(global_view).collect(),
                capacity: global.capacity,
            };
            let expanded = LocalOp {
                global: &view,
                inputs: step.inputs.iter().map(local_type).collect(),
                outputs: step.outputs.iter().map(local_type).collect(),
                rank,
                world: self.world,
            };
            let contract = registry.get(step.op_type).unwrap();
            if step.op_type == "attention_merge" {
                assert_eq!(contract.infer(&view).unwrap(), vec![local_out.clone()]);
            }
            let partition = contract.partition(&expanded, &target).unwrap();
            for (i, o) in step.outputs.iter().enumerate() {
                if *o != ExpansionOperand::Output(1) {
                    assert_covered_once(&partition, i as u8, &dims_of(&expanded.outputs[i]));
                }
            }
            // The order does not matter: last first here.
            let numbered = partition.tasks.iter().enumerate();
            for (_, spec) in numbered.rev().filter(|(number, _)| runs(step.op_type, *number)) {
                let task = TestTask {
                    params: partition.params.clone(),
                    args: spec.args,
                    inputs: tensors.views(&step.inputs, &spec.reads),
                    outputs: tensors.views(&step.outputs, &spec.writes),
                    scratch_bytes: partition.scratch_bytes,
                };
                let code = run_task(step.op_type, &task, batch, &TestRank::default(), Call::Run);
                assert_eq!(code, 0, "{self:?}");
            }
        }
        let Tensors { mut inputs, out, .. } = tensors;
        let out = if self.wide == 0 { out } else { rows_of(self.wide, &local_out, &out) };
        (out, inputs.swap_remove(1))
    }
}

/// The operator as its own only step.
fn unexpanded(num_inputs: usize) -> Expansion {
    Expansion {
        temporaries: Vec::new(),
        ops: vec![ExpandedOp {
            op_type: "attention",
            suffix: "",
            inputs: (0..num_inputs).map(ExpansionOperand::Input).collect(),
            outputs: vec![ExpansionOperand::Output(0), ExpansionOperand::Output(1)],
            attrs: Attrs::new(),
        }],
    }
}

fn dims_of(ty: &TensorType) -> Vec<u32> {
    ty.dims.iter().map(|d| *d as u32).collect()
}

/// A tensor in which nothing has been written.
fn poisoned(ty: &TensorType) -> TestTensor {
    TestTensor::poisoned(ty.dtype, &dims_of(ty))
}

/// A tensor in `MPK_LAYOUT_WIDE` as rows. Rows of its tiles that the tensor does not have must be unwritten.
fn rows_of(width: u32, ty: &TensorType, wide: &TestTensor) -> TestTensor {
    let (rows, columns) = (ty.dims[0] as usize, ty.dims[1] as usize);
    let height = wide.ty().dims[2] as usize;
    let values = wide.values();
    let mut known = vec![false; values.len()];
    let mut found = Vec::with_capacity(rows * columns);
    for row in 0..rows {
        for column in 0..columns {
            let at = match width {
                64 => wide_index(row, column, columns),
                _ => narrow_index(height, row, column, columns),
            };
            assert!(!std::mem::replace(&mut known[at], true));
            found.push(values[at]);
        }
    }
    assert!(values.iter().zip(&known).all(|(value, known)| *known || value.is_nan()));
    TestTensor::new(ty.dtype, &[rows as u32, columns as u32], &found)
}
