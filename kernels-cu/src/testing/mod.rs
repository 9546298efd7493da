//! Runs single tasks and single operators on artificial operands, without a graph, for the tests and
//! benchmarks of task types.

pub mod pushed;
mod tensor;

pub use tensor::{AlignedBytes, TestTensor, decode, encode, rounded};

use crate::abi;
use crate::isa::Isa;
use crate::registry::{KernelFn, kernel_table, registry, type_number};
use crate::sanitizer;
use std::fmt::Debug;
use taskgraph::op_graph::{Attrs, Role};
use taskgraph::task_type::{Access, LocalOp, OpError, OpView, OperandView, Partition, TensorType};
use taskgraph::{Capacity, DType, Region, Sharding, Target};

/// The batch of an iteration, in a test. Arrays are padded with 0 as needed.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)] // the fields of mpk_batch
pub struct TestBatch {
    pub iteration: u32,
    pub epoch: u32,
    /// For a task with flagged operands: `flag_count`, `flag_number`. If the count is 0: one tensor, number 0.
    pub flags: [u32; 2],
    pub num_rows: u32,
    pub num_samples: u32,
    pub num_active: u32,
    pub hash: u64,
    pub row_token: Vec<i32>,
    pub row_active: Vec<i32>,
    pub row_position: Vec<i32>,
    pub active_slot: Vec<i32>,
    pub active_first_row: Vec<i32>,
    pub active_num_rows: Vec<i32>,
    pub active_context: Vec<i32>,
    pub sample_row: Vec<i32>,
    pub sample_active: Vec<i32>,
    /// `[slots][pages_per_slot]`
    pub page_table: Vec<i32>,
    pub pages_per_slot: u32,
    pub page_size: u32,
    pub num_pages: u32,
    /// By slot; empty: every request is greedy.
    pub sampling: Vec<abi::mpk_sampling>,
    pub top_k: u32,
    pub next_token: Vec<i32>,
    pub top_token: Vec<i32>,
    pub top_logprob: Vec<f32>,
}

impl TestBatch {
    /// `rows` token rows; each is a sample and has its own active slot.
    pub fn rows(rows: u32) -> Self {
        let numbers: Vec<i32> = (0..rows as i32).collect();
        TestBatch {
            iteration: 1,
            epoch: 1,
            num_rows: rows,
            num_samples: rows,
            num_active: rows,
            row_active: numbers.clone(),
            active_slot: numbers.clone(),
            active_first_row: numbers.clone(),
            active_num_rows: vec![1; rows as usize],
            sample_row: numbers.clone(),
            sample_active: numbers,
            ..TestBatch::default()
        }
    }
}

/// The rank that a task runs on, in a test.
#[derive(Clone, Debug, Default)]
pub struct TestRank {
    /// Its number.
    pub rank: u32,
    /// Base addresses of the ranks' symmetric heaps; empty for a world of one.
    pub sym: Vec<u64>,
}

/// One hand-made task: its operands are views that the caller created.
#[derive(Clone, Debug, Default)]
pub struct TestTask {
    /// Words of the params struct.
    pub params: Vec<u32>,
    /// The task's constants.
    pub args: [i32; 8],
    /// Inputs.
    pub inputs: Vec<abi::mpk_operand>,
    /// Outputs.
    pub outputs: Vec<abi::mpk_operand>,
    /// Size of its scratch memory, which is filled with 0xff.
    pub scratch_bytes: u64,
}

/// The kernel's function to call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// The task itself: returns an abort code.
    Run,
    /// The test of its flagged inputs: returns 1 if they have all arrived.
    Ready,
}

/// Runs all tasks of an operator, in order. Each must succeed.
pub fn run_partition(
    name: &str,
    partition: &Partition,
    inputs: &mut [TestTensor],
    outputs: &mut [TestTensor],
    batch: &mut TestBatch,
) {
    for spec in &partition.tasks {
        let task = TestTask {
            params: partition.params.clone(),
            args: spec.args,
            inputs: spec.reads.iter().map(|r| inputs[usize::from(r.operand)].view(r)).collect(),
            outputs: spec.writes.iter().map(|w| outputs[usize::from(w.operand)].view(w)).collect(),
            scratch_bytes: partition.scratch_bytes,
        };
        assert_eq!(run_task(name, &task, batch, &TestRank::default(), Call::Run), 0);
    }
}

/// Calls the kernel of task type `name`. `batch` receives the fields that kernels write.
///
/// # Panics
/// The type or the function does not exist.
pub fn run_task(name: &str, task: &TestTask, batch: &mut TestBatch, rank: &TestRank, call: Call) -> i32 {
    let table = kernel_table().unwrap_or_else(|e| panic!("{e}"));
    let number = type_number(name).unwrap_or_else(|| panic!("no task type {name}"));
    let kernel = table[usize::from(number)];
    let function = if call == Call::Run { kernel.run } else { kernel.ready };
    let function = function.unwrap_or_else(|| panic!("{name} has no function for {call:?}"));
    call_kernel(function, name, task, &[], batch, rank)
}

/// Calls this function of the task type `name`. `memory`: views of the memory around the operands, which the region sanitizer
/// names in reports.
///
/// # Panics
/// The kernel writes beyond its scratch memory.
pub fn call_kernel(
    function: KernelFn,
    name: &str,
    task: &TestTask,
    memory: &[abi::mpk_operand],
    batch: &mut TestBatch,
    rank: &TestRank,
) -> i32 {
    if sanitizer::enabled() {
        sanitizer::forget(memory.as_ptr(), memory.len()).unwrap_or_else(|e| panic!("{e}"));
    }
    let number = type_number(name).unwrap_or_default();
    let mut pad = batch.clone();
    let slots = batch.page_table.len() / batch.pages_per_slot.max(1) as usize;
    let given = [&batch.row_token, &batch.active_slot, &batch.sample_row, &batch.next_token].map(Vec::len);
    let given = given.into_iter().chain([slots, batch.sampling.len()]).max().unwrap_or(0);
    let room = given.max(1 + batch.num_rows.max(batch.num_samples).max(batch.num_active) as usize);
    for array in [
        &mut pad.row_token,
        &mut pad.row_active,
        &mut pad.row_position,
        &mut pad.active_slot,
        &mut pad.active_first_row,
        &mut pad.active_num_rows,
        &mut pad.active_context,
        &mut pad.sample_row,
        &mut pad.sample_active,
        &mut pad.next_token,
    ] {
        array.resize(array.len().max(room), 0);
    }
    pad.page_table.resize(room * pad.pages_per_slot.max(1) as usize, 0);
    if !pad.sampling.is_empty() {
        pad.sampling.resize(room, abi::mpk_sampling::default());
    }
    pad.top_token.resize(pad.top_token.len().max(room * pad.top_k as usize), 0);
    pad.top_logprob.resize(pad.top_logprob.len().max(room * pad.top_k as usize), 0.0);
    let c_batch = abi::mpk_batch {
        iteration: pad.iteration,
        graph: 0,
        epoch: pad.epoch,
        num_rows: pad.num_rows,
        num_samples: pad.num_samples,
        num_active: pad.num_active,
        prompt_rows: 0,
        stop: 0,
        hash: pad.hash,
        row_token: pad.row_token.as_mut_ptr(),
        row_active: pad.row_active.as_mut_ptr(),
        row_position: pad.row_position.as_mut_ptr(),
        active_slot: pad.active_slot.as_mut_ptr(),
        active_first_row: pad.active_first_row.as_mut_ptr(),
        active_num_rows: pad.active_num_rows.as_mut_ptr(),
        active_context: pad.active_context.as_mut_ptr(),
        sample_row: pad.sample_row.as_mut_ptr(),
        sample_active: pad.sample_active.as_mut_ptr(),
        page_table: pad.page_table.as_mut_ptr(),
        sampling: if pad.sampling.is_empty() { std::ptr::null_mut() } else { pad.sampling.as_mut_ptr() },
        next_token: pad.next_token.as_mut_ptr(),
        top_token: pad.top_token.as_mut_ptr(),
        top_logprob: pad.top_logprob.as_mut_ptr(),
        token_logprob: std::ptr::null_mut(),
        active_num_samples: std::ptr::null_mut(),
        accepted: std::ptr::null_mut(),
        num_drafts: std::ptr::null_mut(),
        draft_token: std::ptr::null_mut(),
    };
    let mut config = abi::mpk_batch_config {
        max_rows: room as u32,
        max_batch: room as u32,
        max_samples: room as u32,
        page_size: pad.page_size,
        num_pages: pad.num_pages,
        pages_per_slot: pad.pages_per_slot,
        top_k: pad.top_k,
        ..Default::default()
    };
    let mut c_batch_for_rank = c_batch;
    let mut sym: Vec<*mut u8> = rank.sym.iter().map(|a| *a as *mut u8).collect();
    let mut counters = vec![0u64; 64];
    let mut control = abi::mpk_control::default();
    let c_rank = abi::mpk_rank {
        abi_version: abi::MPK_ABI_VERSION,
        rank: rank.rank,
        world: sym.len().max(1) as u32,
        num_workers: 1,
        num_graphs: 1,
        deadline_ns: 1_000_000_000,
        sym: sym.as_mut_ptr(),
        control: &raw mut control,
        batch_config: &raw mut config,
        batch: &raw mut c_batch_for_rank,
        ..Default::default()
    };
    let mut params = task.params.clone();
    params.resize(abi::MPK_MAX_PARAMS as usize, 0);
    let variant = abi::mpk_variant {
        task_type: number,
        num_params: task.params.len() as u16,
        scratch_bytes: task.scratch_bytes as u32,
        params: params.try_into().unwrap_or_else(|_| panic!("{name} has too many parameters")),
    };
    let c_graph = abi::mpk_graph {
        num_variants: 1,
        variants: &raw const variant,
        num_events: 8,
        counters: counters.as_mut_ptr(),
        num_operands: memory.len() as u32,
        operands: memory.as_ptr(),
        ..Default::default()
    };
    let flagged = task.inputs.iter().chain(&task.outputs).any(|o| u32::from(o.dtype) == abi::MPK_F32_FLAGGED);
    let c_task = abi::mpk_task {
        trigger_event: abi::MPK_EVENT_INVALID,
        num_inputs: task.inputs.len() as u16,
        num_outputs: task.outputs.len() as u16,
        task_type: number,
        args: task.args,
        flag_count: if flagged { pad.flags[0].max(1) } else { 0 },
        flag_number: pad.flags[1],
        ..Default::default()
    };
    let mut scratch = AlignedBytes::new(task.scratch_bytes as usize + 64);
    scratch.bytes_mut().fill(0xff);
    let args = abi::mpk_kernel_args {
        rank: &c_rank,
        graph: &c_graph,
        task: &c_task,
        inputs: task.inputs.as_ptr(),
        outputs: task.outputs.as_ptr(),
        params: variant.params.as_ptr(),
        batch: &c_batch,
        scratch: scratch.bytes_mut().as_mut_ptr(),
        worker: 0,
        task_index: 2,
    };
    // SAFETY: everything that the kernel reads outlives the call; the operands are views of memory that the
    // caller holds.
    let result = unsafe { function(&args) };
    let guard = &scratch.bytes()[task.scratch_bytes as usize..];
    assert!(guard.iter().all(|b| *b == 0xff), "{name} wrote beyond its {} scratch bytes", task.scratch_bytes);
    batch.next_token = pad.next_token;
    batch.top_token = pad.top_token;
    batch.top_logprob = pad.top_logprob;
    result
}

/// An operator on the only rank of a world of one.
#[derive(Clone, Debug)]
pub struct TestOp<'a> {
    /// Task type.
    pub name: &'a str,
    /// Attributes.
    pub attrs: Attrs,
    /// The capacity of an iteration.
    pub capacity: Capacity,
    /// The target that it is partitioned for.
    pub target: Target,
    /// Outputs that are also inputs: (output, input).
    pub in_place: Vec<(usize, usize)>,
}

impl<'a> TestOp<'a> {
    /// Operator `name` with one worker and room for `rows` rows, samples and slots.
    pub fn new(name: &'a str, attrs: serde_json::Value, rows: u32) -> Self {
        let attrs = match attrs {
            serde_json::Value::Object(attrs) => attrs,
            _ => Attrs::new(),
        };
        let capacity = Capacity { rows, samples: rows, active: rows };
        TestOp { name, attrs, capacity, target: Target::cpu(1), in_place: Vec::new() }
    }

    /// The same, partitioned for `workers` workers.
    pub fn workers(mut self, workers: u32) -> Self {
        self.target = Target::cpu(workers);
        self
    }

    fn view<'v>(&'v self, inputs: &'v [TestTensor]) -> OpView<'v> {
        OpView {
            name: "test",
            attrs: &self.attrs,
            inputs: inputs
                .iter()
                .map(|t| OperandView {
                    name: "input",
                    ty: t.ty(),
                    sharding: &Sharding::Replicated,
                    role: &t.role,
                })
                .collect(),
            outputs: Vec::new(),
            capacity: self.capacity,
        }
    }

    /// Types of the outputs.
    pub fn infer(&self, inputs: &[TestTensor]) -> Result<Vec<TensorType>, OpError> {
        let registry = registry();
        let contract = registry.get(self.name).unwrap_or_else(|| panic!("no contract {}", self.name));
        contract.infer(&self.view(inputs))
    }

    /// Its partition.
    pub fn partition(&self, inputs: &[TestTensor]) -> Result<Partition, OpError> {
        let registry = registry();
        let contract = registry.get(self.name).unwrap_or_else(|| panic!("no contract {}", self.name));
        let mut view = self.view(inputs);
        let outputs = contract.infer(&view)?;
        view.outputs = outputs
            .iter()
            .map(|ty| OperandView {
                name: "output",
                ty: ty.clone(),
                sharding: &Sharding::Replicated,
                role: &Role::Activation,
            })
            .collect();
        let local = LocalOp {
            global: &view,
            inputs: view.inputs.iter().map(|i| i.ty.clone()).collect(),
            outputs,
            rank: 0,
            world: 1,
        };
        contract.partition(&local, &self.target)
    }

    /// Infers, partitions and runs all tasks in order; returns the outputs (poisoned before), except those in
    /// place. Panics if the writes do not cover an output exactly once, or if a kernel fails.
    pub fn run(&self, inputs: &mut [TestTensor], batch: &mut TestBatch) -> Result<Vec<TestTensor>, OpError> {
        let types = self.infer(inputs)?;
        let partition = self.partition(inputs)?;
        Ok(run_tasks(self.name, &partition, &types, inputs, &self.in_place, batch))
    }
}

/// Runs all tasks of an operator's `partition` in order; returns the outputs (poisoned before), except those in place:
/// (output, input). Panics if the writes do not cover an output exactly once, or if a kernel fails.
pub fn run_tasks(
    name: &str,
    partition: &Partition,
    types: &[TensorType],
    inputs: &mut [TestTensor],
    in_place: &[(usize, usize)],
    batch: &mut TestBatch,
) -> Vec<TestTensor> {
    let mut outputs: Vec<TestTensor> = types
        .iter()
        .map(|ty| {
            let dims: Vec<u32> = ty.dims.iter().map(|d| *d as u32).collect();
            TestTensor::poisoned(ty.dtype, &dims).with_rows(ty.rows)
        })
        .collect();
    for (index, output) in outputs.iter().enumerate() {
        if !in_place.iter().any(|p| p.0 == index) {
            assert_covered_once(partition, index as u8, &output.dims);
        }
    }
    let table = kernel_table().unwrap_or_else(|e| panic!("{e}"));
    let kernel = type_number(name).and_then(|number| table[usize::from(number)].run);
    let kernel = kernel.unwrap_or_else(|| panic!("no kernel {name}"));
    for spec in &partition.tasks {
        let mut task = TestTask {
            params: partition.params.clone(),
            args: spec.args,
            scratch_bytes: partition.scratch_bytes,
            ..TestTask::default()
        };
        for read in &spec.reads {
            task.inputs.push(inputs[usize::from(read.operand)].view(read));
        }
        for write in &spec.writes {
            let index = usize::from(write.operand);
            let tensor = match in_place.iter().find(|p| p.0 == index) {
                Some((_, input)) => &mut inputs[*input],
                None => &mut outputs[index],
            };
            task.outputs.push(tensor.view(write));
        }
        let whole = |t: &mut TestTensor| t.view(&Access::new(0, Region::whole(&t.dims.clone())));
        let memory: Vec<_> = inputs.iter_mut().chain(&mut outputs).map(whole).collect();
        let code = call_kernel(kernel, name, &task, &memory, batch, &TestRank::default());
        assert_eq!(code, 0, "{name} failed");
    }
    let mut index = 0;
    outputs.retain(|_| {
        index += 1;
        !in_place.iter().any(|p| p.0 == index - 1)
    });
    outputs
}

/// Panics unless the writes of output `operand` cover `dims` exactly once.
pub fn assert_covered_once(partition: &Partition, operand: u8, dims: &[u32]) {
    let writes: Vec<_> = partition
        .tasks
        .iter()
        .flat_map(|t| &t.writes)
        .filter(|w| w.operand == operand)
        .map(|w| w.region)
        .collect();
    for (i, a) in writes.iter().enumerate() {
        for b in &writes[..i] {
            assert!(!a.overlaps(b), "writes {a} and {b} overlap");
        }
    }
    let covered: u64 = writes.iter().map(taskgraph::Region::volume).sum();
    let all: u64 = dims.iter().map(|d| u64::from(*d)).product();
    assert_eq!(covered, all, "writes of output {operand} do not cover {dims:?}");
}

/// Runs `f` on every level that this CPU supports, and returns the results, lowest level first. Panics if two
/// levels of multiply-adds differ (bf16 dot products, the last level, round differently).
pub fn on_all_levels<R: PartialEq + Debug>(f: impl Fn() -> R) -> Vec<R> {
    let mut results: Vec<R> = Vec::new();
    for isa in Isa::ALL {
        let Some(result) = isa.with(&f) else { continue };
        if isa != Isa::Avx512Bf16 {
            assert!(results.first().is_none_or(|first| *first == result), "{isa:?} gives other bits");
        }
        results.push(result);
    }
    results
}

/// The largest error of rounding to `dtype`, relative to the value.
pub fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::Bf16 => 1.0 / 256.0,
        DType::F16 => 1.0 / 2048.0,
        _ => 1.0 / 16_777_216.0,
    }
}

/// Numbers in (-1, 1) that depend only on `seed`.
pub fn random_values(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0xd1b5_4a32_d192_ed03;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            ((state >> 40) as f32 / (1u64 << 23) as f32) - 1.0
        })
        .collect()
}

/// Panics unless `got` is within `relative` x max(|expected|, `scale`) of `expected` everywhere.
pub fn assert_close(got: &[f32], expected: &[f64], relative: f64, scale: f64, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(*g) - e).abs();
        assert!(error <= relative * e.abs().max(scale), "{what}: element {i} is {g}, expected {e}");
    }
}
