//! Runs single tasks and single operators on made-up operands, without a graph: for the tests and benchmarks
//! of task types.

use crate::abi;
use crate::isa::Isa;
use crate::layout;
use crate::registry::{kernel_table, registry, type_number};
use half::{bf16, f16};
use std::fmt::Debug;
use taskgraph::op_graph::{Attrs, Role};
use taskgraph::task_type::{Access, LocalOp, OpError, OpView, OperandView, Partition, TensorType};
use taskgraph::{Capacity, DType, Rows, Sharding, Target};

/// Zero-filled memory, aligned to a cache line.
#[derive(Clone)]
pub struct AlignedBytes {
    lines: Vec<CacheLine>,
    len: usize,
}

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct CacheLine([u8; 64]);

impl AlignedBytes {
    /// `len` bytes of 0.
    pub fn new(len: usize) -> Self {
        AlignedBytes { lines: vec![CacheLine([0; 64]); len.div_ceil(64)], len }
    }
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the lines are `len` rounded up to 64 initialised bytes.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }
    /// The bytes, to change.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }
}

impl Debug for AlignedBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.len)
    }
}

/// A tensor of a test.
#[derive(Clone, Debug)]
pub struct TestTensor {
    /// Element type.
    pub dtype: DType,
    /// Local dimensions.
    pub dims: Vec<u32>,
    /// `MPK_LAYOUT_STRIDED` or `MPK_LAYOUT_TILED`.
    pub layout: u8,
    /// What the first dimension counts.
    pub rows: Rows,
    /// What it is for.
    pub role: Role,
    /// Its memory.
    pub data: AlignedBytes,
    /// Rank whose memory is meant: -1 this one, -2 every one.
    pub pe: i32,
}

/// `values` as bytes of `dtype`, rounded to nearest even (integers are truncated).
pub fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(values.len() * dtype.size() as usize);
    for &v in values {
        match dtype {
            DType::F32 => bytes.extend(v.to_ne_bytes()),
            DType::F16 => bytes.extend(f16::from_f32(v).to_ne_bytes()),
            DType::Bf16 => bytes.extend(bf16::from_f32(v).to_ne_bytes()),
            DType::I32 => bytes.extend((v as i32).to_ne_bytes()),
            DType::U32 => bytes.extend((v as u32).to_ne_bytes()),
            DType::U8 => bytes.push(v as u8),
            DType::F32Flagged => bytes.extend(u64::from(v.to_bits()).to_ne_bytes()),
        }
    }
    bytes
}

/// The values of bytes of `dtype`; of flagged words the value without the flag.
pub fn decode(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let word = |c: &[u8]| u32::from_ne_bytes([c[0], c[1], c[2], c[3]]);
    bytes
        .chunks_exact(dtype.size() as usize)
        .map(|c| match dtype {
            DType::F32 | DType::F32Flagged => f32::from_bits(word(c)),
            DType::F16 => f16::from_ne_bytes([c[0], c[1]]).to_f32(),
            DType::Bf16 => bf16::from_ne_bytes([c[0], c[1]]).to_f32(),
            DType::I32 => word(c) as i32 as f32,
            DType::U32 => word(c) as f32,
            DType::U8 => f32::from(c[0]),
        })
        .collect()
}

/// `values` rounded to `dtype` and back.
pub fn rounded(dtype: DType, values: &[f32]) -> Vec<f32> {
    decode(dtype, &encode(dtype, values))
}

impl TestTensor {
    /// A strided tensor of these values, row-major.
    pub fn new(dtype: DType, dims: &[u32], values: &[f32]) -> Self {
        let mut tensor = Self::poisoned(dtype, dims);
        tensor.data.bytes_mut().copy_from_slice(&encode(dtype, values));
        tensor
    }

    /// A strided tensor in which every byte is 0xff: not a number in all float types.
    pub fn poisoned(dtype: DType, dims: &[u32]) -> Self {
        let elements: u64 = dims.iter().map(|d| u64::from(*d)).product();
        let mut data = AlignedBytes::new((elements * dtype.size()) as usize);
        data.bytes_mut().fill(0xff);
        TestTensor {
            dtype,
            dims: dims.to_vec(),
            layout: abi::MPK_LAYOUT_STRIDED as u8,
            rows: Rows::Tokens,
            role: Role::Activation,
            data,
            pe: -1,
        }
    }

    /// A weight [rows, k] in tiled layout, or a vector, which stays as it is.
    pub fn weight(dtype: DType, dims: &[u32], values: &[f32]) -> Self {
        let mut tensor = Self::new(dtype, dims, values);
        if let [rows, k] = *dims {
            let source = encode(dtype, values);
            tensor.layout = abi::MPK_LAYOUT_TILED as u8;
            tensor.data = AlignedBytes::new(layout::tiled_bytes(rows as usize, k as usize, dtype));
            let (rows, k) = (rows as usize, k as usize);
            layout::pack_rows(tensor.data.bytes_mut(), dtype, k, 0, &source, dtype, k, 0..k, rows);
        }
        tensor.rows = Rows::Fixed;
        tensor.role = Role::Weight { parts: Vec::new() };
        tensor
    }

    /// The same tensor with rows that count this.
    pub fn with_rows(mut self, rows: Rows) -> Self {
        self.rows = rows;
        self
    }

    /// The same tensor with another role.
    pub fn with_role(mut self, role: Role) -> Self {
        self.role = role;
        self
    }

    /// Its values, row-major (strided tensors).
    pub fn values(&self) -> Vec<f32> {
        decode(self.dtype, self.data.bytes())
    }

    /// Its 4-byte words.
    pub fn words(&self) -> Vec<u32> {
        self.data.bytes().chunks_exact(4).map(|c| u32::from_ne_bytes([c[0], c[1], c[2], c[3]])).collect()
    }

    /// Its type, dimensions taken as they are.
    pub fn ty(&self) -> TensorType {
        TensorType {
            dtype: self.dtype,
            dims: self.dims.iter().map(|d| u64::from(*d)).collect(),
            rows: self.rows,
        }
    }

    /// The operand that a task gets for this access (which must start at a whole tile in a tiled tensor).
    pub fn view(&mut self, access: &Access) -> abi::mpk_operand {
        let mut operand = abi::mpk_operand {
            addr: self.data.bytes_mut().as_mut_ptr() as u64,
            dims: [1; 4],
            strides: [0; 4],
            dtype: self.dtype as u8,
            ndim: self.dims.len() as u8,
            layout: self.layout,
            symmetric: u8::from(self.pe != -1),
            pe: self.pe,
        };
        let mut stride = 1u32;
        for d in (0..self.dims.len()).rev() {
            operand.strides[d] = stride;
            stride *= self.dims[d];
        }
        let tiled = self.layout == abi::MPK_LAYOUT_TILED as u8;
        if tiled {
            operand.strides[0] = self.dims[1].next_multiple_of(abi::MPK_TILE_K);
        }
        let mut offset = 0u64;
        for d in 0..self.dims.len() {
            let (lo, hi) = if access.whole_view {
                (0, self.dims[d])
            } else {
                (access.region.lo[d], access.region.hi[d])
            };
            assert!(lo <= hi && hi <= self.dims[d], "region {} outside of {:?}", access.region, self.dims);
            operand.dims[d] = hi - lo;
            offset += u64::from(lo) * u64::from(operand.strides[d]);
            assert!(!tiled || if d == 0 { lo % 16 == 0 } else { (lo, hi) == (0, self.dims[d]) });
        }
        operand.addr += offset * self.dtype.size();
        operand
    }
}

/// What an iteration works on, in a test. Arrays are padded with 0 as needed.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)] // the fields of mpk_batch
pub struct TestBatch {
    pub iteration: u32,
    pub epoch: u32,
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
    pub top_k: u32,
    pub next_token: Vec<i32>,
    pub top_token: Vec<i32>,
    pub top_logprob: Vec<f32>,
}

impl TestBatch {
    /// `rows` token rows, each a sample of its own and an active slot of its own.
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

/// One task by hand: operands are views that the caller made.
#[derive(Clone, Debug, Default)]
pub struct TestTask {
    /// Words of the params struct.
    pub params: Vec<u32>,
    /// The task's own constants.
    pub args: [i32; 8],
    /// Inputs.
    pub inputs: Vec<abi::mpk_operand>,
    /// Outputs.
    pub outputs: Vec<abi::mpk_operand>,
    /// Scratch that it is given; filled with 0xff.
    pub scratch_bytes: u64,
}

/// Which of a kernel's functions to call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// The task itself: gives an abort code.
    Run,
    /// The test for its flagged inputs: gives 1 when they are all there.
    Ready,
}

/// Calls the kernel of task type `name`. `batch` gets the fields that kernels write.
///
/// # Panics
/// Where the type or the function does not exist.
pub fn run_task(name: &str, task: &TestTask, batch: &mut TestBatch, rank: &TestRank, call: Call) -> i32 {
    let number = type_number(name).unwrap_or_else(|| panic!("no task type {name}"));
    let kernel = kernel_table()[usize::from(number)];
    let function = if call == Call::Run { kernel.run } else { kernel.ready };
    let function = function.unwrap_or_else(|| panic!("{name} has no function for {call:?}"));

    let mut pad = batch.clone();
    let room = 1 + batch.num_rows.max(batch.num_samples).max(batch.num_active) as usize;
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
    pad.page_table.push(0);
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
        next_token: pad.next_token.as_mut_ptr(),
        top_token: pad.top_token.as_mut_ptr(),
        top_logprob: pad.top_logprob.as_mut_ptr(),
    };
    let mut config = abi::mpk_batch_config {
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
    let c_graph = abi::mpk_graph { num_events: 8, counters: counters.as_mut_ptr(), ..Default::default() };
    let c_task = abi::mpk_task {
        trigger_event: abi::MPK_EVENT_INVALID,
        num_inputs: task.inputs.len() as u16,
        num_outputs: task.outputs.len() as u16,
        task_type: number,
        args: task.args,
        ..Default::default()
    };
    let mut params = task.params.clone();
    params.resize(abi::MPK_MAX_PARAMS as usize, 0);
    let mut scratch = AlignedBytes::new(task.scratch_bytes as usize + 64);
    scratch.bytes_mut().fill(0xff);
    let args = abi::mpk_kernel_args {
        rank: &c_rank,
        graph: &c_graph,
        task: &c_task,
        inputs: task.inputs.as_ptr(),
        outputs: task.outputs.as_ptr(),
        params: params.as_ptr(),
        batch: &c_batch,
        scratch: scratch.bytes_mut().as_mut_ptr(),
        worker: 0,
        task_index: 2,
    };
    // SAFETY: everything that the kernel reads outlives the call; the operands are views that the caller made
    // of memory that it holds.
    let result = unsafe { function(&args) };
    let guard = &scratch.bytes()[task.scratch_bytes as usize..];
    assert!(guard.iter().all(|b| *b == 0xff), "{name} wrote beyond its {} scratch bytes", task.scratch_bytes);
    pad.page_table.pop();
    batch.next_token = pad.next_token;
    batch.top_token = pad.top_token;
    batch.top_logprob = pad.top_logprob;
    result
}

/// An operator on one rank of a world of one.
#[derive(Clone, Debug)]
pub struct TestOp<'a> {
    /// Task type.
    pub name: &'a str,
    /// Attributes.
    pub attrs: Attrs,
    /// What an iteration has room for.
    pub capacity: Capacity,
    /// What it is cut for.
    pub target: Target,
    /// Outputs that are inputs too: (output, input).
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

    /// The same, cut for `workers` workers.
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

    /// Infers, partitions and runs all tasks in order; gives the outputs (poisoned before), those in place left
    /// out. Panics where the writes do not cover an output exactly once, or where a kernel fails.
    pub fn run(&self, inputs: &mut [TestTensor], batch: &mut TestBatch) -> Result<Vec<TestTensor>, OpError> {
        let types = self.infer(inputs)?;
        let partition = self.partition(inputs)?;
        let mut outputs: Vec<TestTensor> = types
            .iter()
            .map(|ty| {
                let dims: Vec<u32> = ty.dims.iter().map(|d| *d as u32).collect();
                TestTensor::poisoned(ty.dtype, &dims).with_rows(ty.rows)
            })
            .collect();
        for (index, output) in outputs.iter().enumerate() {
            if !self.in_place.iter().any(|p| p.0 == index) {
                assert_covered_once(&partition, index as u8, &output.dims);
            }
        }
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
                let tensor = match self.in_place.iter().find(|p| p.0 == index) {
                    Some((_, input)) => &mut inputs[*input],
                    None => &mut outputs[index],
                };
                task.outputs.push(tensor.view(write));
            }
            let code = run_task(self.name, &task, batch, &TestRank::default(), Call::Run);
            assert_eq!(code, 0, "{} failed", self.name);
        }
        let mut index = 0;
        outputs.retain(|_| {
            index += 1;
            !self.in_place.iter().any(|p| p.0 == index - 1)
        });
        Ok(outputs)
    }
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

/// Runs `f` on every level that this CPU has and gives the results, lowest level first. Panics where two levels
/// of multiply-adds differ (bf16 dot products, the last level, round differently).
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

/// What rounding to `dtype` may cost, relative to the value.
pub fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::Bf16 => 1.0 / 256.0,
        DType::F16 => 1.0 / 2048.0,
        _ => 1.0 / 16_777_216.0,
    }
}

/// Numbers in (-1, 1) that depend on `seed` only.
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
